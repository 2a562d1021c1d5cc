"""Token count requests: recorded and counted like turns, but not part of the trajectory.

`relay.py` forwards them to an upstream that supports them; otherwise `auxiliary_routes.py` estimates.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..request_parser import RequestForm
from . import AdaptedRequest, Dialect, ParsedReply, ReplyStream, RequestTarget


class TokenCountDialect:
    """Implements `Dialect`, for the token counts of requests in another dialect."""

    def __init__(self, counted: Dialect) -> None:
        self._counted = counted
        name = counted.form.dialect
        self.form: RequestForm = counted.form._replace(
            dialect=f"{name}_count", counted_dialect=name, optional=True, auxiliary=True
        )
        self.keep_alive = counted.keep_alive

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return self._counted.adapt_request(head, place, model)

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        return self._counted.error_body(status, message, code)

    def read_reply(self, body: bytes) -> ParsedReply:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_CountReply)
        return ParsedReply(ModelUsage(requests=1), reply.error)

    def stream(self, asked: AdaptedRequest) -> ReplyStream:
        return self._counted.stream(asked)

    def render_stream(self, reply: bytes) -> list[bytes]:
        raise msgspec.ValidationError("token counts are not streamed")


class _CountReply(msgspec.Struct):
    error: Any = None
