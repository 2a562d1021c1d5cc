"""stdout is one JSON document whatever agents write and however; a line of an attempt is in its own file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import SOURCE, Scene
from tests.in_process_run import all_passed, kinds
from tests.wait_bounds import stretch

COUNT = 8
LINES = 25  # of each kind, by each attempt
KINDS = ("print", "stderr", "log", "thread", "executor", "aside")
LOUD = """
import asyncio
import concurrent.futures
import ctypes
import logging
import os
import subprocess
import sys
import threading

import holdwater as hw

log = logging.getLogger("loud")
libc = ctypes.CDLL(None)


def instances():
    threading.Thread(target=background).start()
    for n in range(COUNT):
        log.warning("from the suite: %d", n)
        yield hw.Instance(id=f"i{n}")


def said(kind, instance, n):
    return f"<{kind} {instance.id} {n}>"


def below(instance):
    '''Everything that goes past Python.'''
    libc.puts(f"from C {instance.id}".encode())
    libc.fflush(None)
    libc.write(1, b"{ raw\\n", 6)
    os.write(1, b"os.write to 1\\n")
    os.write(2, b"os.write to 2\\n")
    subprocess.run(["sh", "-c", "echo from a child; echo from a child >&2"])
    subprocess.run("echo by a shell", shell=True, close_fds=False)
    sys.__stdout__.write("past the stream\\n")
    sys.__stdout__.flush()


def of_a_thread(kind, instance):
    for n in range(LINES):
        log.info(said(kind, instance, n))


async def solve(instance, sandbox, model):
    thread = threading.Thread(target=of_a_thread, args=("thread", instance))
    thread.start()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: log.info(said("executor", instance, n)), range(LINES)))
    for n in range(LINES):
        print(said("print", instance, n))
        print(said("stderr", instance, n), file=sys.stderr)
        log.info(said("log", instance, n))
        await asyncio.to_thread(log.info, said("aside", instance, n))
    below(instance)
    while thread.is_alive():
        await asyncio.sleep(0.01)


def grade(instance, sandbox, answer):
    return True


def background():
    '''A thread of no attempt, as libraries have them.'''
    log.warning("of no attempt in process %d", os.getpid())


if "worker" in sys.argv[0]:
    threading.Timer(0.1, background).start()
suite = hw.Suite(name="loud", instances=instances, grade=grade)
"""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    scene.suite(LOUD, COUNT=COUNT, LINES=LINES)
    yield scene
    scene.close()


@contextmanager
def stderr(how: str, place: Path) -> Iterator[Any]:
    """A descriptor that is read, or one that nobody reads and that is full already."""
    if how == "blocked":
        read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            while os.write(write, b"x" * 4096):
                pass
        except BlockingIOError:
            os.set_blocking(write, True)
        yield write
        os.close(read)
        os.close(write)
        return
    with (place / "stderr").open("wb") as file:
        yield file


@pytest.mark.parametrize("how", ["open", "closed", "blocked"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_stdout_is_one_document_and_every_line_is_at_home(scene: Scene, workers: str, how: str) -> None:
    words = [sys.executable, "-m", "holdwater", "run", f"{scene.file}:suite", "--out", str(scene.out)]
    words += [*scene.agent(), "--json", "--workers", workers]
    shell = 'exec "$@" 2>&-' if how == "closed" else 'exec "$@"'
    with stderr(how, scene.place) as err:
        done = subprocess.run(
            ["sh", "-c", shell, "sh", *words],
            stdout=subprocess.PIPE,
            stderr=err,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            timeout=stretch(60),
            check=False,
        )

    summary = json.loads(done.stdout)
    assert (done.returncode, summary["outcomes"]) == (0, {"passed": COUNT})
    assert kinds(scene.out) == all_passed(COUNT)
    assert_lines_at_home(scene.out)
    elsewhere = (scene.out / "run.log").read_text()
    assert elsewhere.count("from the suite: ") == COUNT
    assert "<" not in elsewhere, "a line of an attempt"
    if how == "open":
        told = (scene.place / "stderr").read_text()
        assert told.count("from the suite: ") == COUNT, "records of no attempt reach stderr"
        assert "from C" not in told and "<" not in told


def assert_lines_at_home(out: Path) -> None:
    """Each attempt's file holds every line of that attempt, once, and none of another."""
    expected = {f"<{kind} i{i} {n}>" for kind in KINDS for i in range(COUNT) for n in range(LINES)}
    for path in (out / "logs").glob("0*.log"):
        own = path.stem.split("-", 1)[1]
        found = re.findall(r"<\w+ i\d+ \d+>", path.read_text())
        assert {line.split()[1] for line in found} == {own}
        assert len(found) == len(set(found)) == len(KINDS) * LINES
        expected -= set(found)
    assert expected == set()


def test_a_log_record_outside_any_attempt_reaches_stderr_and_the_run_log(scene: Scene) -> None:
    scene.suite(
        LOUD.replace("    below(instance)\n", "    await asyncio.sleep(2)\n"),
        COUNT=2,
        LINES=1,
    )
    command = scene.run(*scene.agent(), "--workers", "1", "--concurrency", "2")

    assert command.wait(60) == 0, command
    worker = {row for row in command.stderr.splitlines() if "of no attempt in process" in row}
    logged = {row for row in (scene.out / "run.log").read_text().splitlines() if "of no attempt in" in row}
    assert len({row.split()[-1] for row in worker}) == 2, "the conductor's and the worker's"
    assert worker == logged


def test_a_stderr_that_is_never_read_does_not_hold_up_a_run(scene: Scene) -> None:
    """Far more records of no attempt than a pipe holds."""
    source = LOUD.replace(
        'log.warning("from the suite: %d", n)', '[log.warning("x" * 1000) for _ in range(200)]'
    )
    scene.suite(source.replace("    below(instance)\n", ""), COUNT=COUNT, LINES=1)
    words = [sys.executable, "-m", "holdwater", "run", f"{scene.file}:suite", "--out", str(scene.out)]
    read, write = os.pipe()
    done = subprocess.run(
        [*words, *scene.agent(), "--json", "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=write,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        timeout=stretch(60),
        check=False,
    )
    os.close(read)
    os.close(write)

    assert json.loads(done.stdout)["outcomes"] == {"passed": COUNT}
    assert (scene.out / "run.log").stat().st_size > COUNT * 200 * 1000
