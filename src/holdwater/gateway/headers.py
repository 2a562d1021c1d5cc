"""Which headers of a client go upstream."""

from __future__ import annotations

from collections.abc import Mapping

_NOT_SENT = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
        "host",
        "authorization",
        "x-api-key",
        "api-key",
        "x-goog-api-key",
        "cookie",
        "content-length",
        "content-encoding",
        "accept-encoding",
        "expect",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-real-ip",
    }
)


_SINGLE = frozenset({"content-type", "user-agent"})  # the first counts


def sent_on(given: Mapping[str, str], key: str) -> dict[str, str]:
    """Not those of the client's connection, and nothing with its key. Repeated headers are one list."""
    sent: dict[str, str] = {}
    names: dict[str, str] = {}  # as they were written first
    for name, value in given.items():
        lower = name.lower()
        if lower in _NOT_SENT or key in value:
            continue
        first = names.setdefault(lower, name)
        if first not in sent:
            sent[first] = value
        elif lower not in _SINGLE:
            sent[first] = f"{sent[first]}, {value}"
    return sent
