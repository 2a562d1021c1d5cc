"""Runs one command in a container, from its start to its end; reads and counts its output as it arrives.

When the command exits, processes that it left in the background go on, as usual in a container. When a
timeout, a limit or the caller stops it, its whole process tree is ended: a shell script walks `/proc` and
signals the processes of this command. `sandbox.py` decides on its user and environment.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ...core.errors import AttemptError, SandboxFailed
from ...docker.client import STDERR, DockerClient, DockerError, FrameDecoder
from ..capture import CommandLog, StreamCapture
from ..command import finish_anyway, wait_within
from .container import REQUEST_TIMEOUT, AttemptContainer, make_start_error, translate_errors

FIRST_PULSE = 0.25  # seconds of silence before the daemon is queried whether it still runs; doubled each time
PULSE = 10.0  # up to this
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
KILLING = 10.0  # seconds to find and kill the process tree
GONE = (0.5, 1.0, 5.0)  # seconds for killed processes to disappear, for each round of kills
FIRST_LOOK = 0.005  # seconds between checks of a command that has closed its output; doubled each time
LAST_LOOK = 0.5  # up to this
CANNOT_RUN = "cannot run a command"

# The script uses shell builtins only. `read` drops the NULs between the variables of an environment. For
# KILL, all processes are stopped first, repeatedly until no new one is found: a process that forks without
# end would otherwise fill each slot that becomes free.
SCRIPT = """
signal=$1 mark=$2 found=' '
belongs() {
    { read -r line < "$1/stat"; } 2>/dev/null || return 1
    set -- "$1" ${line##*) }
    case $found in *" $3 "*) return 0 ;; esac
    while read -r line || [ "$line" ]; do
        case $line in *"$mark"*) return 0 ;; esac
    done 2>/dev/null < "$1/environ"
    return 1
}
look() {
    new=
    for place in /proc/[0-9]*; do
        pid=${place#/proc/}
        case $found in *" $pid "*) continue ;; esac
        if [ "$pid" != 1 ] && [ "$pid" != $$ ] && belongs "$place"; then
            kill -s "$1" "$pid" 2>/dev/null
            found="$found$pid "
            new=1
        fi
    done
    [ "$new" ]
}
if [ "$signal" = KILL ]; then
    while look STOP; do :; done
    [ "$found" = ' ' ] || kill -s KILL $found 2>/dev/null
else
    look "$signal"
fi
[ -r /proc/1/stat ]
"""


class ExecLaunch(msgspec.Struct, frozen=True):
    """How a command is started."""

    argv: Sequence[str]
    env: Mapping[str, str]
    workdir: str
    user: str
    mark: str  # a variable carried by the command's processes only
    count_output: Callable[
        [int], AttemptError | None
    ]  # takes a number of new bytes; returns an error above the limit
    population: Callable[[], int]  # returns the number of processes in the sandbox
    before_restart: Callable[[], None]  # called before everything in the container is ended


def check_words(words: Sequence[str]) -> None:
    """Refuse words that cannot be passed to a process."""
    text = "".join(words)
    if "\0" in text or any(0xD800 <= ord(letter) <= 0xDFFF for letter in set(text)):
        raise SandboxFailed("cannot start a process: a word has a NUL, or cannot be encoded", kind="spawn")


class ContainerCommand:
    """A running command, as `watch.py` and `sandbox.py` use it."""

    def __init__(self, container: AttemptContainer, launch: ExecLaunch, log: CommandLog | None) -> None:
        self.stdout = StreamCapture(log)
        self.stderr = StreamCapture(log)
        self.timed_out = False
        self.stopped: AttemptError | None = None  # why the command was stopped early
        self.left = 0  # processes in the sandbox when the command exited
        self.seconds = 0.0
        self.pid = 0  # unknown here
        self._container = container
        self._client = container.client
        self._launch = launch
        self._processes = MarkedProcesses(self._client, container.path, launch.user, launch.mark)
        self._over = asyncio.Event()  # the command exited or was stopped
        self._pulse = FIRST_PULSE
        self._path = ""

    async def finish(self, timeout: float | None) -> int:
        """Start the command and wait for its end, at most `timeout` seconds; return its exit status."""
        started = time.monotonic()
        following = asyncio.ensure_future(self._follow())
        following.add_done_callback(lambda _: self._over.set())
        try:
            if not await wait_within(timeout, self._over):
                self.timed_out = True
                await self._signal("TERM")
                await asyncio.wait([following], timeout=GRACE)
            if not following.done():
                await finish_anyway(self._kill(following))
        except asyncio.CancelledError:
            await finish_anyway(self._abandon(following))
            raise
        finally:
            self.seconds = time.monotonic() - started
            self.left = self._launch.population()
            await finish_anyway(_stop_following(following))
        if following.cancelled():
            return 128 + signal.SIGKILL  # stopped before it was started
        with translate_errors(CANNOT_RUN):
            return self._exit_code(following.result())

    def stop(self, error: AttemptError) -> None:
        """Make `finish` kill the command at once; `error` says why."""
        self.stopped = self.stopped or error
        self._over.set()

    async def kill(self) -> None:
        """Kill the rest of the command's process tree."""
        with translate_errors(CANNOT_RUN):
            if not await self._signal("KILL"):
                await self._end_all()

    async def _follow(self) -> dict[str, Any]:
        """Start the command and read its output; return the daemon's final record of it."""
        launch = self._launch
        asked = {
            "Cmd": list(launch.argv),
            "Env": [f"{name}={value}" for name, value in launch.env.items()],
            "WorkingDir": launch.workdir,
            "User": launch.user,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        made = await self._client.post(f"{self._container.path}/exec", body=asked, seconds=REQUEST_TIMEOUT)
        self._path = f"/exec/{made['Id']}"
        reading = self._client.open_body("POST", f"{self._path}/start", body={}, silence=None)
        async with reading as pieces:
            frames = FrameDecoder()
            while piece := await self._next(pieces):
                for stream, content in frames.feed(piece):
                    (self.stderr if stream == STDERR else self.stdout).feed(content)
                if error := self._launch.count_output(len(piece)):
                    self.stop(error)
        return await self._await_end()

    async def _next(self, pieces: Any) -> bytes:
        """Return the next output, or nothing when the command has ended.

        Background processes may still hold the output open then. Silence may also mean a dead daemon, so the
        daemon is queried after a while.
        """
        over = False
        while True:
            try:
                async with asyncio.timeout(FIRST_PULSE if over else self._pulse):
                    return await anext(pieces, b"")
            except TimeoutError:
                if over:
                    return b""
                self._pulse = min(PULSE, 2 * self._pulse)
                over = not (await self._inspect())["Running"]

    async def _await_end(self) -> dict[str, Any]:
        """Wait until the command has ended: it may have closed its output earlier."""
        wait = FIRST_LOOK
        while (told := await self._inspect())["Running"]:
            await asyncio.sleep(wait)
            wait = min(LAST_LOOK, wait * 2)
        return told

    async def _inspect(self) -> dict[str, Any]:
        told: dict[str, Any] = await self._client.get(f"{self._path}/json", seconds=REQUEST_TIMEOUT)
        return told

    def _exit_code(self, told: dict[str, Any]) -> int:
        if not told["Pid"] and told["ExitCode"]:
            raise make_start_error(self.stdout.text() + self.stderr.text(), self._launch.argv[0])
        code = told["ExitCode"]
        if code is None:
            raise SandboxFailed(f"{CANNOT_RUN}: the daemon reports no exit code", kind="daemon")
        return int(code)

    async def _signal(self, name: str) -> bool:
        try:
            async with asyncio.timeout(KILLING):
                return await self._processes.signal(name)
        except TimeoutError:
            return False

    async def _kill(self, following: asyncio.Future[dict[str, Any]]) -> None:
        """Kill the whole process tree; restart the container if there is no other way."""
        if not self._path:
            return  # not started, and never will be
        for seconds in GONE:  # several times: the command may have been about to start
            if following.done() or not await self._signal("KILL"):
                break
            await asyncio.wait([following], timeout=seconds)
        if not following.done():
            await self._end_all()
            await asyncio.wait([following], timeout=GONE[-1])
        if not following.done():
            raise SandboxFailed("a process did not end when it was killed", kind="unkillable")

    async def _end_all(self) -> None:
        self._launch.before_restart()
        await self._container.restart()

    async def _abandon(self, following: asyncio.Future[dict[str, Any]]) -> None:
        """Kill for a caller that does not wait: a failure shows at the container's next use."""
        try:
            if not following.done():
                await self._kill(following)
        except (AttemptError, DockerError):
            return


async def _stop_following(following: asyncio.Future[dict[str, Any]]) -> None:
    """Stop reading. A failure is raised only to the caller that requests the result."""
    following.cancel()
    await asyncio.wait([following])
    if not following.cancelled():
        following.exception()


class MarkedProcesses:
    """Signals the processes that carry a mark in one container, or descend from such a process.

    The script runs as the command's user, whose processes cannot change to another user. Root's processes
    can: for root it runs with every capability if the daemon grants them, as reading the environment of other
    users' processes needs one.
    """

    def __init__(self, client: DockerClient, container: str, user: str, mark: str) -> None:
        self._client = client
        self._container = container
        self._user = user
        self._mark = mark

    async def signal(self, name: str) -> bool:
        """Send `TERM` or `KILL` to all processes with the mark; return whether the script could run."""
        as_root = self._user.partition(":")[0] in ("", "root", "0")
        return (as_root and await self._run(name, privileged=True)) or await self._run(name, privileged=False)

    async def _run(self, name: str, privileged: bool) -> bool:
        asked = {
            "Cmd": ["sh", "-c", SCRIPT, "sh", name, self._mark],
            "User": self._user or "0",
            "Privileged": privileged,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        try:
            made = await self._client.post(f"{self._container}/exec", body=asked, seconds=REQUEST_TIMEOUT)
            path = f"/exec/{made['Id']}"
            async with self._client.open_body(
                "POST", f"{path}/start", body={}, silence=REQUEST_TIMEOUT
            ) as pieces:
                async for _ in pieces:
                    pass
            told = await self._client.get(f"{path}/json", seconds=REQUEST_TIMEOUT)
        except DockerError:
            return False
        return bool(told["Pid"]) and told["ExitCode"] == 0
