"""Gemini generateContent and streamGenerateContent: the model is in the path, and a stream has no end mark.

A stream that is not requested as events is one JSON array: it is read as a whole.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..request_parser import DECODE_ERRORS, RequestForm
from . import KEEP_ALIVE_COMMENT, AdaptedRequest, ParsedReply, RequestTarget, as_stream
from .sse import SHAPE_ERRORS, EventStream, decode_object, join_values

_PATH = re.compile(r"(?P<version>[^/]+)/(?P<model>.+):(?P<method>\w+)")
# The name goes into an upstream path: no part is `..`, and nothing in it is encoded.
_NAME = re.compile(r"[A-Za-z0-9][\w.@+-]*(?:/[A-Za-z0-9][\w.@+-]*)*", re.ASCII)


def strip_generated(content: bytes) -> bytes:
    """Return a content without the ids of its calls, which a client generates if the model gives none."""
    if b'"id"' not in content:
        return content
    try:
        fields = msgspec.json.decode(content, type=dict[str, Any])
    except DECODE_ERRORS:
        return content
    parts = fields.get("parts")
    for part in parts if isinstance(parts, list) else ():
        for kind in ("functionCall", "functionResponse"):
            called = part.get(kind) if isinstance(part, dict) else None
            if isinstance(called, dict):
                called.pop("id", None)
    return msgspec.json.encode(fields)


class GeminiDialect:
    """Implements `Dialect`."""

    form = RequestForm("gemini", "contents", strip_generated=strip_generated)
    keep_alive = KEEP_ALIVE_COMMENT

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        match = _PATH.fullmatch(place.path)
        asked = match["model"] if match else ""
        if match and model is not None:
            asked = model if "/" in model else f"models/{model}"
            path = f"{match['version']}/{quote(asked)}:{match['method']}"
            place = place._replace(path=path)
        elif _NAME.fullmatch(asked) is None:
            raise msgspec.ValidationError(f"invalid model name: `{asked[:200]}`")
        return AdaptedRequest(place, {}, {"model": Raw(msgspec.json.encode(asked.removeprefix("models/")))})

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        word = _STATUS_NAMES.get(status, "INVALID_ARGUMENT" if status < 500 else "UNAVAILABLE")
        return msgspec.json.encode({"error": {"code": status, "message": message, "status": word}})

    def read_reply(self, body: bytes) -> ParsedReply:
        if not body.isascii():
            body.decode()
        if not body.lstrip().startswith(b"["):
            reply = msgspec.json.decode(body, type=_GeminiReply)
            return ParsedReply(_count_usage(reply.usageMetadata), reply.error)
        stream = GeminiStream()
        try:
            for chunk in msgspec.json.decode(body, type=list[dict[str, Any]]):
                stream.add(chunk)
        except SHAPE_ERRORS as error:
            raise msgspec.ValidationError(str(error)) from None
        return ParsedReply(stream.usage, stream.error, stream.reply(), body)

    def stream(self, asked: AdaptedRequest) -> GeminiStream:
        return GeminiStream()

    def render_stream(self, reply: bytes) -> list[bytes]:
        return as_stream.render_gemini(reply)


_STATUS_NAMES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}


class _GeminiReply(msgspec.Struct):
    usageMetadata: Any = None
    error: Any = None


class _GeminiUsage(msgspec.Struct):
    promptTokenCount: int | None = None
    toolUsePromptTokenCount: int | None = None
    cachedContentTokenCount: int | None = None
    candidatesTokenCount: int | None = None
    thoughtsTokenCount: int | None = None


def _count_usage(counts: Any) -> ModelUsage:
    try:
        usage = msgspec.convert(counts, _GeminiUsage)
    except msgspec.ValidationError:
        return ModelUsage(requests=1)
    return ModelUsage(
        requests=1,
        input_tokens=(usage.promptTokenCount or 0) + (usage.toolUsePromptTokenCount or 0),
        cached_tokens=usage.cachedContentTokenCount or 0,
        output_tokens=(usage.candidatesTokenCount or 0) + (usage.thoughtsTokenCount or 0),
        reasoning_tokens=usage.thoughtsTokenCount or 0,
    )


class GeminiStream(EventStream):
    """Assembles chunks; each is a complete reply with the new parts.

    Google's own clients send each chunk back as a separate content, so the record keeps them separate.
    """

    def __init__(self) -> None:
        super().__init__()
        self._envelope: dict[str, Any] = {}
        self._candidates: dict[int, _CandidateAssembly] = {}
        self._chunks: list[bytes] = []  # bound: `LARGEST_REPLY` of `answer_delivery.py`

    @property
    def chunks(self) -> bytes | None:
        return b"[" + b",".join(self._chunks) + b"]"

    @property
    def usage(self) -> ModelUsage:
        return _count_usage(self._envelope.get("usageMetadata"))

    def add(self, chunk: dict[str, Any]) -> None:
        self.error = chunk.pop("error", None) or self.error
        for candidate in chunk.pop("candidates", None) or ():
            self._candidates.setdefault(int(candidate.get("index", 0)), _CandidateAssembly()).take(candidate)
            self.began = True
            self.finished = self.finished or candidate.get("finishReason") is not None
        self._envelope.update({field: value for field, value in chunk.items() if value is not None})
        if (chunk.get("promptFeedback") or {}).get("blockReason") is not None:
            self.began = self.finished = True

    def _take(self, data: bytes) -> bool:
        if data != b"[DONE]":  # some compatible servers send it
            self.add(decode_object(data))
            self._chunks.append(data)
        return True

    def _reply(self) -> dict[str, Any]:
        candidates = [self._candidates[index].build_candidate() for index in sorted(self._candidates)]
        error = {"error": self.error} if self.error is not None else {}
        return {"candidates": candidates, **self._envelope, **error}


class _CandidateAssembly:
    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._content: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []
        self._texts: list[str] = []  # pieces of the last part, if that is a text

    def take(self, candidate: dict[str, Any]) -> None:
        content = dict(candidate.get("content") or {})
        for part in content.pop("parts", None) or ():
            self._add_part(dict(part))
        self._content.update(content)
        for field, value in candidate.items():
            if field == "content" or value is None:
                continue
            lists = field in ("logprobsResult", "citationMetadata")
            self._fields[field] = join_values(self._fields.get(field), value) if lists else value

    def _add_part(self, part: dict[str, Any]) -> None:
        """Add a part; it continues the last one if both are plain text of the same kind."""
        plain = part.keys() <= {"text", "thought"} and isinstance(part.get("text"), str)
        if plain and self._texts and self._parts[-1].get("thought") == part.get("thought"):
            self._texts.append(part["text"])
            return
        self._close_text()
        self._parts.append(part)
        self._texts = [part["text"]] if plain else []

    def _close_text(self) -> None:
        if self._texts:
            self._parts[-1]["text"] = "".join(self._texts)
            self._texts = [self._parts[-1]["text"]]

    def build_candidate(self) -> dict[str, Any]:
        self._close_text()
        content = {"parts": self._parts, **self._content} if self._parts or self._content else {}
        return {**({"content": content} if content else {}), **self._fields}
