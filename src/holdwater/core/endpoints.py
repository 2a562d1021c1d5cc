"""The servers of a run's model, as `--base-url` names them: a URL, or several with weights, keys and models.

The records have the names of the variables with the keys, never the keys. The calls are spread by
`gateway/upstreams/endpoint_choice.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from .errors import BadInput
from .input_checks import find_url_problem
from .record import Record

MOST_ENDPOINTS = 64
EXAMPLE = (
    'for example `[[base-url]]` with `url = "http://10.0.0.5:8000/v1"`, `weight = 2` and `key = "NODE_KEY"`'
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class ServerEndpoint(Record, frozen=True):
    """A server of models."""

    url: str
    weight: float = 1.0  # its share of the calls, relative to the other servers
    key: str | None = None  # the variable with its key; None: the run's key
    models: tuple[str, ...] = ()  # patterns of the only models that it serves

    def __str__(self) -> str:
        return self.url


class EndpointState(StrEnum):
    """The state of a server, as a worker's calls found it."""

    OK = "ok"
    DOUBTFUL = "doubtful"  # a call failed: new conversations begin elsewhere for a while
    DOWN = "down"  # it cannot be reached, or several calls failed: conversations leave it


class EndpointUse(Record, frozen=True):
    """The calls that a server got, and its state."""

    url: str
    requests: int = 0
    failures: int = 0  # requests without a complete answer, and those that it refused for its own reasons
    state: EndpointState = EndpointState.OK
    error: str = ""  # the last one, while it is not `ok`


class EndpointUses(Record, frozen=True):
    """All servers of a run, as its ledger has them."""

    uses: tuple[EndpointUse, ...]


BaseUrl = str | tuple[ServerEndpoint, ...]
"""A single URL without settings stays text."""


def parse_endpoints(value: Any) -> BaseUrl:
    """Parse a URL, a table, or a list of them."""
    if isinstance(value, str):
        return value
    entries = [value] if isinstance(value, Mapping | ServerEndpoint) else value
    if not isinstance(entries, Sequence) or not entries:
        raise BadInput("`--base-url` must be a URL, a table with a `url`, or a list of them", EXAMPLE)
    if len(entries) == 1 and isinstance(entries[0], str):
        return entries[0]
    return tuple(_parse_entry(number, entry) for number, entry in enumerate(entries, start=1))


def _parse_entry(number: int, entry: Any) -> ServerEndpoint:
    if isinstance(entry, str):
        return ServerEndpoint(url=entry)
    try:
        return msgspec.convert(entry, ServerEndpoint, from_attributes=True)
    except msgspec.ValidationError as error:
        text = str(error).replace("Object contains unknown field", "unknown field:")
        raise BadInput(f"`--base-url`, number {number}: {text[0].lower()}{text[1:]}", EXAMPLE) from None


def list_endpoints(base_url: BaseUrl | None) -> tuple[ServerEndpoint, ...]:
    if base_url is None:
        return ()
    return (ServerEndpoint(url=base_url),) if isinstance(base_url, str) else base_url


def find_first_url(base_url: BaseUrl | None) -> str | None:
    """Return the URL by which the price of a model is looked up."""
    return next((endpoint.url for endpoint in list_endpoints(base_url)), None)


def list_endpoint_keys(base_url: BaseUrl | None) -> tuple[str, ...]:
    """Return the names of the variables with keys of servers."""
    return tuple(dict.fromkeys(server.key for server in list_endpoints(base_url) if server.key is not None))


def check_endpoints(base_url: BaseUrl, models: Iterable[str]) -> None:
    """Raise BadInput for servers that can never work, naming the first, and for models that none serves."""
    servers = list_endpoints(base_url)
    seen: set[str] = set()
    for number, server in enumerate(servers, start=1):
        name = "`--base-url`" if len(servers) == 1 else f"`--base-url`, number {number}:"
        if problem := find_url_problem(server.url):
            raise BadInput(f"{name} {problem}", "put the key into `OPENAI_API_KEY`")
        url = server.url.rstrip("/")
        if url in seen:
            raise BadInput(f"{name} the same URL as before: `{url}`", "`weight = 2` gives it twice the calls")
        seen.add(url)
        if not 0.0 < server.weight < math.inf:
            raise BadInput(f"{name} `weight` must be more than 0: {server.weight:g}")
        if server.key is not None and not _VARIABLE.fullmatch(server.key):
            raise BadInput(
                f"{name} `key` must be the name of a variable",
                '`export NODE_KEY=...`, then `key = "NODE_KEY"`',
            )
        if "" in server.models:
            raise BadInput(f"{name} `models` has an empty pattern")
    if len(servers) > MOST_ENDPOINTS:
        raise BadInput(f"`--base-url`: {len(servers)} servers, at most {MOST_ENDPOINTS} are allowed")
    for model in models:
        # A server without patterns serves every model that no pattern names.
        if not any(not one.models or any(fnmatchcase(model, name) for name in one.models) for one in servers):
            raise BadInput(
                f"no server of `--base-url` serves the model: `{model}`", "add it to the `models` of one"
            )


def sum_uses(before: EndpointUse, more: EndpointUse) -> EndpointUse:
    """Return both counts; the state is that of `more`."""
    requests, failures = before.requests + more.requests, before.failures + more.failures
    return msgspec.structs.replace(more, requests=requests, failures=failures)


def find_worst(uses: Iterable[EndpointUse]) -> EndpointUse:
    """Return the report of the worst state."""
    order = list(EndpointState)
    return max(uses, key=lambda use: order.index(use.state))
