"""`serve`: a run whose samples clients order. Invalid input is rejected before anything starts.

The HTTP server is in `serve/`, the order service behind it in `run/orders/order_service.py`; the conductor
starts both.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from .. import plugin
from ..core.authoring import Agent, AgentFunction, Suite
from ..core.config import RunConfig, ServingConfig
from ..core.errors import BadInput
from ..core.options import list_options
from ..core.summary import RunSummary
from ..ledger.directory import RunDirectory
from ..rollout.allocator import keep_bounded
from ..rollout.open_files import allow_files
from ..rollout.sandbox_kinds import find_kind
from ..run.execute import create_run
from ..run.orders.order_service import OrderService
from ..run.setup.config import check_bounds, read_environment
from ..run.setup.options import RunOptions
from ..run.setup.trust import check_owner
from ..serve import RolloutServer, ServerSettings
from ..web.tokens import link_token, publish_token
from .run_hooks import RunHooks, conduct_with_hooks, make_setup
from .runs import PreparedRun, _open_upstream, prepare

POLICY_HINT = "it must be a function `(request)` that returns the reply"

_log = logging.getLogger("holdwater.serve")


class PreparedServer(msgspec.Struct, frozen=True):
    """A server that is ready to start: everything is checked, nothing is created yet."""

    run: PreparedRun
    terms: ServerSettings
    token: bool  # whether the server creates its own token, because no keys are configured
    resumed: bool  # whether the server continues an existing directory


def prepare_server(
    suite: Suite | str,
    agent: Agent | AgentFunction | str | None,
    out: str | Path | None,
    options: RunOptions,
    serving: Mapping[str, Any],
) -> PreparedServer:
    """Check everything that can be checked before a server starts, and create nothing."""
    prepared = prepare(suite, agent, out, {**options, "attempts": 1})
    config = msgspec.structs.replace(prepared.config, serving=_parse_serving(serving, prepared.config))
    terms = _make_terms(serving, config, prepared.path)
    RolloutServer.check(terms)
    before = _read_previous(prepared.path, config)
    if before is not None:
        config = msgspec.structs.replace(config, id=before.id, created=before.created)
    prepared = msgspec.structs.replace(prepared, config=config)
    token = not terms.keys and not serving.get("no_key")
    return PreparedServer(prepared, terms, token, before is not None)


async def start_server(prepared: PreparedServer, around: RunHooks) -> RunSummary:
    """Serve until the server is drained or stopped; return the run's summary."""
    run = prepared.run
    allow_files()
    keep_bounded()
    if (check := find_kind(run.config.sandbox).check_start) is not None:
        await check()
    async with _open_upstream(run.config) as upstream:
        directory = RunDirectory.open(run.path) if prepared.resumed else create_run(run.path, run.config)
        directory.make_private()
        given = msgspec.structs.replace(
            make_setup(run.suite, run.agent, around),
            importable=run.importable,
            upstream=upstream,
            resumed=prepared.resumed,
            config=run.config,
            open_server=_make_opener(prepared, around.get("say", lambda line: None)),
        )
        return await conduct_with_hooks(directory, given, around)


def _make_opener(
    prepared: PreparedServer, say: Callable[[str], None]
) -> Callable[[OrderService], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def open_server(desk: OrderService) -> AsyncIterator[RolloutServer]:
        async with AsyncExitStack() as stack:
            terms = prepared.terms
            file = RunDirectory(prepared.run.path).token
            if prepared.token:
                keys = (stack.enter_context(publish_token(file)),)
                terms = terms._replace(keys=keys, separate=False, announce=partial(_link_token, file))
            door = await stack.enter_async_context(RolloutServer(desk, terms))
            say(f"serving: {door.address} {_describe_server(prepared)}")
            yield door

    return open_server


@asynccontextmanager
async def _link_token(file: Path, addresses: Sequence[str]) -> AsyncIterator[None]:
    with link_token(file, addresses, read_environment().token_links):
        yield


def _describe_server(prepared: PreparedServer) -> str:
    agent = prepared.run.agent.name.rpartition("/")[2]  # without the directory of its file
    text = f"with agent `{agent}`, in `{prepared.run.path}`"
    if prepared.token:
        return f"{text}; its token is in `{RunDirectory(prepared.run.path).token}`"
    return text if prepared.terms.keys else f"{text}; without a key: every user of this machine has access"


def _parse_serving(said: Mapping[str, Any], config: RunConfig) -> ServingConfig:
    given = {name: said[name] for name in list_options(ServingConfig) if said.get(name) is not None}
    if (policy := given.get("policy")) is not None:
        if not callable(plugin.find_object(policy)):
            raise BadInput(f"not a policy: `{policy}`", POLICY_HINT)
        given["policy"] = plugin.make_absolute(policy)
    serving = ServingConfig(**given)
    check_bounds(serving)
    if serving.least_workers > max(1, config.workers):
        most = f"`--workers {config.workers}`"
        raise BadInput(f"`--least-workers` must be at most {most}: {serving.least_workers}")
    return serving


def _make_terms(said: Mapping[str, Any], config: RunConfig, path: Path) -> ServerSettings:
    assert config.serving is not None
    keys = _read_keys(said.get("key_file"))
    if said.get("no_key") and keys:
        raise BadInput(
            "`--no-key` contradicts the configured keys",
            "leave out `--no-key`, or `--key-file` and `HOLDWATER_SERVE_KEYS`",
        )
    return ServerSettings(
        listen=config.serving.listen,
        keys=keys,
        hosts=tuple(said.get("allow_host") or ()),
        tls=_parse_tls(said.get("tls_cert"), said.get("tls_key")),
        largest_order=config.serving.largest_order,
        note=lambda kind, message: _log.warning("%s %s", kind, message),
        blobs=RunDirectory(path).blobs,
        spool=path,
    )


def _read_keys(file: str | Path | None) -> tuple[str, ...]:
    """Read the keys from the file, one per line, or from the environment if there is no file."""
    if file is None:
        return read_environment().serve_keys
    try:
        with Path(file).open(encoding="utf-8") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            lines = opened.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read `{file}`: {getattr(error, 'strerror', None) or error}") from None
    if mode & 0o077:
        raise BadInput(
            f"other users can read the keys in `{file}`: its mode is {mode:04o}", f"`chmod 600 {file}`"
        )
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise BadInput(f"no key in `{file}`", "write one key per line")
    return keys


def _parse_tls(certificate: str | Path | None, key: str | Path | None) -> tuple[Path, Path] | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadInput("`--tls-cert` and `--tls-key` require each other")
    return Path(certificate), Path(key)


def _read_previous(path: Path, config: RunConfig) -> RunConfig | None:
    """Return the config of the server in this directory, None if it is empty; BadInput if it is another's."""
    directory = RunDirectory(path)
    if not directory.config.exists():
        return None
    check_owner(directory)
    before = directory.read_config()
    if before.serving is None:
        raise BadInput(
            f"the directory contains a run that is not a server: `{path}`",
            f"give another `--out`; `holdwater resume {path}` continues that run",
        )
    for what in ("suite", "agent"):
        old, new = getattr(before, what), getattr(config, what)
        if old != new:
            raise BadInput(
                f"the directory belongs to a server with {what} `{old}`, not `{new}`: `{path}`",
                "give another `--out`",
            )
    return before
