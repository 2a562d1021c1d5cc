"""`serve`: a run whose samples are ordered by clients. What is refused is refused before anything is started.

The door is in `serve/`, the desk behind it in `run/desk.py`; the conductor opens both.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
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
from ..run.config import environment
from ..run.desk import Desk
from ..run.dock import check_daemon
from ..run.execute import create
from ..run.options import Options
from ..serve import Door, DoorTerms
from . import Prepared, _upstream, prepare
from .around import Around, conducted, given_to

MOST_FILES = 65536  # open at once: a client's connection is one
NEEDS = "it must be a function `(request)` that returns the reply"

_log = logging.getLogger("holdwater.serve")


class ServingOptions(TypedDict, total=False):
    """What a server can be told beside what a run can."""

    listen: str | None
    key_file: str | Path | None
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
    return PreparedServer(prepared, terms, before is not None)


async def start_server(prepared: PreparedServer, around: Around) -> Summary:
    """Serve until it is drained or told to end; the run's summary."""
    run = prepared.run
    _allow_files()
    keep_bounded()
    if run.config.sandbox is SandboxKind.DOCKER:
        await check_daemon(environment())
    async with _upstream(run.config) as upstream:
        directory = RunDirectory.open(run.path) if prepared.resumed else create(run.path, run.config)
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
        async with Door(desk, prepared.terms) as door:
            agent = prepared.run.agent.name.rpartition("/")[2]  # its file may lie anywhere
            say(f"serving: {door.address} with agent `{agent}`, in `{prepared.run.path}`")
            yield door

    return opened


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
    return DoorTerms(
        listen=config.serving.listen,
        keys=_keys(said.get("key_file")),
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
        lines = Path(file).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read `{file}`: {getattr(error, 'strerror', None) or error}") from None
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


def _allow_files() -> None:
    """As many open files as may be: each client is one, and so is much of what workers do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
