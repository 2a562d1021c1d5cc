"""Brings a container up: makes its directories, starts it, and waits for the services of its image.

The image's entrypoint is kept and given our command, as `docker run IMAGE COMMAND` does. `container.py` asks
the daemon; `spec.py` says which entrypoints matter.
"""

from __future__ import annotations

import asyncio
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from ...core.errors import AttemptError, ResourceExhausted, SandboxFailed
from ...docker.client import DockerError
from ...docker.frames import Frames
from ..capture import Capture
from ..watch import size
from .command import ContainerCommand, Launch
from .container import Container, no_sleep
from .failures import failure, reported
from .files import Files, Owner, directories, member
from .spec import READY, HealthCheck, Wanted

OPENING = 30.0  # seconds
HANDING_OVER = 10.0  # seconds for an entrypoint to run the command: some keep it to themselves, and stay
ENDING = 2.0  # seconds between the end of an entrypoint's output and its own end
LOOK_AGAIN = 0.05  # seconds between two questions how it ended
PROBING = 1.0  # seconds between two health checks, at most
SHOWN = 1000  # characters of what an entrypoint printed
EVERYBODY = 0o777  # directories that are asked for can be written by whoever acts, and whoever grades

LaunchCommand = Callable[[list[str], Mapping[str, str], str | None, str | None], Launch]
FindOwner = Callable[[], Awaitable[Owner]]


class ContainerStartup:
    """The beginning of one container that was created: `furnish`, then `start`, then `settle`."""

    def __init__(self, container: Container, wanted: Wanted, launch: LaunchCommand) -> None:
        self._container = container
        self._wanted = wanted
        self._launch = launch

    async def furnish(self, find_owner: FindOwner) -> None:
        """Make the directories that must be there, for whom they must be; volumes are opened in `settle`."""
        wanted, files = self._wanted, Files(self._container.client, self._container.path)
        if wanted.read_only:
            return
        with reported("cannot make a sandbox's directories"):
            made = []
            for path in wanted.start.directories:
                info = member(path.lstrip("/"), await find_owner(), tarfile.DIRTYPE)
                info.mode = EVERYBODY
                made.append((info, b""))
            if wanted.first_workdir != wanted.workdir and await files.look(wanted.workdir) is None:
                made += directories(wanted.workdir.strip("/").split("/"), await find_owner())
            if made:
                await files.put("/", made)

    async def start(self) -> None:
        """Start it; an entrypoint of its image has run our command then, or keeps it to itself."""
        services = self._wanted.image.starts_services
        try:
            if services:
                await self._start_entrypoint()
            else:
                await self._container.start()
        except DockerError as error:
            if not services and "executable file not found" in error.message:
                raise no_sleep() from error
            raise failure(error, "cannot start a container") from error
        with reported("a container was started"):
            await self._container.look()

    async def settle(self) -> None:
        """Open what is writable to every user, and wait until the image's services are healthy."""
        wanted = self._wanted
        if wanted.read_only and not wanted.as_root:
            code, output = await self._run(["chmod", "0777", *wanted.writable], "0", "/", OPENING)
            if code:
                raise SandboxFailed(f"cannot make a sandbox's directories: {output}")
        # Without an entrypoint nothing runs that a check could wait for: our command replaces the image's.
        if wanted.image.health and wanted.image.starts_services:
            await self._await_health(wanted.image.health)

    async def _start_entrypoint(self) -> None:
        container, output = self._container, Capture()
        query = {"stream": "true", "stdout": "true", "stderr": "true"}
        async with container.client.reading(
            "POST", f"{container.path}/attach", query, silence=None
        ) as pieces:
            await container.start()
            if await _hands_over(pieces, output):
                return
        until = time.monotonic() + ENDING
        while (code := await container.exit_code()) is None:
            if time.monotonic() > until:
                return  # it has closed its output, and runs
            await asyncio.sleep(LOOK_AGAIN)
        raise await self._ended(code, output.text().strip()[-SHOWN:])

    async def _ended(self, code: str, output: str) -> AttemptError:
        limit = self._wanted.limits.held_to
        if limit and await self._container.events("oom", self._container.started):
            return ResourceExhausted(f"killed at {size(limit)}: sandbox memory")
        return SandboxFailed(
            f"the image's entrypoint ended with status {code}: {output or 'it printed nothing'}",
            'an entrypoint has to run the command that it is given (`exec "$@"`), or to stay; '
            "`entrypoint = []` in an `images.toml` makes an image without it",
            kind="entrypoint",
        )

    async def _await_health(self, check: HealthCheck) -> None:
        """Wait as long as the daemon would take to call it unhealthy."""
        image = self._wanted.image
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


async def _hands_over(pieces: AsyncIterator[bytes], output: Capture) -> bool:
    """Wait until the command says that it runs, or for so long; False: the entrypoint's output has ended."""
    frames = Frames()
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
