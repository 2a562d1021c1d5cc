"""`sandboxd`: a server that gives sandboxes of this machine to runs on other machines.

Invalid input is refused before anything starts. `serve/sandboxes/` has the server, `run/remote/` the other
side.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import Agent
from ..core.config import RunConfig
from ..core.errors import BadInput
from ..ledger.directory import RunDirectory
from ..ledger.durable_files import make_directory
from ..rollout.allocator import keep_bounded
from ..rollout.process_health import allow_files
from ..rollout.sandbox_kinds import find_kind
from ..run.conductor.signals import CommandSignals
from ..run.resources.run_places import sweep_leftovers
from ..run.setup.config import ProcessEnvironment, check_bounds, check_containers, read_environment
from ..run.setup.options import parse_settings
from ..sandbox.kernel_protection import protect_devices
from ..sandbox.scratch import claim, list_temporary_places, remove_dead_runs, temporary_prefix
from ..serve import ServerSettings
from ..serve.sandboxes.sandbox_host import SandboxHost
from ..serve.sandboxes.sandbox_server import SandboxServer
from ..version import __version__
from .serving import parse_tls, read_keys

NAME = "sandboxd"


class SandboxServerSetup(NamedTuple):
    """A sandbox server that is ready to start: everything is checked, nothing is created yet."""

    directory: Path
    config: RunConfig
    settings: ServerSettings
    client_grace: float  # seconds that a cut connection may take to come back
    builds: bool  # of Dockerfiles
    environment: ProcessEnvironment


class SandboxServerAddress(msgspec.Struct, frozen=True):
    """The first line of a server with `--json`."""

    address: str
    sandbox: str
    directory: str


def prepare_sandbox_server(
    options: Mapping[str, Any],
    access: Mapping[str, Any],
    out: Path | None,
    client_grace: float,
    *,
    builds: bool = False,
) -> SandboxServerSetup:
    """Check everything that can be checked before the server starts, and create nothing."""
    environment = read_environment()
    config = RunConfig(
        id=secrets.token_hex(8),
        suite=NAME,
        agent=NAME,
        created=time.time(),
        version=__version__,
        workers=1,
        **parse_settings(options),
    )
    kind = find_kind(config.sandbox)
    if kind.elsewhere:
        raise BadInput(f"a sandbox server needs sandboxes of its own machine: `--sandbox {config.sandbox}`")
    check_bounds(config)
    check_containers(config)
    kind.check(config, Agent(name=NAME, act=lambda: None))
    if builds and not kind.takes_images:
        raise BadInput("`--builds` requires containers", "add `--sandbox docker`")
    if client_grace < 0:
        raise BadInput(f"`--client-grace` must be at least 0: {client_grace:g}")
    settings = ServerSettings(
        listen=access["listen"],
        keys=read_keys(access["token_file"]),
        hosts=tuple(access.get("allow_host") or ()),
        tls=parse_tls(access.get("tls_cert"), access.get("tls_key")),
    )
    directory = out or environment.cache / NAME
    return SandboxServerSetup(directory.absolute(), config, settings, client_grace, builds, environment)


async def serve_sandboxes(
    setup: SandboxServerSetup,
    signals: CommandSignals,
    say: Callable[[str], None],
    announce: Callable[[SandboxServerAddress], None],
) -> None:
    """Serve until a signal; `announce` receives the address once clients can connect."""
    kind = find_kind(setup.config.sandbox)
    if kind.check_start is not None:
        await kind.check_start(setup.config)
    allow_files()
    keep_bounded()
    if not kind.takes_images:
        protect_devices()  # before any thread starts: each thread has a view of its own

    def note(event: str, message: str) -> None:
        say(f"{event} {message}")

    directory = _make_directory(setup.directory)
    with ExitStack() as stack:
        stack.enter_context(directory.lock())
        config = msgspec.structs.replace(setup.config, id=directory.identify(setup.config.id))
        stack.enter_context(signals.attach_loop(asyncio.get_running_loop()))
        root = directory.sandbox_root(config)
        stack.enter_context(claim(root))
        for place in {root.parent, *list_temporary_places()}:
            remove_dead_runs(place)
        sweep_leftovers(directory, config)
        stack.callback(sweep_leftovers, directory, config)
        if (warning := kind.warn(config)) is not None:
            say(f"warning: {warning[1]}")
        sockets = Path(tempfile.mkdtemp(prefix=temporary_prefix(config.id)))
        stack.callback(shutil.rmtree, sockets, ignore_errors=True)
        host = SandboxHost(config, directory, setup.environment, note, builds=setup.builds)
        settings = setup.settings._replace(note=note)
        async with AsyncExitStack() as inner:
            await inner.enter_async_context(host.open())
            server = SandboxServer(host, settings, sockets, setup.client_grace)
            await inner.enter_async_context(server)
            announce(SandboxServerAddress(server.address, config.sandbox, str(directory.path)))
            with signals.answer_with(lambda: _drain(server, config, say), server.leave):
                await server.over.wait()
        if host.failure is not None:
            raise host.failure


def _drain(server: SandboxServer, config: RunConfig, say: Callable[[str], None]) -> None:
    """Answer the first signal: give no more sandboxes, and end the open ones after the grace period."""
    grace = f"{server.sandboxes} open sandboxes get {config.grace:g} s"
    say(f"draining: {grace}, a second signal ends them at once")
    asyncio.get_running_loop().call_later(config.grace, server.leave)
    server.drain()


def _make_directory(path: Path) -> RunDirectory:
    """Make the directory that the server keeps between its starts: its name, its lock, and its sandboxes."""
    directory = RunDirectory(path)
    if directory.config.exists():
        raise BadInput(f"the directory holds a run: `{path}`", "give another `--out`")
    try:
        for folder in (path, directory.scratch, directory.reserve, directory.logs):
            make_directory(folder)
        directory.make_private()
    except OSError as error:
        raise BadInput(
            f"cannot make the server's directory: `{path}`: {error.strerror}",
            "choose a writable directory with `--out`",
        ) from None
    return directory
