"""Sends a complete reply in the requested format: in one piece, in events, or as Google's JSON array.

It serves replies from the record, and replies of policies and trainers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from msgspec import Raw
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import AttemptFailure
from ...dialect.interface import Dialect, ReplyFormat
from ...dialect.message import SHAPE_ERRORS
from ...dialect.sse import render_event


class CompleteReply:
    """Implements `UpstreamAnswer`."""

    status = 200
    failure: AttemptFailure | None = None
    waits = False

    def __init__(
        self,
        reply: bytes,
        dialect: Dialect,
        manner: ReplyFormat,
        version: str | None = None,
        chunks: bytes | None = None,
    ) -> None:
        self.headers = CIMultiDict({"Content-Type": content_type(manner)})
        self.version = version
        try:
            if manner is ReplyFormat.ARRAY:
                self._pieces = [chunks or b"[" + reply + b"]"]
            elif manner is ReplyFormat.EVENTS:
                self._pieces = dialect.render_stream(reply) if chunks is None else _render_events(chunks)
            else:
                self._pieces = [reply]
        except SHAPE_ERRORS as error:
            raise ModelFailed(f"cannot render the reply: {error}", kind="garbage") from None

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def _render_events(chunks: bytes) -> list[bytes]:
    """Return each chunk of a JSON array as an event."""
    return [
        render_event(chunk)
        for chunk in msgspec.json.decode(msgspec.json.format(chunks, indent=-1), type=list[Raw])
    ]


def content_type(manner: ReplyFormat) -> str:
    return "text/event-stream" if manner is ReplyFormat.EVENTS else "application/json"
