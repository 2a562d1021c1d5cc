"""OpenAI's calls that are no conversation: text completions and embeddings.

They are recorded and counted like turns and stand beside the trajectory. Conversations are in the other
dialects.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import Usage
from ..recorder import Form
from . import COMMENT, Asked, Place, told
from .chat import Chat, count_usage
from .sse import EventStream, joined, mapping


class Completions:
    """Implements `Dialect`. A stream tells its usage only when it is asked, as in Chat Completions."""

    # A prompt is a text, texts or token ids: it stays in the head, and no request continues another.
    form = Form("completions", "messages", optional=True, beside=True)
    keep_alive = COMMENT
    ask = Chat.ask
    error_body = Chat.error_body
    read_reply = Chat.read_reply

    def stream(self, asked: Asked) -> CompletionStream:
        return CompletionStream(asked.wants_usage)

    def told(self, reply: bytes) -> list[bytes]:
        return told.completions(reply)


class Embeddings:
    """Implements `Dialect`. The request keeps its own model: the run's model makes no embeddings."""

    form = Form("embeddings", "messages", optional=True, beside=True)
    keep_alive = COMMENT
    error_body = Chat.error_body
    read_reply = Chat.read_reply

    def ask(self, head: dict[str, Raw], place: Place, model: str | None) -> Asked:
        return Asked(place, {})

    def stream(self, asked: Asked) -> CompletionStream:
        return CompletionStream(wants_usage=True)

    def told(self, reply: bytes) -> list[bytes]:
        raise msgspec.ValidationError("embeddings are not streamed")


class CompletionStream(EventStream):
    """Texts by choice; the usage comes in a chunk without choices."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__()
        self._strips_usage = not wants_usage
        self._envelope: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, list[str]] = {}
        self._usage: Any = None

    @property
    def usage(self) -> Usage:
        return count_usage(self._usage)

    def _take(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.done = True
            return True
        chunk = mapping(data)
        choices, usage = chunk.pop("choices", None) or [], chunk.pop("usage", None)
        self.error = chunk.pop("error", None) or self.error
        self._usage = self._usage if usage is None else usage
        self._envelope = {**chunk, **self._envelope}
        for choice in choices:
            index = int(choice.get("index", 0))
            self._texts.setdefault(index, []).append(choice.pop("text", None) or "")
            known = self._choices.setdefault(index, {})
            for field, value in choice.items():
                known[field] = value if isinstance(value, str | int) else joined(known.get(field), value)
            self.began = True
            self.finished = self.finished or choice.get("finish_reason") is not None
        return bool(choices) or usage is None or not self._strips_usage

    def _reply(self) -> dict[str, Any]:
        texts = {index: "".join(pieces) for index, pieces in self._texts.items()}
        choices = [{**self._choices[index], "text": texts[index]} for index in sorted(texts)]
        usage = {"usage": self._usage} if self._usage is not None else {}
        error = {"error": self.error} if self.error is not None else {}
        return {**self._envelope, "choices": choices, **usage, **error}
