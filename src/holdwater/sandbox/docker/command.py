"""One command in a container, from its start to its end; what it prints is read as it comes, and counted.

At its own end what it left in the background goes on, as it does in a container; when it is stopped, by its
timeout, a limit or its caller, its whole tree is ended. What it carries is decided in `sandbox.py`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ...core.errors import AttemptError, SandboxFailed
from ...docker.client import DockerError
from ...docker.frames import STDERR, Frames
from ..capture import Capture, Log
from ..command import finish_anyway
from .container import ASKING, Container
from .ending import Ending
from .failures import not_started, reported

FIRST_PULSE = 0.25  # seconds of silence until the daemon is asked whether it still runs, doubled each time
PULSE = 10.0  # up to this
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
KILLING = 10.0  # seconds for the tree to be found and killed
GONE = (0.5, 1.0, 5.0)  # seconds for killed processes to be gone, each time that they are killed
FIRST_LOOK = 0.005  # seconds between looks at a command that has closed its output, doubled each time
LAST_LOOK = 0.5  # up to this
SAID = "cannot run a command"


class Launch(msgspec.Struct, frozen=True):
    """How a command is started."""

    argv: Sequence[str]
    env: Mapping[str, str]
    workdir: str
    user: str
    mark: str  # a variable that its processes carry and no others
    printed: Callable[[int], AttemptError | None]  # takes how many bytes more, and says when that is too much
    population: Callable[[], int]  # how many processes there are in its sandbox
    ending: Callable[[], None]  # everything in the container is about to be ended


class ContainerCommand:
    """What `watch.py` and `sandbox.py` need to know of a command that runs."""

    def __init__(self, container: Container, launch: Launch, log: Log | None) -> None:
        self.stdout = Capture(log)
        self.stderr = Capture(log)
        self.timed_out = False
        self.stopped: AttemptError | None = None  # why it was stopped before its end
        self.left = 0  # processes of the sandbox when it had exited
        self.seconds = 0.0
        self.pid = 0  # not known here
        self._container = container
        self._client = container.client
        self._launch = launch
        self._ending = Ending(self._client, container.path, launch.user, launch.mark)
        self._over = asyncio.Event()  # it has exited, or was stopped
        self._pulse = FIRST_PULSE
        self._path = ""

    async def finish(self, timeout: float | None) -> int:
        """Start it and wait for its end, at most `timeout` seconds; its exit status."""
        started = time.monotonic()
        following = asyncio.ensure_future(self._follow())
        following.add_done_callback(lambda _: self._over.set())
        try:
            if not await _within(timeout, self._over):
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
            await finish_anyway(_ended(following))
        if following.cancelled():
            return 128 + signal.SIGKILL  # it was stopped before it was started
        with reported(SAID):
            return self._exit_code(following.result())

    def stop(self, error: AttemptError) -> None:
        """Have `finish` kill it at once; `error` says why."""
        self.stopped = self.stopped or error
        self._over.set()

    async def kill(self) -> None:
        """End what is left of its tree, whatever it does."""
        with reported(SAID):
            if not await self._signal("KILL"):
                await self._end_all()

    async def _follow(self) -> dict[str, Any]:
        """Start it and read what it prints; what the daemon says of it in the end."""
        launch = self._launch
        asked = {
            "Cmd": list(launch.argv),
            "Env": [f"{name}={value}" for name, value in launch.env.items()],
            "WorkingDir": launch.workdir,
            "User": launch.user,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        made = await self._client.post(f"{self._container.path}/exec", body=asked, seconds=ASKING)
        self._path = f"/exec/{made['Id']}"
        reading = self._client.reading("POST", f"{self._path}/start", body={}, silence=None)
        async with reading as pieces:
            frames = Frames()
            while piece := await self._next(pieces):
                for stream, content in frames.feed(piece):
                    (self.stderr if stream == STDERR else self.stdout).feed(content)
                if error := self._launch.printed(len(piece)):
                    self.stop(error)
        return await self._status()

    async def _next(self, pieces: Any) -> bytes:
        """What is printed next; nothing when it has ended, though what it left may hold its output open.

        A silence may also be that of a dead daemon.
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
                over = not (await self._asked())["Running"]

    async def _status(self) -> dict[str, Any]:
        """Wait until it has ended: it may have closed its output before."""
        wait = FIRST_LOOK
        while (told := await self._asked())["Running"]:
            await asyncio.sleep(wait)
            wait = min(LAST_LOOK, wait * 2)
        return told

    async def _asked(self) -> dict[str, Any]:
        told: dict[str, Any] = await self._client.get(f"{self._path}/json", seconds=ASKING)
        return told

    def _exit_code(self, told: dict[str, Any]) -> int:
        if not told["Pid"] and told["ExitCode"]:
            raise not_started(self.stdout.text() + self.stderr.text(), self._launch.argv[0])
        code = told["ExitCode"]
        if code is None:
            raise SandboxFailed(f"{SAID}: the daemon does not know how it ended", kind="daemon")
        return int(code)

    async def _signal(self, name: str) -> bool:
        try:
            async with asyncio.timeout(KILLING):
                return await self._ending.signal(name)
        except TimeoutError:
            return False

    async def _kill(self, following: asyncio.Future[dict[str, Any]]) -> None:
        """End the whole tree, whatever it does; all that is in the container if there is no other way."""
        if not self._path:
            return  # it was not started, and will not be
        for seconds in GONE:  # more than once: it may have been about to start
            if following.done() or not await self._signal("KILL"):
                break
            await asyncio.wait([following], timeout=seconds)
        if not following.done():
            await self._end_all()
            await asyncio.wait([following], timeout=GONE[-1])
        if not following.done():
            raise SandboxFailed("a process did not end when it was killed", kind="unkillable")

    async def _end_all(self) -> None:
        self._launch.ending()
        await self._container.restart()

    async def _abandon(self, following: asyncio.Future[dict[str, Any]]) -> None:
        """The same for a caller that does not wait: whatever fails shows at the container's next use."""
        try:
            if not following.done():
                await self._kill(following)
        except (AttemptError, DockerError):
            return


async def _ended(following: asyncio.Future[dict[str, Any]]) -> None:
    """Nothing of it is read any more; how it failed is looked at by who asks for its result."""
    following.cancel()
    await asyncio.wait([following])
    if not following.cancelled():
        following.exception()


async def _within(seconds: float | None, event: asyncio.Event) -> bool:
    """Whether `event` came within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
