"""Remote sandboxes as a kind of sandbox: its options, and the checks before a run.

`remote_supply.py` holds places on the server for the conductor, `sandbox/remote/` has the sandboxes of a
worker, and `serve/sandboxes/` is the server.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ...core.authoring import Agent
from ...core.config import RunConfig
from ...core.environment import SANDBOX_TOKEN
from ...core.errors import BadInput, RunFailed
from ...core.failures import SERVER
from ...core.input_checks import find_url_problem
from ...core.sandbox_kind import (
    OpenedSandboxes,
    ProvisionSite,
    SandboxKind,
    SandboxProvision,
    SandboxSite,
)
from ...core.sandbox_protocol import ServerAccess
from ...sandbox.remote.connection import RemoteConnection, ask_health
from ...sandbox.remote.sandbox import RemoteSandboxes
from ...version import __version__
from ..setup.config import ProcessEnvironment, read_environment


def find_access(config: RunConfig, environment: ProcessEnvironment) -> ServerAccess:
    """Return the access to the run's server; raise `BadInput` without a token."""
    remote = config.remote
    if remote.url is None:
        raise BadInput(
            "remote sandboxes need `--sandbox-url`", "for example `--sandbox-url https://HOST:8500`"
        )
    token = read_token(remote.token_file) if remote.token_file else environment.sandbox_token
    if not token:
        raise BadInput(
            "remote sandboxes need the token of their server",
            f"set `{SANDBOX_TOKEN}`, or give `--sandbox-token-file FILE`",
        )
    return ServerAccess(url=remote.url.rstrip("/"), token=token, ca=remote.ca)


def read_token(file: str) -> str:
    """Return the first line of a token file that only its owner can read."""
    try:
        with Path(file).open(encoding="ascii") as opened:
            mode, found = os.fstat(opened.fileno()).st_mode, opened.readline(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII"
        raise BadInput(f"cannot read `--sandbox-token-file`: `{file}`: {reason}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~stat.S_IRGRP:
        raise BadInput(f"other users can read the token in `{file}`", f"`chmod 600 {file}`")
    if not found:
        raise BadInput(f"no token in `{file}`")
    return found


@asynccontextmanager
async def _open_remote(site: SandboxSite) -> AsyncIterator[OpenedSandboxes]:
    access = msgspec.convert(site.provided, ServerAccess)
    async with RemoteConnection(access, reaches_gateway=True) as connection:
        sandboxes = RemoteSandboxes(connection, site.config.id, site.config.network)
        try:
            yield OpenedSandboxes(sandboxes, watch_loss=sandboxes.watch_loss)
        finally:
            sandboxes.close()


def _check_options(config: RunConfig, agent: Agent) -> None:
    """Refuse options that only sandboxes of this machine can follow."""
    url = config.remote.url
    if url is None:
        raise BadInput(
            "remote sandboxes need `--sandbox-url`", "for example `--sandbox-url https://HOST:8500`"
        )
    if problem := find_url_problem(url):
        raise BadInput(f"`--sandbox-url` {problem}", "the token goes into `--sandbox-token-file`")
    if urlsplit(url).scheme == "http" and not config.remote.plain and not _is_loopback(url):
        raise BadInput(
            f"`--sandbox-url` sends the token unencrypted to another machine: `{url}`",
            "use `https`, or add `--sandbox-plain` on a private network",
        )
    given = {
        "--mount": (config.mounts, "show them on the server: `holdwater sandboxd --mount`"),
        "--sandbox-read-only": (config.read_only, "`holdwater sandboxd --sandbox-read-only`"),
    }
    for flag, (value, hint) in given.items():
        if value:
            raise BadInput(f"`{flag}` does not reach the machine of remote sandboxes", hint)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _check_server(config: RunConfig) -> None:
    access = find_access(config, read_environment())
    health = await ask_health(access)
    if health.version != __version__:
        raise RunFailed(
            f"the sandbox server has another version: {health.version}, not {__version__}: `{access.url}`",
            "install the same version on both machines",
            kind=SERVER,
        )
    for flag, value in (("--image", config.image), ("--images", config.images)):
        if value and health.sandbox == "process":
            raise BadInput(f"`{flag}` requires containers", "start the server with `--sandbox docker`")


def _provide(site: ProvisionSite) -> AbstractAsyncContextManager[SandboxProvision]:
    from .remote_supply import RemoteSupply

    return RemoteSupply(site)


KIND = SandboxKind(
    open=_open_remote,
    check=_check_options,
    check_start=_check_server,
    provision=_provide,
    takes_images=True,
    elsewhere=True,
)
