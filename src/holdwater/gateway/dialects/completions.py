"""OpenAI calls that are not conversations: text completions and embeddings.

They are recorded and counted like turns, but are not part of the trajectory. The other dialects handle
conversations.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ..request_parser import RequestForm
from . import KEEP_ALIVE_COMMENT, AdaptedRequest, RequestTarget, as_stream
from .chat import ChatDialect, ChoiceStream
from .sse import join_values


class CompletionsDialect:
    """Implements `Dialect`. A stream reports its usage only on request, as in Chat Completions."""

    # A prompt is one or more texts or token ids: it stays in the head, and no request continues another.
    form = RequestForm("completions", "messages", optional=True, auxiliary=True)
    keep_alive = KEEP_ALIVE_COMMENT
    adapt_request = ChatDialect.adapt_request
    error_body = ChatDialect.error_body
    read_reply = ChatDialect.read_reply

    def stream(self, asked: AdaptedRequest) -> CompletionStream:
        return CompletionStream(asked.wants_usage)

    def render_stream(self, reply: bytes) -> list[bytes]:
        return as_stream.render_completions(reply)


class EmbeddingsDialect:
    """Implements `Dialect`. The request keeps its own model: the run's model makes no embeddings."""

    form = RequestForm("embeddings", "messages", optional=True, auxiliary=True)
    keep_alive = KEEP_ALIVE_COMMENT
    error_body = ChatDialect.error_body
    read_reply = ChatDialect.read_reply

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return AdaptedRequest(place, {})

    def stream(self, asked: AdaptedRequest) -> CompletionStream:
        return CompletionStream(wants_usage=True)

    def render_stream(self, reply: bytes) -> list[bytes]:
        raise msgspec.ValidationError("embeddings are not streamed")


class CompletionStream(ChoiceStream):
    """Assembles a text per choice."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__(wants_usage)
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, list[str]] = {}

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        self._texts.setdefault(index, []).append(choice.pop("text", None) or "")
        known = self._choices.setdefault(index, {})
        for field, value in choice.items():
            known[field] = value if isinstance(value, str | int) else join_values(known.get(field), value)

    def _assemble(self) -> list[dict[str, Any]]:
        texts = {index: "".join(pieces) for index, pieces in self._texts.items()}
        return [{**self._choices[index], "text": texts[index]} for index in sorted(texts)]
