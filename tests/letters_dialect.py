"""A fifth dialect for tests: letters instead of messages. It is one module, as any dialect is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from holdwater.core.records import ModelUsage
from holdwater.dialect.conversion import CompletionContent
from holdwater.dialect.interface import (
    AdaptedRequest,
    Dialect,
    ParsedReply,
    ProviderVariables,
    know_headers,
)
from holdwater.dialect.message import CommonMessage, ModelReply, as_dict, as_string
from holdwater.dialect.sse import EventStream, decode_object, render_event

ROLES = {"reader": "user", "writer": "assistant"}


class LettersDialect(Dialect):
    name = "letters"
    path = "v1/letters/answer"
    provider = ProviderVariables("https://letters.example", "LETTERS_URL", ("LETTERS_KEY",))
    known_headers = know_headers({"letters-stamp"})
    key_header = "x-letters-key"
    key = "letters"
    system_keys = ("brief",)
    reply_key = "letter"

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        return msgspec.json.encode({"returned": {"reason": message, "status": status}})

    def read_reply(self, body: bytes) -> ParsedReply:
        reply = decode_object(body)  # this dialect has other names for usage and error
        return ParsedReply(count_usage(reply.get("counts")), reply.get("returned"))

    def stream(self, asked: AdaptedRequest) -> LettersStream:
        return LettersStream()

    def render_stream(self, reply: bytes) -> list[bytes]:
        whole = decode_object(reply)
        text = whole.pop("letter")["body"]
        return [render_event({"line": line}) for line in text.splitlines(keepends=True)] + [
            render_event({"sealed": whole})
        ]

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        yield CommonMessage(ROLES.get(as_string(item.get("from")), "unknown"), (as_string(item.get("body")),))

    def parse_system(self, head: dict[str, Any]) -> Iterator[CommonMessage]:
        if head.get("brief"):
            yield CommonMessage("system", (as_string(head["brief"]),))

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        message = next(self.parse_message(as_dict(reply.get("letter"))))
        return ModelReply(message, finish=as_string(reply.get("end")), model=as_string(reply.get("hand")))

    def split_choices(self, reply: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        yield reply.get("letter"), reply

    def render_completion(self, content: CompletionContent) -> dict[str, Any]:
        return {
            "letter": {"from": "writer", "body": content.text},
            "end": content.finish,
            "hand": content.model,
            "counts": {"read": content.prompt, "written": content.sampled},
        }

    def append_text(self, reply: dict[str, Any], text: str) -> None:
        reply["letter"]["body"] += f"\n{text}"


class LettersStream(EventStream):
    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self._sealed: dict[str, Any] = {}

    @property
    def usage(self) -> ModelUsage:
        return count_usage(self._sealed.get("counts"))

    def _take(self, data: bytes) -> bool:
        event = decode_object(data)
        self.began = True
        if "line" in event:
            self._lines.append(event["line"])
        if "sealed" in event:
            self._sealed, self.done = event["sealed"], True
        return True

    def _reply(self) -> dict[str, Any]:
        return {"letter": {"from": "writer", "body": "".join(self._lines)}, **self._sealed}


def count_usage(counts: Any) -> ModelUsage:
    given = as_dict(counts)
    return ModelUsage(requests=1, input_tokens=given.get("read", 0), output_tokens=given.get("written", 0))
