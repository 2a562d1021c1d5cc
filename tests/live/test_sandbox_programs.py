"""Programs that people run, behind everything that a sandbox refuses: they work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.core.records import Limits, Network
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)
PYTHON = """
import asyncio, multiprocessing, socket, subprocess, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
with multiprocessing.Pool(2) as pool:
    assert pool.map(abs, [-1, -2]) == [1, 2]
assert subprocess.run(["true"]).returncode == 0
asyncio.run(asyncio.sleep(0)); socket.socketpair()
"""
NODE = """
const {Worker} = require("worker_threads"), files = require("fs");
files.watch(".").close(); files.writeFileSync("written", "x");
new Worker("1 + 1", {eval: true}).on("exit", () => console.log(files.readFileSync("written", "utf8")));
require("child_process").execSync("true");
"""
C = """
#include <pthread.h>
static void *nothing(void *given) { return given; }
int main(void) { pthread_t it; return pthread_create(&it, 0, nothing, 0) || pthread_join(it, 0); }
"""
JAVA = """
class A {
    public static void main(String[] words) throws Exception {
        var thread = new Thread(); thread.start(); thread.join();
    }
}
"""
COMMIT = "git -c user.name=n -c user.email=e commit -q --allow-empty -m one"
# program -> files, and a line that ends with 0 where it works
WORK = {
    "python3": (
        {"work.py": PYTHON},
        "python3 work.py && python3 -m venv --without-pip v && v/bin/python -c ''",
    ),
    "git": ({}, f"git init -q a && cd a && {COMMIT} && git gc -q && git clone -q . ../b"),
    "gcc": ({"a.c": C}, "gcc -O2 -pthread a.c -o a && ./a"),
    "node": ({"work.js": NODE}, "node work.js"),
    "npm": ({}, "npm init -y && npm --version"),
    "java": ({"A.java": JAVA}, "java A.java"),
    "strace": ({}, "strace -f -o /dev/null true"),
    "gdb": ({}, "gdb -batch -ex run -ex quit /bin/true"),
    "sysctl": ({}, "sysctl kernel.ostype && ps aux && free"),
}


@pytest.mark.parametrize("program", WORK)
async def test_a_program_works_behind_the_filter(tmp_path: Path, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip("it is not installed")
    files, line = WORK[program]
    boxes = ProcessSandboxes(tmp_path / "scratch", f"programs-{os.getpid()}", Network.GATEWAY)

    async with boxes.open(1, Limits(), None) as box:
        for path, content in files.items():
            await box.write(path, content)
        result = await box.run(line, timeout=stretch(120))

    assert result.ok, result
