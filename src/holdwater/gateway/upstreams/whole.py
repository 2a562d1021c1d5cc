"""A reply that is there as a whole, told as it is asked for: in one piece, in events, or as Google's array.

Replies from the record are told so, and those of whoever answers in the place of a model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import Failure
from ..dialects import Dialect, Manner
from ..dialects.sse import MISSHAPEN


class Whole:
    """Implements `Answer`."""

    status = 200
    failure: Failure | None = None
    waits = False

    def __init__(self, reply: bytes, dialect: Dialect, manner: Manner, version: str | None = None) -> None:
        self.headers = CIMultiDict({"Content-Type": content_type(manner)})
        self.version = version
        if manner is Manner.ARRAY:
            reply = b"[" + reply + b"]"
        try:
            self._pieces = dialect.told(reply) if manner is Manner.EVENTS else [reply]
        except MISSHAPEN as error:
            raise ModelFailed(f"the reply cannot be told: {error}", kind="garbage") from None

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def content_type(manner: Manner) -> str:
    return "text/event-stream" if manner is Manner.EVENTS else "application/json"
