"""A reply that is there as a whole, told as it is asked for: in one piece, in events, or as Google's array.

Replies from the record are told so, and those of whoever answers in the place of a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from msgspec import Raw
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import Failure
from ..dialects import Dialect, Manner
from ..dialects.sse import MISSHAPEN, event


class Whole:
    """Implements `Answer`."""

    status = 200
    failure: Failure | None = None
    waits = False

    def __init__(
        self,
        reply: bytes,
        dialect: Dialect,
        manner: Manner,
        version: str | None = None,
        chunks: bytes | None = None,
    ) -> None:
        self.headers = CIMultiDict({"Content-Type": content_type(manner)})
        self.version = version
        try:
            if manner is Manner.ARRAY:
                self._pieces = [chunks or b"[" + reply + b"]"]
            elif manner is Manner.EVENTS:
                self._pieces = dialect.told(reply) if chunks is None else _events(chunks)
            else:
                self._pieces = [reply]
        except MISSHAPEN as error:
            raise ModelFailed(f"the reply cannot be told: {error}", kind="garbage") from None

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def _events(chunks: bytes) -> list[bytes]:
    """Each chunk of a JSON array as an event."""
    return [
        event(chunk) for chunk in msgspec.json.decode(msgspec.json.format(chunks, indent=-1), type=list[Raw])
    ]


def content_type(manner: Manner) -> str:
    return "text/event-stream" if manner is Manner.EVENTS else "application/json"
