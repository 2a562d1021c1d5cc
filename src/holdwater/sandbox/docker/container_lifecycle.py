"""Brings the container of an attempt up, and manages it from its first use to its removal, then the next one.

The image's entrypoint runs with our command, as with `docker run IMAGE COMMAND`. Callers may be cancelled
while they wait. Tasks owned by `ContainerLifecycle` therefore create, limit and remove the container, so that
no half-created one is forgotten. `sandbox.py` decides how it is created.
"""

from __future__ import annotations

import asyncio
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from ...core.errors import AttemptError, ResourceExhausted, SandboxFailed
from ...docker.client import DockerClient, DockerError, FrameDecoder
from ..capture import StreamCapture
from ..tree_stream import FileOwner, make_member
from ..watch import format_size
from .command import ContainerCommand, ExecLaunch
from .container import AttemptContainer, make_failure, make_sleep_error, remove_container, translate_errors
from .files import ContainerFiles, make_parents
from .spec import LEAST_MEMORY, READY, ContainerSpec, HealthCheck
from .watch import ContainerWatch

CLOSING = 10.0  # seconds
RENEWING = 120.0  # seconds to remove a container before the next: the attempt waits for a busy daemon
SLACK = 1.25  # lowest limit that is set, as a multiple of the memory in use

ContainerMaker = Callable[[str], Coroutine[Any, Any, AttemptContainer]]  # takes the container's name

OPENING = 30.0  # seconds
HANDING_OVER = 10.0  # seconds for an entrypoint to run the command: some never run it, and stay
ENDING = 2.0  # seconds between the end of an entrypoint's output and its exit
LOOK_AGAIN = 0.05  # seconds between checks for an exit code
PROBING = 1.0  # seconds between two health checks, at most
SHOWN = 1000  # characters of an entrypoint's output in an error
WORLD_WRITABLE = 0o777  # both the agent's and the grader's user can write requested directories

LaunchCommand = Callable[[list[str], Mapping[str, str], str | None, str | None], ExecLaunch]
FindOwner = Callable[[], Awaitable[FileOwner]]


class ContainerLifecycle:
    """Owns at most one container at a time."""

    def __init__(self, client: DockerClient, name: str, watch: ContainerWatch) -> None:
        self.leftovers: list[str] = []  # containers that could not be removed; a handful at most
        self._client = client
        self._prefix = name
        self._watch = watch
        self._count = 0
        self._making: asyncio.Task[AttemptContainer] | None = None  # awaited by `end`
        self._allowing: asyncio.Task[None] | None = None  # awaited by `end`

    @property
    def begun(self) -> bool:
        return self._making is not None

    async def ensure_container(self, make: ContainerMaker) -> AttemptContainer:
        """Return the container; create it if there is none."""
        if self._making is None:
            self._count += 1
            self._making = asyncio.ensure_future(make(f"{self._prefix}-{self._count}"))
        return await asyncio.shield(self._making)

    def allow(self) -> None:
        """Apply the current memory limit to the container."""
        if self._making is not None and (self._allowing is None or self._allowing.done()):
            self._allowing = asyncio.ensure_future(self._apply_limit(self._making))

    async def end(self, seconds: float = CLOSING) -> None:
        """Remove the container within `seconds`; record a failure in `leftovers`."""
        making, self._making = self._making, None
        if making is None:
            return
        name = f"{self._prefix}-{self._count}"
        try:
            async with asyncio.timeout(seconds):
                await asyncio.wait([task for task in (making, self._allowing) if task])
                self._watch.end()
                await remove_container(self._client, name, seconds)
        except TimeoutError:
            self.leftovers.append(f"not removed within {seconds:.0f} s: container {name}")
        except DockerError as error:
            self.leftovers.append(f"not removed: container {name}: {error.message}")
        finally:
            for task in (making, self._allowing):
                _discard_task(task)
            self._allowing = None

    async def _apply_limit(self, making: asyncio.Task[AttemptContainer]) -> None:
        try:
            container = await asyncio.shield(making)
            held = 0
            while (wanted := self._choose_limit()) and wanted != held:  # the limit may have changed meanwhile
                await container.allow(wanted)
                held = wanted
        except (DockerError, AttemptError):
            return  # the container keeps its limit

    def _choose_limit(self) -> int:
        """Return the limit to set: not so low that the memory in use would be killed."""
        wanted, group = self._watch.limits.memory_limit or 0, self._watch.group
        if group and wanted < (group.memory_limit() or wanted):
            wanted = max(wanted, int(group.memory_in_use() * SLACK))
        return max(LEAST_MEMORY, wanted)


def _discard_task(task: asyncio.Task[AttemptContainer] | asyncio.Task[None] | None) -> None:
    """Cancel a task that is not done, or mark the exception of a finished one as retrieved."""
    if task is not None and not task.done():
        task.cancel()
    elif task is not None and not task.cancelled():
        task.exception()


class ContainerStartup:
    """Starts one container that was created: `prepare_directories`, then `start`, then `wait_ready`."""

    def __init__(self, container: AttemptContainer, wanted: ContainerSpec, launch: LaunchCommand) -> None:
        self._container = container
        self._spec = wanted
        self._launch = launch

    async def prepare_directories(self, find_owner: FindOwner) -> None:
        """Create the required directories with their owner; `wait_ready` makes volumes writable."""
        wanted, files = self._spec, ContainerFiles(self._container.client, self._container.path)
        if wanted.read_only:
            return
        with translate_errors("cannot create a sandbox's directories"):
            made = []
            for path in wanted.start.directories:
                info = make_member(path.lstrip("/"), await find_owner(), tarfile.DIRTYPE)
                info.mode = WORLD_WRITABLE
                made.append((info, b""))
            if wanted.first_workdir != wanted.workdir and await files.lstat(wanted.workdir) is None:
                made += make_parents(wanted.workdir.strip("/").split("/"), await find_owner())
            if made:
                await files.put("/", made)

    async def start(self) -> None:
        """Start the container; wait until its entrypoint has run our command, or `HANDING_OVER` seconds."""
        services = self._spec.image.starts_services
        try:
            if services:
                await self._start_entrypoint()
            else:
                await self._container.start()
        except DockerError as error:
            if not services and "executable file not found" in error.message:
                raise make_sleep_error() from error
            raise make_failure(error, "cannot start a container") from error
        with translate_errors("cannot inspect a started container"):
            await self._container.inspect()

    async def wait_ready(self) -> None:
        """Make the writable paths writable for all users, and wait until the image's services are healthy."""
        wanted = self._spec
        if wanted.read_only and not wanted.as_root:
            code, output = await self._run(["chmod", "0777", *wanted.writable], "0", "/", OPENING)
            if code:
                raise SandboxFailed(f"cannot create a sandbox's directories: {output}")
        # Without an entrypoint no service runs that a check could wait for: our command replaces the image's.
        if wanted.image.health and wanted.image.starts_services:
            await self._await_health(wanted.image.health)

    async def _start_entrypoint(self) -> None:
        container, output = self._container, StreamCapture()
        query = {"stream": "true", "stdout": "true", "stderr": "true"}
        async with container.client.open_body(
            "POST", f"{container.path}/attach", query, silence=None
        ) as pieces:
            await container.start()
            if await _hands_over(pieces, output):
                return
        until = time.monotonic() + ENDING
        while (code := await container.exit_code()) is None:
            if time.monotonic() > until:
                return  # the entrypoint has closed its output, and runs
            await asyncio.sleep(LOOK_AGAIN)
        raise await self._explain_end(code, output.text().strip()[-SHOWN:])

    async def _explain_end(self, code: str, output: str) -> AttemptError:
        limit = self._spec.limits.memory_limit
        if limit and await self._container.events("oom", self._container.started_at):
            return ResourceExhausted(f"killed at {format_size(limit)}: sandbox memory")
        return SandboxFailed(
            f"the image's entrypoint ended with status {code}: {output or 'it printed nothing'}",
            'an entrypoint has to run its arguments as a command (`exec "$@"`), or keep running; '
            "`entrypoint = []` in an `images.toml` makes an image without it",
            kind="entrypoint",
        )

    async def _await_health(self, check: HealthCheck) -> None:
        """Wait for a passing check, as long as the daemon would take to call the container unhealthy."""
        image = self._spec.image
        until = time.monotonic() + check.start_period + check.retries * check.interval
        while True:
            code, output = await self._run(
                list(check.argv), image.user or "0", image.workdir or "/", check.timeout
            )
            if code == 0:
                return
            if time.monotonic() > until:
                told = output[-SHOWN:] or f"status {code}"
                raise SandboxFailed(f"the image's health check does not pass: {told}", kind="unhealthy")
            await asyncio.sleep(min(PROBING, check.interval))

    async def _run(self, argv: list[str], user: str, workdir: str, seconds: float) -> tuple[int, str]:
        command = ContainerCommand(self._container, self._launch(argv, {}, user, workdir), None)
        code = await command.finish(seconds)
        return code, (command.stdout.text() + command.stderr.text()).strip()


async def _hands_over(pieces: AsyncIterator[bytes], output: StreamCapture) -> bool:
    """Wait for the command's `READY` or the timeout; return False if the entrypoint's output has ended."""
    frames = FrameDecoder()
    try:
        async with asyncio.timeout(HANDING_OVER):
            async for piece in pieces:
                for _, content in frames.feed(piece):
                    output.feed(content)
                if READY in output.text():
                    return True
    except TimeoutError:
        return True
    return False
