"""OpenAI's calls that are no conversation: text completions and embeddings.

They are recorded and counted like turns and stand beside the trajectory. Conversations are in the other
dialects.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ..recorder import Form
from . import COMMENT, Asked, Place, told
from .chat import Chat, ChoiceStream
from .sse import joined


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


class CompletionStream(ChoiceStream):
    """Texts by choice."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__(wants_usage)
        self._choices: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, list[str]] = {}

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        self._texts.setdefault(index, []).append(choice.pop("text", None) or "")
        known = self._choices.setdefault(index, {})
        for field, value in choice.items():
            known[field] = value if isinstance(value, str | int) else joined(known.get(field), value)

    def _assemble(self) -> list[dict[str, Any]]:
        texts = {index: "".join(pieces) for index, pieces in self._texts.items()}
        return [{**self._choices[index], "text": texts[index]} for index in sorted(texts)]
