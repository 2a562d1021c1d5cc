"""Runs the `docker` command for builds with BuildKit, and lists and removes the records of its build cache.

The API cannot provide the session that a build needs. The cache is that of the builder in the daemon, the
only builder that we use; `image/docker/ownership.py` decides which of its records are ours.

`versions.py` decides which of several commands can build. The command has its own configuration directory,
without credentials or builders of the user, and with one identity for all build contexts that it sends.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from ..core.environment import build_environment
from ..core.records import MiB, Record
from .client import DockerClient, DockerError
from .versions import (
    DAEMON_DRIVER,
    BuildxBuilder,
    DockerProgram,
    explain_unfit,
    make_prune_query,
    make_usage_query,
    parse_builder,
)

PROGRAM = "docker"
QUERY_SECONDS = 30.0  # seconds for a query to the command
LONGEST_LOG = 64 * MiB  # bytes of a build's output that are kept
LAST_LINES = 40  # last lines of a build's output, for its error message
LONGEST_PIECE = 4096  # bytes of one such line
EXIT_SECONDS = 5.0  # seconds that a cancelled build has to end its session

# The command must not outlive this process: the daemon would continue a build without a client. Any thread of
# this process may hold a lock, so a separate program sets up the child, and no code runs between fork and
# exec.
_BOUND_TO_ME = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execve(sys.argv[2], sys.argv[2:], os.environ)"
)
_NOISE = re.compile(r"(#\d+ )?(sha256:[0-9a-f]{64}.*|\[internal\].*|transferring .*|DONE [\d.]+s|CACHED|-+|)")
USAGE_PATIENCE = 30.0  # seconds to wait while the daemon serves another client's query
USAGE_PAUSE = 0.1  # seconds before the query is repeated
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)?(?:Z| ?([+-]\d\d):?(\d\d))")


class BuildRequest(Record, frozen=True):
    """One build: its Dockerfile is sent on standard input."""

    dockerfile: str
    tag: str  # empty with `output`
    context: str
    arguments: dict[str, str] = msgspec.field(default_factory=dict)
    platform: str = ""
    output: str = ""  # a directory of this machine that receives the files, in place of an image
    network: str = ""  # network of its RUN steps; empty: the daemon's default
    seconds: float = 3600.0
    cached: bool = True  # steps may come from the build cache


class BuildFailed(DockerError):
    """The build exited with a non-zero status or timed out."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class DockerCommand:
    """A `docker` command that can build, and its builder."""

    def __init__(
        self, client: DockerProgram, host: str, home: Path, builder: BuildxBuilder, refused: Sequence[str]
    ) -> None:
        self.client = client
        self.builder = builder
        self.refused = tuple(refused)  # `path: reason` of the commands that were found first and rejected
        self._host = host
        self._home = home

    async def build(self, build: BuildRequest, log: Path) -> None:
        """Build and tag an image; raise `BuildFailed` with the last lines of output."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _BOUND_TO_ME, str(os.getpid())),
            *self._command(build),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=_make_environment(self._home),
            start_new_session=True,  # the conductor handles a Ctrl-C at the terminal
        )
        lines: deque[str] = deque(maxlen=LAST_LINES)
        timed_out = False
        try:
            async with asyncio.timeout(build.seconds):
                await _feed_input(process, build.dockerfile.encode())
                with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as into:
                    await _copy_output(process, into, lines)
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            await _end_process(process)
        if timed_out:
            raise BuildFailed(
                f"timed out after {build.seconds:g} s: {summarize_output(lines)}", timed_out=True
            )
        if process.returncode:
            raise BuildFailed(summarize_output(lines))

    def _command(self, build: BuildRequest) -> list[str]:
        how = ["build"]
        if self.client.buildx:
            how = ["buildx", "build", "--builder", self.builder.name]
            how += [] if build.output else ["--load"]
        command = [self.client.path, "-H", self._host, *how, "--progress", "plain", "--file", "-"]
        command += ["--output", f"type=local,dest={build.output}"] if build.output else ["--tag", build.tag]
        command += ["--platform", build.platform] if build.platform else []
        command += ["--network", build.network] if build.network else []
        command += [] if build.cached else ["--no-cache"]
        for name, value in build.arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        return [*command, build.context]


async def find_docker(host: str, home: Path, path: str) -> DockerCommand:
    """Return the first `docker` in these directories (`a:b`) that can build with the daemon's own BuildKit.

    `home` becomes its configuration directory. The result records why each earlier command was rejected.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    _configure(home)
    refused: list[str] = []
    for found in _find_programs(path):
        client = await _probe_program(found, home)
        reason = explain_unfit(client)
        builder = BuildxBuilder()
        if not reason and client.buildx:
            builder, reason = await _find_builder(client, host, home)
        if not reason:
            return DockerCommand(client, host, home, builder, refused)
        refused.append(f"`{found}`: {reason}")
    told = "; ".join(refused) or f"there is no `{PROGRAM}` in `{path}`"
    raise DockerError(f"no `{PROGRAM}` command can build with BuildKit: {told}", "install `docker-buildx`")


def summarize_output(lines: Sequence[str]) -> str:
    """Return the last meaningful lines of the output as a message."""
    return "\n".join(line for line in lines if not _NOISE.fullmatch(line))[-2000:].strip() or "no output"


def _find_programs(path: str) -> list[str]:
    """Return each command once, in the order of the path."""
    found: dict[str, str] = {}
    for directory in path.split(os.pathsep):
        one = Path(directory or ".") / PROGRAM
        if one.is_file() and os.access(one, os.X_OK):
            found.setdefault(str(one.resolve()), str(one))
    return list(found.values())


async def _probe_program(path: str, home: Path) -> DockerProgram:
    _, release = await _run_query(path, ["--version"], home)
    status, buildx = await _run_query(path, ["buildx", "version"], home)
    return DockerProgram(path=path, release=release.strip(), buildx="" if status else buildx.strip())


async def _find_builder(client: DockerProgram, host: str, home: Path) -> tuple[BuildxBuilder, str]:
    """Return the builder in the daemon: one with another driver would not see the daemon's images."""
    status, inspected = await _run_query(client.path, ["-H", host, "buildx", "inspect", "default"], home)
    found = None if status else parse_builder(inspected)
    if found is None:
        return (
            BuildxBuilder(),
            f"its buildx does not report the builder `default`: {inspected.strip()[-200:]}",
        )
    if found.driver != DAEMON_DRIVER:
        return found, f"its builder `{found.name}` has the driver `{found.driver}`, not `{DAEMON_DRIVER}`"
    return found, ""


def _configure(home: Path) -> None:
    """Write a configuration that finds the plugins of the user, although it is not the user's own."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        user = "/"  # a user without a passwd entry has no home
    plugins = str(Path(user) / ".docker" / "cli-plugins")
    new = home / f"config.json.{os.getpid()}"
    new.write_bytes(msgspec.json.encode({"cliPluginsExtraDirs": [plugins]}))
    new.replace(home / "config.json")


def _make_environment(home: Path) -> Mapping[str, str]:
    return build_environment(
        DOCKER_BUILDKIT="1",
        DOCKER_CONFIG=str(home),
        HOME=str(home),
        TMPDIR=str(home),
        BUILDX_NO_DEFAULT_ATTESTATIONS="1",  # produce an image, not an index with attestations
    )


async def _run_query(path: str, arguments: list[str], home: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        path,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=_make_environment(home),
    )
    try:
        async with asyncio.timeout(QUERY_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        return 1, f"no answer after {QUERY_SECONDS:g} s"
    finally:
        await _end_process(process)
    return process.returncode or 0, output.decode("utf-8", "replace")


async def _feed_input(process: asyncio.subprocess.Process, content: bytes) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(content)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the command ended before it read everything: its status and output have the reason


async def _copy_output(process: asyncio.subprocess.Process, log: BinaryIO, lines: deque[str]) -> None:
    """Copy the output to the log, up to its limit, and keep the last lines."""
    assert process.stdout is not None
    kept, line = 0, b""
    while piece := await process.stdout.read(65536):
        log.write(piece[: max(0, LONGEST_LOG - kept)])
        log.flush()
        kept += len(piece)
        *whole, line = (line + piece).split(b"\n")
        lines.extend(_decode_line(one) for one in whole)
        line = line[-LONGEST_PIECE:]
    lines.append(_decode_line(line))


def _decode_line(line: bytes) -> str:
    return line[-LONGEST_PIECE:].decode("utf-8", "replace").rstrip()


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """End the process and wait for it: terminate first, which notifies the daemon, then kill."""
    if process.returncode is not None:
        return
    try:
        process.terminate()
        async with asyncio.timeout(EXIT_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    except ProcessLookupError:
        await process.wait()


class CacheRecord(Record, frozen=True):
    """One cache record, as the daemon reports it."""

    id: str
    created: float  # seconds since the epoch, on the daemon's clock
    description: str = ""
    kind: str = "regular"
    parents: tuple[str, ...] = ()
    in_use: bool = False
    shared: bool = False  # whether an image has the same layer
    size: int = 0


class BuildCache(Protocol):
    """A build cache."""

    async def records(self) -> list[CacheRecord]:
        """Return all records, also those of other users."""

    async def remove(self, record: str) -> bool:
        """Remove a record; return whether it is gone. A record in use or with children stays."""


class DaemonCache:
    """The cache of the builder in the daemon."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client

    async def records(self) -> list[CacheRecord]:
        told = await self._read_usage()
        return [_parse_record(one) for one in told.get("BuildCache") or ()]

    async def _read_usage(self) -> dict[str, Any]:
        """Query the disk usage. The daemon computes it for one client at a time and refuses the others."""
        loop = asyncio.get_running_loop()
        until = loop.time() + USAGE_PATIENCE
        while True:
            try:
                told: dict[str, Any] = await self._client.get(
                    "/system/df", make_usage_query(self._client.api)
                )
            except DockerError as error:
                if "already running" not in error.message or loop.time() > until:
                    raise
            else:
                return told
            await asyncio.sleep(USAGE_PAUSE)

    async def remove(self, record: str) -> bool:
        told = await self._client.post("/build/prune", make_prune_query(self._client.api, record))
        return record in (told.get("CachesDeleted") or ())


async def read_daemon_time(client: DockerClient) -> float:
    """Return the time on the daemon's clock, which its records use."""
    return parse_go_time((await client.get("/info"))["SystemTime"])


def parse_go_time(text: str) -> float:
    """Parse a time in Go's format; return seconds since the epoch."""
    found = _TIME.search(text)
    if found is None:
        raise DockerError(f"invalid time: {text!r}")
    offset = f"{found[4]}:{found[5]}" if found[4] else "+00:00"
    whole = datetime.fromisoformat(f"{found[1]}T{found[2]}{offset}").timestamp()
    return whole + float(found[3] or 0)


def _parse_record(one: dict[str, Any]) -> CacheRecord:
    parents = one.get("Parents") or ([one["Parent"]] if one.get("Parent") else [])
    return CacheRecord(
        id=one["ID"],
        created=parse_go_time(one["CreatedAt"]),
        description=one.get("Description", ""),
        kind=one.get("Type", "regular"),
        parents=tuple(parents),
        in_use=one.get("InUse", False),
        shared=one.get("Shared", False),
        size=one.get("Size", 0),
    )
