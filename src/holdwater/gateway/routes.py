"""Maps each path to its dialect and kind of call, and extracts a key from the path.

A base URL with one `/v1` too many or too few still works; so does a Google URL without a version.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from aiohttp import web

from .dialects import Dialect, RequestTarget
from .dialects.chat import ChatDialect
from .dialects.completions import CompletionsDialect, EmbeddingsDialect
from .dialects.gemini import GeminiDialect
from .dialects.messages import MessagesDialect
from .dialects.responses import ResponsesDialect
from .dialects.token_counting import TokenCountDialect
from .headers import pick_parameters

CHAT, RESPONSES, MESSAGES, GEMINI = ChatDialect(), ResponsesDialect(), MessagesDialect(), GeminiDialect()
_MESSAGES_COUNT, _GEMINI_COUNT = TokenCountDialect(MESSAGES), TokenCountDialect(GEMINI)
# The dialects of conversations.
DIALECTS: dict[str, Dialect] = {d.form.dialect: d for d in (CHAT, RESPONSES, MESSAGES, GEMINI)}

_KEY = re.compile(r"/k/([^/]+)(/.*)?", re.DOTALL)
_OPENAI = re.compile(r"(?:/v1)*/(chat/completions|responses|completions|embeddings)")
_ANTHROPIC = re.compile(r"(?:/v1)*/messages(/count_tokens)?")
_GOOGLE = re.compile(r"(?:/v1)*?(?:/(v1(?:alpha|beta)?\d*))?/((?:models|tunedModels)/[^:]+):(\w+)")
_MODELS = re.compile(r"(?:/v1)*?/(v1(?:alpha|beta)?\d*)?/?models(?:/([^:]+))?")


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


CHAT_ROUTE = CallRoute(RouteKind.TURN, CHAT, RequestTarget("chat/completions"))


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
    if (match := _OPENAI.fullmatch(path)) is not None:
        return CallRoute(RouteKind.TURN, _OPENAI_PATHS[match[1]], RequestTarget(match[1]))
    if (match := _ANTHROPIC.fullmatch(path)) is not None:
        kind, dialect = (RouteKind.COUNT, _MESSAGES_COUNT) if match[1] else (RouteKind.TURN, MESSAGES)
        return CallRoute(kind, dialect, RequestTarget("v1/messages" + (match[1] or "")))
    if (match := _GOOGLE.fullmatch(path)) is not None and match[3] in _METHODS:
        version, model = match[1] or "v1beta", quote(match[2], safe="/@+")
        place = RequestTarget(f"{version}/{model}:{match[3]}")
        kind = _METHODS[match[3]]
        return CallRoute(kind, _GEMINI_COUNT if kind is RouteKind.COUNT else GEMINI, place)
    return None


_OPENAI_PATHS: dict[str, Dialect] = {
    "chat/completions": CHAT,
    "responses": RESPONSES,
    "completions": CompletionsDialect(),
    "embeddings": EmbeddingsDialect(),
}
_METHODS = {
    "generateContent": RouteKind.TURN,
    "streamGenerateContent": RouteKind.TURN,
    "countTokens": RouteKind.COUNT,
}


def _match_models(request: web.BaseRequest, path: str) -> CallRoute | None:
    match = _MODELS.fullmatch(path)
    return match and CallRoute(RouteKind.MODELS, _guess_dialect(request, path), RequestTarget(path), match[2])


def _guess_dialect(request: web.BaseRequest, path: str) -> Dialect:
    if "anthropic-version" in request.headers:
        return MESSAGES
    return GEMINI if "/v1beta" in path or "x-goog-api-key" in request.headers else CHAT
