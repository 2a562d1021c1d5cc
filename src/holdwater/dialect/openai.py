"""The common part of OpenAI's dialects: provider, headers, errors, usage, content, streams of choices.

Chat Completions, Responses, text completions and embeddings have modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from ..core.records import ModelUsage
from .interface import (
    AdaptedRequest,
    Dialect,
    ProviderVariables,
    RequestTarget,
    impose_model,
    know_headers,
    read_counts,
)
from .message import MessageMedia, as_dict, as_string, render_unknown, to_media, to_part
from .sse import EventStream, decode_object

_TRUE = Raw(b"true")
_STREAM = msgspec.json.Decoder(bool | None)
_OPTIONS = msgspec.json.Decoder(dict[str, Raw] | None)


class OpenAIDialect(Dialect):
    """A dialect of OpenAI's servers, and of the many servers that imitate them."""

    provider = ProviderVariables(
        "https://api.openai.com/v1",
        "OPENAI_BASE_URL",
        ("OPENAI_API_KEY",),
        other_urls=("OPENAI_API_BASE",),
        versioned=True,
    )
    # Codex sends `originator`, `version` and the ids, OpenRouter's clients the last two.
    known_headers = know_headers(
        {
            "openai-beta",
            "originator",
            "version",
            "session_id",
            "session-id",
            "conversation_id",
            "http-referer",
            "x-title",
        },
        "x-codex-",
    )

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})

    def count_usage(self, counts: Any) -> ModelUsage:
        return count_usage(counts)


def request_usage(head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
    """Adapt a request whose stream reports usage only on request."""
    stream = _STREAM.decode(head.get("stream", b"null"))
    options = _OPTIONS.decode(head.get("stream_options", b"null")) or {}
    wants_usage = bytes(options.get("include_usage", b"")) == b"true"
    changes = impose_model(head, model)
    if stream and not wants_usage:
        changes["stream_options"] = Raw(msgspec.json.encode({**options, "include_usage": _TRUE}))
    return AdaptedRequest(place, changes, wants_usage=wants_usage)


def parse_content(given: Any) -> Iterator[str | MessageMedia]:
    """Parse content of Chat Completions or Responses: a text or a list of parts."""
    if isinstance(given, list):
        for part in given:
            yield _parse_part(as_dict(part) or {"type": "", "text": part})
    elif given is not None and given != "":
        yield to_part(given)


def _parse_part(part: dict[str, Any]) -> str | MessageMedia:
    kind = as_string(part.get("type"))
    image = part.get("image_url")
    if image is not None:
        return to_media(as_dict(image).get("url") if isinstance(image, dict) else image, "image")
    if kind == "input_audio":
        audio = as_dict(part.get("input_audio")) or part
        return to_media(audio.get("data"), f"audio/{as_string(audio.get('format')) or 'wav'}", bare=True)
    if kind in ("file", "input_file", "input_image"):
        file = as_dict(part.get("file")) or part
        where = file.get("file_data") or file.get("file_url") or file.get("file_id")
        return to_media(where, "image" if kind == "input_image" else "file")
    if "text" in part or "refusal" in part:
        return to_part(part.get("text", part.get("refusal")))
    return render_unknown(part)


class TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None


def count_usage(counts: Any) -> ModelUsage:
    """Return the usage that an upstream reports for a call."""
    usage = read_counts(counts, _ChatUsage)
    details, spent = usage.prompt_tokens_details, usage.completion_tokens_details
    return ModelUsage(
        requests=1,
        input_tokens=usage.prompt_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.completion_tokens or 0,
        reasoning_tokens=(spent.reasoning_tokens or 0) if spent else 0,
    )


class ChoiceStream(EventStream):
    """A stream of chunks with choices. It drops events that the client did not request."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__()
        self._strips_usage = not wants_usage
        self._envelope: dict[str, Any] = {}
        self._usage: Any = None

    @property
    def usage(self) -> ModelUsage:
        return count_usage(self._usage)

    def _take(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self.done = True
            return True
        return self.take_chunk(decode_object(data))

    def take_chunk(self, chunk: dict[str, Any]) -> bool:
        """Add a chunk; return whether the client gets it."""
        choices, usage = chunk.pop("choices", None) or [], chunk.pop("usage", None)
        self.error = chunk.pop("error", None) or self.error
        self._usage = self._usage if usage is None else usage
        for field, value in chunk.items():
            if self._envelope.get(field) is None:
                self._envelope[field] = value
        for choice in choices:
            self._take_choice(check_index(choice.get("index", 0)), choice)
            self.began = True
            self.finished = self.finished or choice.get("finish_reason") is not None
        return bool(choices) or usage is None or not self._strips_usage

    def _reply(self) -> dict[str, Any]:
        usage = {"usage": self._usage} if self._usage is not None else {}
        error = {"error": self.error} if self.error is not None else {}
        return {**self._envelope, "choices": self._assemble(), **usage, **error}

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        raise NotImplementedError

    def _assemble(self) -> list[dict[str, Any]]:
        """Return the choices of the reply."""
        raise NotImplementedError


def check_index(index: Any) -> int:
    if not isinstance(index, int):
        raise ValueError("`index` is not a number")
    return index
