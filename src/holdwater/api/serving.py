"""`serve`: a run whose samples are ordered by clients. What is refused is refused before anything is started.

The door is in `serve/`, the desk behind it in `run/desk.py`; the conductor opens both.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from .. import plugin
from ..core.authoring import Act, Agent, Suite
from ..core.config import RunConfig, SandboxKind, Serving
from ..core.errors import BadInput
from ..core.summary import Summary
from ..ledger.directory import RunDirectory
from ..rollout.allocator import keep_bounded
from ..rollout.open_files import allow_files
from ..run.config import environment
from ..run.desk import Desk
from ..run.dock import check_daemon
from ..run.execute import create
from ..run.options import Options
from ..run.trust import check_owner
from ..serve import Door, DoorTerms
from ..web.tokens import linked_token, written_token
from . import Prepared, _upstream, prepare
from .around import Around, conducted, given_to

NEEDS = "it must be a function `(request)` that returns the reply"

_log = logging.getLogger("holdwater.serve")


class ServingOptions(TypedDict, total=False):
    """What a server can be told beside what a run can."""

    listen: str | None
    key_file: str | Path | None
    no_key: bool | None
    allow_host: Sequence[str] | None
    tls_cert: str | Path | None
    tls_key: str | Path | None
    queue: int | None
    policy: str | None
    grace: float | None
    return_grace: float | None
    least_workers: int | None


class PreparedServer(msgspec.Struct, frozen=True):
    """A server that could be started: everything has been checked, nothing has been made."""

    run: Prepared
    terms: DoorTerms
    token: bool  # it makes a token of its own: nothing was said about keys
    resumed: bool  # the directory holds what it goes on with


def prepare_server(
    suite: Suite | str,
    agent: Agent | Act | str | None,
    out: str | Path | None,
    options: Options,
    serving: ServingOptions,
) -> PreparedServer:
    """Check everything that can be checked before a server is started, and make nothing."""
    prepared = prepare(suite, agent, out, {**options, "attempts": 1})
    config = msgspec.structs.replace(prepared.config, serving=_serving(serving, prepared.config))
    terms = _terms(serving, config, prepared.path)
    Door.check(terms)
    before = _before(prepared.path, config)
    if before is not None:
        config = msgspec.structs.replace(config, id=before.id, created=before.created)
    prepared = msgspec.structs.replace(prepared, config=config)
    token = not terms.keys and not serving.get("no_key")
    return PreparedServer(prepared, terms, token, before is not None)


async def start_server(prepared: PreparedServer, around: Around) -> Summary:
    """Serve until it is drained or told to end; the run's summary."""
    run = prepared.run
    allow_files()
    keep_bounded()
    if run.config.sandbox is SandboxKind.DOCKER:
        await check_daemon(environment())
    async with _upstream(run.config) as upstream:
        directory = RunDirectory.open(run.path) if prepared.resumed else create(run.path, run.config)
        directory.make_private()
        given = msgspec.structs.replace(
            given_to(run.suite, run.agent, around),
            importable=run.importable,
            upstream=upstream,
            resumed=prepared.resumed,
            config=run.config,
            door=_door(prepared, around.get("say", lambda line: None)),
        )
        return await conducted(directory, given, around)


def _door(
    prepared: PreparedServer, say: Callable[[str], None]
) -> Callable[[Desk], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def opened(desk: Desk) -> AsyncIterator[Door]:
        async with AsyncExitStack() as stack:
            terms = prepared.terms
            file = RunDirectory(prepared.run.path).token
            if prepared.token:
                terms = terms._replace(keys=(stack.enter_context(written_token(file)),), separate=False)
            door = await stack.enter_async_context(Door(desk, terms))
            if prepared.token:
                stack.enter_context(linked_token(file, door.addresses, environment().token_links))
            say(f"serving: {door.address} {_described(prepared)}")
            yield door

    return opened


def _described(prepared: PreparedServer) -> str:
    agent = prepared.run.agent.name.rpartition("/")[2]  # its file may lie anywhere
    text = f"with agent `{agent}`, in `{prepared.run.path}`"
    if prepared.token:
        return f"{text}; its token is in `{RunDirectory(prepared.run.path).token}`"
    return text if prepared.terms.keys else f"{text}; without a key: all users of this machine are obeyed"


def _serving(said: ServingOptions, config: RunConfig) -> Serving:
    names = ("listen", "queue", "grace", "return_grace", "least_workers")
    given = {name: said[name] for name in names if said.get(name) is not None}  # type: ignore[literal-required]
    if (policy := said.get("policy")) is not None:
        if not callable(plugin.find(policy)):
            raise BadInput(f"not a policy: `{policy}`", NEEDS)
        given["policy"] = plugin.absolute(policy)
    serving = Serving(**given)
    for name, lowest in {"queue": 1, "grace": 0, "return_grace": 0, "least_workers": 1}.items():
        if getattr(serving, name) < lowest:
            flag = name.replace("_", "-")
            raise BadInput(f"`--{flag}` must be at least {lowest}: {getattr(serving, name):g}")
    if serving.least_workers > max(1, config.workers):
        most = f"`--workers {config.workers}`"
        raise BadInput(f"`--least-workers` must be at most {most}: {serving.least_workers}")
    return serving


def _terms(said: ServingOptions, config: RunConfig, path: Path) -> DoorTerms:
    assert config.serving is not None
    keys = _keys(said.get("key_file"))
    if said.get("no_key") and keys:
        raise BadInput(
            "keys are given, and `--no-key` wants none",
            "leave out `--no-key`, or `--key-file` and `HOLDWATER_SERVE_KEYS`",
        )
    return DoorTerms(
        listen=config.serving.listen,
        keys=keys,
        hosts=tuple(said.get("allow_host") or ()),
        tls=_tls(said.get("tls_cert"), said.get("tls_key")),
        largest_order=config.serving.largest_order,
        note=lambda kind, message: _log.warning("%s %s", kind, message),
        blobs=RunDirectory(path).blobs,
        spool=path,
    )


def _keys(file: str | Path | None) -> tuple[str, ...]:
    """One a line in the file; those of the environment otherwise."""
    if file is None:
        return environment().serve_keys
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
        raise BadInput(f"no key in `{file}`", "write one a line")
    return keys


def _tls(certificate: str | Path | None, key: str | Path | None) -> tuple[Path, Path] | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadInput("`--tls-cert` and `--tls-key` go together")
    return Path(certificate), Path(key)


def _before(path: Path, config: RunConfig) -> RunConfig | None:
    """What the directory was a server of; None: it holds no run. BadInput if it is another's."""
    directory = RunDirectory(path)
    if not directory.config.exists():
        return None
    check_owner(directory)
    before = directory.read_config()
    if before.serving is None:
        raise BadInput(
            f"the directory holds a run that is no server's: `{path}`",
            f"give another `--out`; `holdwater resume {path}` continues that run",
        )
    for what in ("suite", "agent"):
        old, new = getattr(before, what), getattr(config, what)
        if old != new:
            raise BadInput(
                f"the directory is that of a server with {what} `{old}`, not `{new}`: `{path}`",
                "give another `--out`",
            )
    return before
