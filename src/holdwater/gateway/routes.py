"""Maps each path to its dialect and kind of call, and decides which headers and parameters go upstream.

It also answers side calls in the gateway itself: the list of models, and estimates of token counts. These
answers are not recorded. The dialects know their own paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from ..dialect import CHAT, DIALECTS, make_counter
from ..dialect.interface import Dialect, RequestTarget

BYTES_PER_TOKEN = 4
SERVER_HEADER = {"Server": "holdwater"}

_KEY = re.compile(r"/k/([^/]+)(/.*)?", re.DOTALL)
_MODELS = re.compile(r"(?:/v1)*?/(v1(?:alpha|beta)?\d*)?/?models(?:/([^:]+))?")
_SINGLE = frozenset({"content-type", "user-agent"})  # the first value counts
# Google also accepts headers, methods and the fields of a reply in the query: `$httpHeaders`, `fields`.
_PARAMETERS = frozenset({"alt", "$alt", "api-version", "beta", "prettyPrint"})


class RouteKind(StrEnum):
    """How the gateway handles a call."""

    TURN = "turn"
    COUNT = "count"  # a token count
    MODELS = "models"
    ROOT = "root"  # a liveness check
    UPGRADE = "upgrade"
    UNKNOWN = "unknown"


class CallRoute(NamedTuple):
    kind: RouteKind
    dialect: Dialect
    place: RequestTarget
    model: str | None = None  # the requested model
    key: str = ""  # from the path


CHAT_ROUTE = CallRoute(RouteKind.TURN, CHAT, RequestTarget(CHAT.path))


def find_route(request: web.BaseRequest) -> CallRoute:
    """Return the route of a request. An unknown path is `UNKNOWN`, in the dialect of its path or headers."""
    path, key = request.path, ""
    if (prefixed := _KEY.fullmatch(path)) is not None:
        key, path = prefixed[1], prefixed[2] or "/"
    found = _match_request(request, path)
    given = request.rel_url.raw_query_string
    if not given:
        return found._replace(key=key) if key else found
    return found._replace(place=found.place._replace(query=pick_parameters(given)), key=key)


def _match_request(request: web.BaseRequest, path: str) -> CallRoute:
    if request.method == "HEAD" and path == "/":
        return CallRoute(RouteKind.ROOT, CHAT, RequestTarget(path))
    known = _match_post(path) or _match_models(request, path)
    if known is None:
        return CallRoute(RouteKind.UNKNOWN, _guess_dialect(request, path), RequestTarget(path))
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return known._replace(kind=RouteKind.UPGRADE)
    expected = "GET" if known.kind is RouteKind.MODELS else "POST"
    return known if request.method == expected else known._replace(kind=RouteKind.UNKNOWN)


@lru_cache(maxsize=256)
def _match_post(path: str) -> CallRoute | None:
    for dialect in DIALECTS.values():
        if (match := dialect.match_path(path)) is not None:
            place = RequestTarget(match.path)
            if match.counts:
                return CallRoute(RouteKind.COUNT, make_counter(dialect), place)
            return CallRoute(RouteKind.TURN, dialect, place)
    return None


def _match_models(request: web.BaseRequest, path: str) -> CallRoute | None:
    match = _MODELS.fullmatch(path)
    return match and CallRoute(RouteKind.MODELS, _guess_dialect(request, path), RequestTarget(path), match[2])


def _guess_dialect(request: web.BaseRequest, path: str) -> Dialect:
    return next((one for one in DIALECTS.values() if one.recognizes(path, request.headers)), CHAT)


def pick_headers(given: Mapping[str, str], key: str, dialect: Dialect) -> dict[str, str]:
    """Return the headers of a call to forward, without its `key`; repeated ones as a list.

    All unknown ones are dropped: a header such as `X-HTTP-Method-Override` or `OpenAI-Organization` would let
    an agent use the provider's key in ways that the run never allowed.
    """
    known = dialect.known_headers
    sent: dict[str, str] = {}
    names: dict[str, str] = {}  # lower case -> as written first
    for name, value in given.items():
        lower = name.lower()
        if not (lower in known.names or lower.startswith(known.beginnings)) or key in value:
            continue
        first = names.setdefault(lower, name)
        if first not in sent:
            sent[first] = value
        elif lower not in _SINGLE:
            sent[first] = f"{sent[first]}, {value}"
    return sent


def pick_parameters(query: str) -> str:
    """Return the parts of a raw query string to forward; all unknown ones are dropped."""
    return "&".join(part for part in query.split("&") if part.partition("=")[0] in _PARAMETERS)


def make_refusal(dialect: Dialect, status: int, message: str, code: str | None = None) -> web.Response:
    """Return an error of the gateway in the client's dialect; a header keeps clients from retrying."""
    return web.Response(
        status=status,
        body=dialect.error_body(status, message, code),
        content_type="application/json",
        headers={"x-should-retry": "false", **SERVER_HEADER},
    )


def estimate_tokens(dialect: Dialect, size: int) -> web.Response:
    """Return an estimate of the tokens in a request of `size` bytes, for an upstream that cannot count."""
    return _make_response({dialect.count_key: max(1, size // BYTES_PER_TOKEN)})


def list_models(dialect: Dialect, asked: str | None, model: str | None) -> web.Response:
    """Return the model named `asked`, which always exists, or else the list of models."""
    if asked is not None:
        return _make_response(dialect.render_model(asked))
    return _make_response(dialect.render_models([dialect.render_model(model)] if model else []))


def _make_response(document: dict[str, Any]) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(document), content_type="application/json", headers=SERVER_HEADER
    )
