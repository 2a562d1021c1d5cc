"""Streams of Gemini: reads their chunks, and writes a reply as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...core.records import ModelUsage
from ..conversion import CompletionCall, CompletionContent, pick_token_fields
from ..interface import read_counts
from ..sse import EventStream, decode_object, join_values, render_event
from ..stream_writer import TEXT, Events, OpenPart, StreamWriter


class _GeminiUsage(msgspec.Struct):
    promptTokenCount: int | None = None
    toolUsePromptTokenCount: int | None = None
    cachedContentTokenCount: int | None = None
    candidatesTokenCount: int | None = None
    thoughtsTokenCount: int | None = None


def count_usage(counts: Any) -> ModelUsage:
    """Return the usage; Google counts thoughts apart from the answer."""
    usage = read_counts(counts, _GeminiUsage)
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
        return count_usage(self._envelope.get("usageMetadata"))

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


class GeminiWriter(StreamWriter):
    """Writes chunks; a call comes whole, and the counts with the last chunk."""

    def begin(self, content: CompletionContent) -> Events:
        self._begun = content
        return iter(())

    def open(self, part: OpenPart) -> Events:
        return iter(())

    def add(self, part: OpenPart, piece: str) -> Events:
        if part.call is None:
            thought = {} if part.kind == TEXT else {"thought": True}
            yield render_event(make_chunk(self._begun, [{"text": piece, **thought}]))

    def close(self, part: OpenPart, whole: str) -> Events:
        if part.call is not None:
            yield render_event(make_chunk(self._begun, [make_call_part(part.call)]))

    def end(self, content: CompletionContent, completion: dict[str, Any]) -> Events:
        last = make_chunk(content, [{"text": ""}], finishReason=find_finish_reason(content))
        counts = {"usageMetadata": make_usage(content), **pick_token_fields(completion)}
        yield render_event({**last, **counts})


def make_chunk(content: CompletionContent, parts: Sequence[dict[str, Any]], **fields: str) -> dict[str, Any]:
    """Return a reply, or a part of one, with some parts; `fields` stand beside them."""
    answer = {"parts": parts, "role": "model"}
    return {
        "candidates": [{"content": answer, **fields, "index": 0}],
        "modelVersion": content.model,
        "responseId": content.id,
    }


def make_call_part(call: CompletionCall) -> dict[str, Any]:
    return {"functionCall": {"id": call.id, "name": call.name, "args": call.object}}


def find_finish_reason(content: CompletionContent) -> str:
    return {"length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(content.finish, "STOP")


def make_usage(content: CompletionContent) -> dict[str, Any]:
    cached = {"cachedContentTokenCount": content.cached} if content.cached else {}
    thoughts = {"thoughtsTokenCount": content.reasoned} if content.reasoned else {}
    return {
        "promptTokenCount": content.prompt,
        "candidatesTokenCount": content.sampled - content.reasoned,
        **cached,
        **thoughts,
        "totalTokenCount": content.prompt + content.sampled,
    }
