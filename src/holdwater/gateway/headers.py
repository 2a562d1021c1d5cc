"""Selects the client headers and query parameters that go upstream with the provider's key: known ones only.

All others are dropped. A header such as `X-HTTP-Method-Override` or `OpenAI-Organization` would let an agent
use the provider's key in ways that the run never allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class KnownHeaders(NamedTuple):
    """Header names in lower case, and prefixes of further names."""

    names: frozenset[str]
    beginnings: tuple[str, ...]


_ALWAYS = {"accept", "content-type", "user-agent", "idempotency-key", "x-request-id", "x-client-request-id"}
_STAINLESS = "x-stainless-"  # the providers' client libraries describe themselves in these
# Codex sends `originator`, `version` and the ids, OpenRouter's clients the last two.
_OPENAI = {
    "openai-beta",
    "originator",
    "version",
    "session_id",
    "session-id",
    "conversation_id",
    "http-referer",
    "x-title",
}
_ANTHROPIC = {"anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access", "x-app"}
_GOOGLE = {"x-goog-api-client", "x-server-timeout"}

_OF_OPENAI = KnownHeaders(frozenset(_ALWAYS | _OPENAI), (_STAINLESS, "x-codex-"))
_BY_DIALECT = {
    "messages": KnownHeaders(frozenset(_ALWAYS | _ANTHROPIC), (_STAINLESS, "x-claude-")),
    "gemini": KnownHeaders(frozenset(_ALWAYS | _GOOGLE), (_STAINLESS, "x-gemini-")),
}
_SINGLE = frozenset({"content-type", "user-agent"})  # the first value counts
# Google also accepts headers, methods and the fields of a reply in the query: `$httpHeaders`, `fields`.
_PARAMETERS = frozenset({"alt", "$alt", "api-version", "beta", "prettyPrint"})


def pick_headers(given: Mapping[str, str], key: str, dialect: str) -> dict[str, str]:
    """Return the headers of a call in `dialect` to forward, without its `key`; repeated ones as a list."""
    known = _BY_DIALECT.get(dialect, _OF_OPENAI)
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
    """Return the parts of a raw query string to forward."""
    return "&".join(part for part in query.split("&") if part.partition("=")[0] in _PARAMETERS)
