"""The token counts of requests: calls of their own, in the dialect whose requests they count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from ..core.records import ModelUsage
from .interface import AdaptedRequest, Dialect, RequestTarget
from .message import CommonMessage, ModelReply
from .sse import EventStream


class TokenCountDialect(Dialect):
    """The token counts of requests in another dialect: recorded and counted, but not turns."""

    optional = True
    auxiliary = True

    def __init__(self, counted: Dialect) -> None:
        self._counted = counted
        self.name = f"{counted.name}_count"
        self.counted_dialect = counted.name
        self.path, self.key, self.keep_alive = counted.path, counted.key, counted.keep_alive
        self.provider, self.known_headers = counted.provider, counted.known_headers
        self.key_header, self.count_key = counted.key_header, counted.count_key

    def read_model(self, head: Mapping[str, Raw], place: RequestTarget) -> str:
        return self._counted.read_model(head, place)

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return self._counted.adapt_request(head, place, model)

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        return self._counted.error_body(status, message, code)

    def stream(self, asked: AdaptedRequest) -> EventStream:
        return self._counted.stream(asked)

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        return self._counted.parse_message(item)

    def parse_system(self, head: dict[str, Any]) -> Iterator[CommonMessage]:
        return self._counted.parse_system(head)

    def parse_tools(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        return self._counted.parse_tools(head)

    def strip_transient(self, message: bytes) -> bytes:
        return self._counted.strip_transient(message)

    def strip_generated(self, message: bytes) -> bytes:
        return self._counted.strip_generated(message)

    def impose_sampling(self, head: Mapping[str, Raw], sampling: Mapping[str, Any]) -> dict[str, Raw]:
        return {}

    def count_usage(self, counts: Any) -> ModelUsage:
        return ModelUsage(requests=1)

    def render_stream(self, reply: bytes) -> list[bytes]:
        raise msgspec.ValidationError("token counts are not streamed")

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        tokens = reply.get(self.count_key)
        if not isinstance(tokens, int):
            return ModelReply()
        return ModelReply(message=CommonMessage(role="assistant", parts=(f"[{tokens} tokens]",)))
