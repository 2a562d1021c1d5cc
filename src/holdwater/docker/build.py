"""The `docker` command, for what the API cannot do: builds with BuildKit, whose session is the command's.

Which of several commands can build is told by `versions.py`. The command has a configuration directory of its
own: no credentials, no builders of the user's, and one identity for all that is sent to be built.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..core.helper_environment import build_environment
from ..core.records import MiB, Record
from .client import DockerError
from .versions import DAEMON, Builder, Client, builder_of, why_not

PROGRAM = "docker"
ASKING = 30.0  # seconds for a question to the command
LONGEST_LOG = 64 * MiB  # bytes of a build's output that are kept
LAST_LINES = 40  # of a build's output, for its error message
LONGEST_PIECE = 4096  # bytes of one of them
LEAVING = 5.0  # seconds that a cancelled build gets to end its session

# The command must not outlive this process: the daemon would go on building for nobody. A thread of this
# process may hold any lock, so the child is set up by a program of its own and not between fork and exec.
_BOUND_TO_ME = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execve(sys.argv[2], sys.argv[2:], os.environ)"
)
_NOISE = re.compile(r"(#\d+ )?(sha256:[0-9a-f]{64}.*|\[internal\].*|transferring .*|DONE [\d.]+s|CACHED|-+|)")


class Build(Record, frozen=True):
    """One build: the Dockerfile goes in by its standard input."""

    dockerfile: str
    tag: str
    context: str
    arguments: dict[str, str] = msgspec.field(default_factory=dict)
    platform: str = ""
    network: str = ""  # of its RUN steps; empty: the daemon's own
    seconds: float = 3600.0


class BuildFailed(DockerError):
    """It ended with another status than 0, or not in time."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class Docker:
    """A `docker` command that can build, and its builder."""

    def __init__(
        self, client: Client, host: str, home: Path, builder: Builder, refused: Sequence[str]
    ) -> None:
        self.client = client
        self.builder = builder
        self.refused = tuple(refused)  # `path: why not`, of the commands that were found first
        self._host = host
        self._home = home

    async def build(self, build: Build, log: Path) -> None:
        """Build and tag it; raises `BuildFailed` with the last lines."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _BOUND_TO_ME, str(os.getpid())),
            *self._command(build),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_environment(self._home),
            start_new_session=True,  # a Ctrl-C at the terminal is the conductor's to answer
        )
        lines: deque[str] = deque(maxlen=LAST_LINES)
        timed_out = False
        try:
            async with asyncio.timeout(build.seconds):
                await _fed(process, build.dockerfile.encode())
                with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as into:
                    await _followed(process, into, lines)
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await _ended(process)
        if timed_out:
            raise BuildFailed(f"it took more than {build.seconds:g} s: {told(lines)}", timed_out=True)
        if process.returncode:
            raise BuildFailed(told(lines))

    def _command(self, build: Build) -> list[str]:
        how = ["build"]
        if self.client.buildx:
            how = ["buildx", "build", "--builder", self.builder.name, "--load"]
        command = [self.client.path, "-H", self._host, *how, "--progress", "plain", "--file", "-"]
        command += ["--tag", build.tag]
        command += ["--platform", build.platform] if build.platform else []
        command += ["--network", build.network] if build.network else []
        for name, value in build.arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        return [*command, build.context]


async def find_docker(host: str, home: Path, path: str) -> Docker:
    """The first `docker` of these directories (`a:b`) that can build with BuildKit in the daemon's builder.

    `home` becomes its configuration directory. Says of each one that was passed over why.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _configure(home)
    refused: list[str] = []
    for found in _programs(path):
        client = await _client(found, home)
        reason = why_not(client)
        builder = Builder()
        if not reason and client.buildx:
            builder, reason = await _builder(client, host, home)
        if not reason:
            return Docker(client, host, home, builder, refused)
        refused.append(f"`{found}`: {reason}")
    told = "; ".join(refused) or f"there is no `{PROGRAM}` in `{path}`"
    raise DockerError(f"no `{PROGRAM}` command can build with BuildKit: {told}", "install `docker-buildx`")


def told(lines: Sequence[str]) -> str:
    """The lines that say something, the last ones, as a message."""
    return (
        "\n".join(line for line in lines if not _NOISE.fullmatch(line))[-2000:].strip() or "it says nothing"
    )


def _programs(path: str) -> list[str]:
    """Each command once, in the order of the path."""
    found: dict[str, str] = {}
    for directory in path.split(os.pathsep):
        one = Path(directory or ".") / PROGRAM
        if one.is_file() and os.access(one, os.X_OK):
            found.setdefault(str(one.resolve()), str(one))
    return list(found.values())


async def _client(path: str, home: Path) -> Client:
    _, release = await _asked(path, ["--version"], home)
    status, buildx = await _asked(path, ["buildx", "version"], home)
    return Client(path=path, release=release.strip(), buildx="" if status else buildx.strip())


async def _builder(client: Client, host: str, home: Path) -> tuple[Builder, str]:
    """The builder in the daemon: one of another driver would not see the images that are there."""
    status, inspected = await _asked(client.path, ["-H", host, "buildx", "inspect", "default"], home)
    found = None if status else builder_of(inspected)
    if found is None:
        return Builder(), f"its buildx does not tell of the builder `default`: {inspected.strip()[-200:]}"
    if found.driver != DAEMON:
        return found, f"its builder `{found.name}` has the driver `{found.driver}`, not `{DAEMON}`"
    return found, ""


def _configure(home: Path) -> None:
    """Plugins that a user installed are found though the configuration is not theirs."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        user = "/"  # a user without an entry has no home to look in
    plugins = str(Path(user) / ".docker" / "cli-plugins")
    new = home / f"config.json.{os.getpid()}"
    new.write_bytes(msgspec.json.encode({"cliPluginsExtraDirs": [plugins]}))
    new.replace(home / "config.json")


def _environment(home: Path) -> Mapping[str, str]:
    return build_environment(
        DOCKER_BUILDKIT="1",
        DOCKER_CONFIG=str(home),
        HOME=str(home),
        TMPDIR=str(home),
        BUILDX_NO_DEFAULT_ATTESTATIONS="1",  # an image, not an index with papers
    )


async def _asked(path: str, arguments: list[str], home: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        path,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=_environment(home),
    )
    try:
        async with asyncio.timeout(ASKING):
            output, _ = await process.communicate()
    except TimeoutError:
        return 1, f"no answer after {ASKING:g} s"
    finally:
        await _ended(process)
    return process.returncode or 0, output.decode("utf-8", "replace")


async def _fed(process: asyncio.subprocess.Process, content: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(content)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it ended before it read everything: its status and output say why


async def _followed(process: asyncio.subprocess.Process, log: BinaryIO, lines: deque[str]) -> None:
    """Copy the output to the log, up to its bound, and keep the last lines."""
    assert process.stdout is not None
    kept, line = 0, b""
    while piece := await process.stdout.read(65536):
        log.write(piece[: max(0, LONGEST_LOG - kept)])
        log.flush()
        kept += len(piece)
        *whole, line = (line + piece).split(b"\n")
        lines.extend(_text(one) for one in whole)
        line = line[-LONGEST_PIECE:]
    lines.append(_text(line))


def _text(line: bytes) -> str:
    return line[-LONGEST_PIECE:].decode("utf-8", "replace").rstrip()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """It is gone when this returns: asked first, so that the daemon hears of it, then killed."""
    if process.returncode is not None:
        return
    try:
        process.terminate()
        async with asyncio.timeout(LEAVING):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    except ProcessLookupError:
        await process.wait()
