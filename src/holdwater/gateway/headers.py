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


def sent_on(given: Mapping[str, str], key: str) -> dict[str, str]:
    """Not those of the client's connection, and nothing with its key."""
    return {
        name: value for name, value in given.items() if name.lower() not in _NOT_SENT and key not in value
    }
