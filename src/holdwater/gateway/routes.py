"""Which call is which: the dialect and the kind of each path, and where the path may hold a key.

A base URL with a `/v1` too many, or one too few, still leads where it was meant to; so does one of Google's
without a version.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote

from aiohttp import web

from .dialects import Dialect, Place
from .dialects.chat import Chat
from .dialects.counting import TokenCount
from .dialects.gemini import Gemini
from .dialects.messages import Messages
from .dialects.plain import Completions, Embeddings
from .dialects.responses import Responses
from .headers import pick_parameters

CHAT, RESPONSES, MESSAGES, GEMINI = Chat(), Responses(), Messages(), Gemini()
_MESSAGES_COUNT, _GEMINI_COUNT = TokenCount(MESSAGES), TokenCount(GEMINI)
# Those of conversations.
DIALECTS: dict[str, Dialect] = {d.form.dialect: d for d in (CHAT, RESPONSES, MESSAGES, GEMINI)}

_KEY = re.compile(r"/k/([^/]+)(/.*)?", re.DOTALL)
_OPENAI = re.compile(r"(?:/v1)*/(chat/completions|responses|completions|embeddings)")
_ANTHROPIC = re.compile(r"(?:/v1)*/messages(/count_tokens)?")
_GOOGLE = re.compile(r"(?:/v1)*?(?:/(v1(?:alpha|beta)?\d*))?/((?:models|tunedModels)/[^:]+):(\w+)")
_MODELS = re.compile(r"(?:/v1)*?/(v1(?:alpha|beta)?\d*)?/?models(?:/([^:]+))?")


class Kind(StrEnum):
    """What is done with a call."""

    TURN = "turn"
    COUNT = "count"  # a question how many tokens a request has
    MODELS = "models"
    ROOT = "root"  # somebody looks whether anyone is there
    UPGRADE = "upgrade"
    UNKNOWN = "unknown"


class Route(NamedTuple):
    kind: Kind
    dialect: Dialect
    place: Place
    model: str | None = None  # the one that is asked after
    key: str = ""  # in the path


COMPLETIONS = Route(Kind.TURN, CHAT, Place("chat/completions"))


def route(request: web.BaseRequest) -> Route:
    """Never fails: what is not known is `UNKNOWN`, in the dialect that its path or headers suggest."""
    path, key = request.path, ""
    if (prefixed := _KEY.fullmatch(path)) is not None:
        key, path = prefixed[1], prefixed[2] or "/"
    found = _found(request, path)
    given = request.rel_url.raw_query_string
    if not given:
        return found._replace(key=key) if key else found
    return found._replace(place=found.place._replace(query=pick_parameters(given)), key=key)


def _found(request: web.BaseRequest, path: str) -> Route:
    if request.method == "HEAD" and path == "/":
        return Route(Kind.ROOT, CHAT, Place(path))
    known = _posted(path) or _listed(request, path)
    if known is None:
        return Route(Kind.UNKNOWN, _suggested(request, path), Place(path))
    if request.headers.get("Upgrade", "").lower() == "websocket":
        return known._replace(kind=Kind.UPGRADE)
    expected = "GET" if known.kind is Kind.MODELS else "POST"
    return known if request.method == expected else known._replace(kind=Kind.UNKNOWN)


@lru_cache(maxsize=256)
def _posted(path: str) -> Route | None:
    if (match := _OPENAI.fullmatch(path)) is not None:
        return Route(Kind.TURN, _OPENAI_PATHS[match[1]], Place(match[1]))
    if (match := _ANTHROPIC.fullmatch(path)) is not None:
        kind, dialect = (Kind.COUNT, _MESSAGES_COUNT) if match[1] else (Kind.TURN, MESSAGES)
        return Route(kind, dialect, Place("v1/messages" + (match[1] or "")))
    if (match := _GOOGLE.fullmatch(path)) is not None and match[3] in _METHODS:
        version, model = match[1] or "v1beta", quote(match[2], safe="/@+")
        place = Place(f"{version}/{model}:{match[3]}")
        kind = _METHODS[match[3]]
        return Route(kind, _GEMINI_COUNT if kind is Kind.COUNT else GEMINI, place)
    return None


_OPENAI_PATHS: dict[str, Dialect] = {
    "chat/completions": CHAT,
    "responses": RESPONSES,
    "completions": Completions(),
    "embeddings": Embeddings(),
}
_METHODS = {
    "generateContent": Kind.TURN,
    "streamGenerateContent": Kind.TURN,
    "countTokens": Kind.COUNT,
}


def _listed(request: web.BaseRequest, path: str) -> Route | None:
    match = _MODELS.fullmatch(path)
    return match and Route(Kind.MODELS, _suggested(request, path), Place(path), match[2])


def _suggested(request: web.BaseRequest, path: str) -> Dialect:
    if "anthropic-version" in request.headers:
        return MESSAGES
    return GEMINI if "/v1beta" in path or "x-goog-api-key" in request.headers else CHAT
