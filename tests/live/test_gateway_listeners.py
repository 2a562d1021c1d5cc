"""The gateway accepts connections in the networks of commands, on sockets that a helper opens there."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.gateway_harness import Scene, scene
from tests.user_commands import find_python, name_user, run_as, staged, users
from tests.wait_bounds import stretch

from holdwater.core.config import Network
from holdwater.core.records import Limits
from holdwater.ledger.reader import LedgerReader
from holdwater.sandbox import gateway_listeners
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes
from holdwater.testing.scripted_model import ScriptedReply, serve_script

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)
KNOCK = """
exec 3<>/dev/tcp/127.0.0.1/4141
printf '%s\\r\\n' 'POST /v1/chat/completions HTTP/1.1' 'Host: a' 'Connection: close' >&3
printf '%s\\r\\n' "Authorization: Bearer $KEY" "Content-Length: ${#BODY}" '' >&3
printf '%s' "$BODY" >&3
head -n 1 <&3
"""
BODY = '{"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}'
OK, UNKNOWN = "HTTP/1.1 200 OK", "HTTP/1.1 401 Unauthorized"


class ServedSandboxes(NamedTuple):
    """A gateway, sandboxes whose commands it serves, and the first of them."""

    at: Scene
    boxes: ProcessSandboxes
    box: Any

    def open(self, attempt: int) -> Any:
        return self.boxes.open(attempt, Limits(), self.at.gateway.socket)

    @property
    def helper(self) -> int:
        assert self.boxes.listeners._helper is not None
        return self.boxes.listeners._helper.pid


@asynccontextmanager
async def serve(scratch: Path) -> AsyncIterator[ServedSandboxes]:
    boxes = ProcessSandboxes(scratch, f"listeners-{os.getpid()}", Network.GATEWAY)
    async with serve_script(lambda request: ScriptedReply(text="hello")) as upstream, scene(upstream) as at:
        boxes.use_service(at.gateway.serve_listener)
        try:
            async with boxes.open(1, Limits(), at.gateway.socket) as box:
                yield ServedSandboxes(at, boxes, box)
        finally:
            boxes.close()


async def knock(box: Any, key: str) -> str:
    """Make a model call from a command; return the status line of the answer."""
    done = await box.run(KNOCK, env={"KEY": key, "BODY": BODY}, timeout=stretch(20))
    return str(done.stdout).strip() or str(done.stderr)


async def test_a_command_calls_its_model_and_sees_no_socket_and_no_helper(tmp_path: Path) -> None:
    async with serve(tmp_path / "scratch") as served:
        answered = [await knock(served.box, served.at.session.key) for _ in range(2)]
        look = await served.box.run("ls -A /run/holdwater; cat /proc/[0-9]*/comm; grep -c . /proc/net/tcp")

    assert answered == [OK, OK]
    assert len(served.at.log.exchanges) == 2
    assert look.stdout.split() == ["home", "private", "work", "bwrap", "bash", "2"]


async def test_a_call_without_a_valid_key_is_known_by_its_sandbox(tmp_path: Path) -> None:
    refused: list[tuple[str, int | None]] = []

    async with (
        serve(tmp_path / "scratch") as served,
        served.at.gateway.open_session(2, served.at.log) as other,
    ):
        served.at.gateway.on_refused = lambda what, attempt: refused.append((what, attempt))
        async with served.open(2) as box:
            answered = [await knock(box, "hw-wrong"), await knock(box, other.key)]

    assert answered == [UNKNOWN, OK]
    assert refused == [("401 `POST chat/completions`: no attempt is running with this key", 2)]


async def test_more_commands_than_the_helper_reads_get_sockets_of_their_own_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: list[bool] = []

    async with serve(tmp_path / "scratch") as served:
        await served.box.run("true")  # starts the helper
        listeners = served.boxes.listeners
        near, open_socket = listeners._near, listeners._open
        assert near is not None
        asked: list[int] = []

        async def check(process: int) -> socket.socket:
            asked.append(process)
            listener = await open_socket(process)
            inode = os.fstat(listener.fileno()).st_ino
            own.append(f" {inode} " in Path(f"/proc/{find_pid(process)}/net/tcp").read_text())
            return listener

        monkeypatch.setattr(listeners, "_open", check)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least: a few requests
        os.kill(served.helper, signal.SIGSTOP)
        knocks = [asyncio.create_task(knock(served.box, served.at.session.key)) for _ in range(20)]
        async with asyncio.timeout(stretch(20)):
            while len(asked) < 20:
                await asyncio.sleep(0.01)
        os.kill(served.helper, signal.SIGCONT)
        answered = await asyncio.gather(*knocks)

    assert answered == [OK] * 20
    assert own == [True] * 20


def find_pid(process: int) -> str:
    return Path(f"/proc/self/fdinfo/{process}").read_text().partition("Pid:")[2].split()[0]


async def test_a_sandbox_that_opens_many_connections_loses_only_its_own(tmp_path: Path) -> None:
    """Given two sandboxes, and connections that have sent no key yet."""
    connect = "exec {fd}<>/dev/tcp/127.0.0.1/4141"
    flood = f"for n in $(seq 40); do {connect}; done; touch flooded; sleep 1000"
    wait = f"{connect}; touch connected; until [ -f go ]; do sleep 0.05; done; "
    shut: list[int | None] = []

    async with serve(tmp_path / "scratch") as served, served.at.gateway.open_session(2, served.at.log):
        served.at.gateway.connections.most_each = 16
        served.at.gateway.on_refused = lambda what, attempt: shut.append(attempt)
        async with served.open(2) as loud:
            asking = wait + "printf 'HEAD / HTTP/1.0\\r\\n\\r\\n' >&$fd; head -n 1 <&$fd"
            quiet = asyncio.create_task(served.box.run(asking))
            await until(tmp_path / "scratch/1/work/connected")
            flooding = asyncio.create_task(loud.run(flood))
            await until(tmp_path / "scratch/2/work/flooded")
            await served.box.write("go", "")
            answer = await quiet
            await loud.end_processes()
            await flooding

    assert answer.stdout.startswith("HTTP/1.0 200"), answer
    assert set(shut) == {2}


async def test_nothing_is_left_of_ended_commands(tmp_path: Path) -> None:
    async with serve(tmp_path / "scratch") as served:
        await served.box.run("true")
        before = count_files(os.getpid())
        results = await asyncio.gather(*(served.box.run("true") for _ in range(8)))
        helper = served.helper
        async with asyncio.timeout(stretch(5)):
            # Three streams and its own network. Files of an earlier test may be closed late here.
            while count_files(helper) > 4 or count_files(os.getpid()) > before:
                await asyncio.sleep(0.01)

    assert all(result.ok for result in results)
    assert not Path(f"/proc/{helper}").exists()


async def test_a_command_that_is_held_can_be_ended(tmp_path: Path) -> None:
    """Given a helper that is stopped for a while."""
    async with serve(tmp_path / "scratch") as served:
        await served.box.run("true")
        os.kill(served.helper, signal.SIGSTOP)
        late = await served.box.run("touch started", timeout=0.5)
        held = asyncio.create_task(served.box.run("touch started"))
        async with asyncio.timeout(stretch(5)):
            while not served.boxes.listeners._waiting or served.boxes.listeners._waiting[-1].done():
                await asyncio.sleep(0.01)
        held.cancel()
        await asyncio.wait([held])
        os.kill(served.helper, signal.SIGCONT)
        answered = await knock(served.box, served.at.session.key)
        started = await served.box.run("ls")

    assert late.timed_out and held.cancelled()
    assert answered == OK
    assert started.stdout == ""


async def test_a_helper_that_is_killed_is_replaced(tmp_path: Path) -> None:
    async with serve(tmp_path / "scratch") as served:
        await served.box.run("true")
        os.kill(served.helper, signal.SIGKILL)
        async with asyncio.timeout(stretch(5)):
            while served.boxes.listeners._helper is not None:
                await asyncio.sleep(0.01)
        answered = await knock(served.box, served.at.session.key)

    assert answered == OK


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="takes a privilege from root")
async def test_without_the_privilege_each_command_starts_a_forwarder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a helper that the kernel does not let into the networks of sandboxes."""
    setpriv, weak = str(shutil.which("setpriv")), tmp_path / "weak.py"
    words = [setpriv, "--bounding-set=-sys_admin", sys.executable, "-I", "-S", str(gateway_listeners.HELPER)]
    weak.write_text(f"import os, sys\nos.execv({setpriv!r}, {words!r} + sys.argv[1:])\n")
    monkeypatch.setattr(gateway_listeners, "HELPER", weak)

    async with serve(tmp_path / "scratch") as served:
        answered = [await knock(served.box, served.at.session.key) for _ in range(2)]
        look = await served.box.run("ls -A /run/holdwater")

    assert answered == [OK, OK]
    assert look.stdout.split() == ["forwarder.pyc", "gateway.sock", "home", "private", "work"]


WORKER = """
import asyncio, os, sys
from pathlib import Path
from holdwater.core.config import Network
from holdwater.core.records import Limits
from holdwater.gateway.server import Gateway
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

async def main(place):
    async with Gateway(None, place / "gateway") as gateway:
        boxes = ProcessSandboxes(place / "scratch", f"killed-{os.getpid()}", Network.GATEWAY)
        boxes.use_service(gateway.serve_listener)
        async with boxes.open(1, Limits(), gateway.socket) as box:
            await box.run("true")
            print(boxes.listeners._helper.pid, flush=True)
            await box.run("sleep 1000")

asyncio.run(main(Path(sys.argv[1])))
"""


def test_the_helper_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    words = [sys.executable, "-c", WORKER, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as worker:
        assert worker.stdout is not None
        helper = os.pidfd_open(int(worker.stdout.readline()))
        worker.kill()

    assert wait_for_exit(helper, stretch(5))


def wait_for_exit(process: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    try:
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(process)


def count_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def until(path: Path) -> None:
    async with asyncio.timeout(stretch(10)):
        while not path.exists():
            await asyncio.sleep(0.02)


SUITE = """
import holdwater as hw

KNOCK = '''
exec 3<>/dev/tcp/127.0.0.1/4141
BODY='{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
printf '%s\\r\\n' 'POST /v1/chat/completions HTTP/1.1' 'Host: a' 'Connection: close' >&3
printf '%s\\r\\n' "Authorization: Bearer $OPENAI_API_KEY" "Content-Length: ${#BODY}" '' >&3
printf '%s' "$BODY" >&3
head -n 1 <&3 > seen.txt
ls -A /run/holdwater >> seen.txt
'''

async def setup(instance, sandbox):
    await sandbox.write("knock.sh", KNOCK)

async def grade(instance, sandbox, answer):
    seen = (await sandbox.read("seen.txt")).decode()
    passed = seen.startswith("HTTP/1.1 200") and "forwarder" not in seen
    return hw.Grade(passed=passed, score=float(passed), detail=seen)

suite = hw.Suite(name="knocks", instances=lambda: [hw.Instance(id="one")], setup=setup, grade=grade)
"""


@pytest.mark.parametrize("user", users(), ids=name_user)
def test_a_run_of_an_ordinary_user_has_no_forwarder_either(user: int) -> None:
    with staged(user) as place:
        (place / "suite.py").write_text(SUITE)
        words = ("run", f"{place}/suite.py:suite", "--agent", "command", "--command", "bash knock.sh")
        more = ("--model", "scripted", "--out", f"{place}/run", "--workers", "1", "--quiet", "--json")
        done = run_as(user, [find_python(user), "-m", "holdwater", *words, *more], stretch(60))
        with LedgerReader(place / "run") as reader:
            [row] = reader.attempts()

    assert done.returncode == 0 and row.kind == "passed", f"{done.stderr}{row}"
