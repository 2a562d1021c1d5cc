"""`serve`: a run whose samples clients order. Invalid input is rejected before anything starts.

The HTTP server is in `serve/`, the order service behind it in `run/orders/order_service.py`; the conductor
starts both.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .. import plugin
from ..core.authoring import Agent, AgentFunction, Suite
from ..core.config import RunConfig, ServingConfig
from ..core.errors import BadInput
from ..core.options import list_options
from ..core.records import Network
from ..ledger.directory import RunDirectory
from ..run.execute import RunSetup
from ..run.orders.order_service import OrderService
from ..run.setup.config import check_bounds, read_environment, read_key_variables
from ..run.setup.options import RunOptions
from ..run.setup.resumption import check_owner
from ..serve import RolloutServer, ServerSettings
from ..serve.protocols import ProtocolSettings, open_protocol, resolve_place
from ..suite.verifiers.scoring import TRACE_FILE
from ..suite.verifiers.tasks import PREFIX as TASKSET_PREFIX
from ..suite.verifiers.tasks import TaskDescription, make_instance
from ..web.tokens import link_token, publish_token
from .runs import prepare

POLICY_HINT = "it must be a function `(request)` that returns the reply"

_log = logging.getLogger("holdwater.serve")


class ServerOpener(NamedTuple):
    """Opens the servers of a run; call it with the order service and the printer of lines."""

    settings: ServerSettings
    agent: str
    path: Path
    token: bool  # whether the server creates its own token, because no keys are configured
    protocol: tuple[str, ProtocolSettings] | None = None  # that the server speaks beside HTTP

    @asynccontextmanager
    async def __call__(
        self, orders: OrderService, say: Callable[[str], None]
    ) -> AsyncIterator[RolloutServer]:
        async with AsyncExitStack() as stack:
            settings, file = self.settings, RunDirectory(self.path).token
            if self.token:
                keys = (stack.enter_context(publish_token(file)),)
                settings = settings._replace(keys=keys, separate=False, announce=partial(_link_token, file))
            server = await stack.enter_async_context(RolloutServer(orders, settings))
            say(f"serving: {server.address} {self._describe()}")
            if self.protocol is not None:
                name, terms = self.protocol
                spoken = await stack.enter_async_context(open_protocol(name, orders, terms))
                say(f"serving: {spoken.address} for `{name}` {_describe_access(terms)}")
            yield server

    def _describe(self) -> str:
        agent = self.agent.rpartition("/")[2]  # without the directory of its file
        text = f"with agent `{agent}`, in `{self.path}`"
        if self.token:
            return f"{text}; its token is in `{RunDirectory(self.path).token}`"
        return text if self.settings.keys else f"{text}; without a key: every user of this machine has access"


def prepare_server(
    suite: Suite | str,
    agent: Agent | AgentFunction | str | None,
    out: str | Path | None,
    options: RunOptions,
    serving: Mapping[str, Any],
) -> RunSetup:
    """Check everything that can be checked before a server starts, and create nothing."""
    prepared = prepare(suite, agent, out, {**options, "attempts": 1})
    config = msgspec.structs.replace(prepared.config, serving=_parse_serving(serving, prepared.config))
    terms = _make_terms(serving, config, prepared.path)
    RolloutServer.check(terms)
    protocol = _make_protocol(serving, config, prepared)
    before = _read_previous(prepared.path, config)
    if before is not None:
        config = msgspec.structs.replace(config, id=before.id, created=before.created)
    token = not terms.keys and not serving.get("no_key")
    opener = ServerOpener(terms, prepared.agent.name, prepared.path, token, protocol)
    return msgspec.structs.replace(prepared, config=config, resumed=before is not None, open_server=opener)


@asynccontextmanager
async def _link_token(file: Path, addresses: Sequence[str]) -> AsyncIterator[None]:
    with link_token(file, addresses, read_environment().token_links):
        yield


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
    keys = read_keys(said.get("key_file"))
    if said.get("no_key") and keys:
        raise BadInput(
            "`--no-key` contradicts the configured keys",
            "leave out `--no-key`, or `--key-file` and `HOLDWATER_SERVE_KEYS`",
        )
    return ServerSettings(
        listen=config.serving.listen,
        keys=keys,
        hosts=tuple(said.get("allow_host") or ()),
        tls=parse_tls(said.get("tls_cert"), said.get("tls_key")),
        largest_order=config.serving.largest_order,
        note=lambda kind, message: _log.warning("%s %s", kind, message),
        blobs=RunDirectory(path).blobs,
        spool=path,
    )


def _make_protocol(
    said: Mapping[str, Any], config: RunConfig, prepared: RunSetup
) -> tuple[str, ProtocolSettings] | None:
    """Return the further protocol and its settings; refuse an address that would expose it."""
    serving = config.serving
    assert serving is not None
    if (name := serving.protocol) is None:
        for flag in ("protocol_listen", "protocol_key", "unprotected"):
            if said.get(flag):
                raise BadInput(f"`--{flag.replace('_', '-')}` needs `--protocol`")
        return None
    place = resolve_place(
        name,
        serving.protocol_listen,
        unprotected=bool(said.get("unprotected")),
        open_network=config.network is Network.OPEN,
    )
    return name, ProtocolSettings(
        place=place,
        directory=prepared.path,
        suite=config.suite,
        agent=prepared.agent.name,
        keys=read_key_variables(said.get("protocol_key") or ()),
        queue=serving.queue,
        grace=serving.grace,
        return_grace=serving.return_grace,
        **_describe_tasks(config.suite),
        note=lambda kind, message: _log.warning("%s %s", kind, message),
    )


def _describe_tasks(suite: str) -> dict[str, Any]:
    """Return how a taskset of verifiers makes instances of tasks, and keeps their scores."""
    if not suite.startswith(TASKSET_PREFIX):
        return {}
    return {
        "make_instance": lambda data: make_instance(TaskDescription(data=data)),
        "scores": TRACE_FILE,
    }


def _describe_access(terms: ProtocolSettings) -> str:
    if terms.place.path is not None:
        return "clients of this user"
    if terms.place.local:
        return "clients; without a key: every user of this machine has access"
    return "clients; without a key: every machine that reaches it has access"


def read_keys(file: str | Path | None) -> tuple[str, ...]:
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


def parse_tls(certificate: str | Path | None, key: str | Path | None) -> tuple[Path, Path] | None:
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
