"""OpenAI Chat Completions: what a request asks for, how errors look, how a stream is read and put together.

Of the four this is the one whose streams tell usage only when asked: it asks, and takes the answer out again.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import Usage
from ..recorder import Form
from . import COMMENT, Asked, Place, Whole, renamed, told
from .sse import EventStream, joined, mapping

_TRUE = Raw(b"true")
_STREAM = msgspec.json.Decoder(bool | None)
_OPTIONS = msgspec.json.Decoder(dict[str, Raw] | None)


class Chat:
    """Implements `Dialect`."""

    form = Form("chat", "messages")
    keep_alive = COMMENT

    def ask(self, head: dict[str, Raw], place: Place, model: str | None) -> Asked:
        stream = _STREAM.decode(head.get("stream", b"null"))
        options = _OPTIONS.decode(head.get("stream_options", b"null")) or {}
        wants_usage = bytes(options.get("include_usage", b"")) == b"true"
        changes = renamed(head, model)
        if stream and not wants_usage:
            changes["stream_options"] = Raw(msgspec.json.encode({**options, "include_usage": _TRUE}))
        return Asked(place, changes, wants_usage=wants_usage)

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})

    def read_reply(self, body: bytes) -> Whole:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_Reply)
        return Whole(count_usage(reply.usage), reply.error)

    def stream(self, asked: Asked) -> ChatStream:
        return ChatStream(asked.wants_usage)

    def told(self, reply: bytes) -> list[bytes]:
        return told.chat(reply)


class _Reply(msgspec.Struct):
    usage: Any = None
    error: Any = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


def count_usage(counts: Any) -> Usage:
    """What an upstream says that a call used."""
    try:
        usage = msgspec.convert(counts, _Usage)
    except msgspec.ValidationError:
        return Usage(requests=1)  # none, or not in this dialect: unknown
    details, spent = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        requests=1,
        input_tokens=usage.prompt_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.completion_tokens or 0,
        reasoning_tokens=(spent.reasoning_tokens or 0) if spent else 0,
    )


class ChoiceStream(EventStream):
    """Chunks with choices. Knows which events the client did not ask for."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__()
        self._strips_usage = not wants_usage
        self._envelope: dict[str, Any] = {}
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
        for field, value in chunk.items():
            if self._envelope.get(field) is None:
                self._envelope[field] = value
        for choice in choices:
            self._take_choice(_number(choice.get("index", 0)), choice)
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
        """The choices of the reply."""
        raise NotImplementedError


class ChatStream(ChoiceStream):
    """Messages by choice."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__(wants_usage)
        self._choices: dict[int, _Assembled] = {}

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        self._choices.setdefault(index, _Assembled()).take(choice)

    def _assemble(self) -> list[dict[str, Any]]:
        return [self._choices[index].choice(index) for index in sorted(self._choices)]

    def _reply(self) -> dict[str, Any]:
        return {**super()._reply(), "object": "chat.completion"}


class _Assembled:
    """One choice of a reply that came in deltas. A field that no delta has is absent, and null is not empty:
    a client that is served the reply again must send back the same message."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}  # field -> its pieces
        self._fields: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}
        self._beside: dict[str, Any] = {}  # beside the message: token ids, for example
        self._logprobs: dict[str, list[Any] | None] = {}

    def take(self, choice: dict[str, Any]) -> None:
        for field, value in (choice.get("delta") or {}).items():
            if field == "tool_calls" and isinstance(value, list):
                self._fields[field] = []
                for call in value:
                    self._take_call(call)
            elif field == "role":
                self._fields[field] = value or self._fields.get(field, "assistant")
            elif isinstance(value, str):
                self._texts.setdefault(field, []).append(value)
            else:
                self._fields[field] = joined(self._fields.get(field), value)
        for field, value in (choice.get("logprobs") or {}).items():
            if value is not None:
                self._logprobs[field] = known = self._logprobs.get(field) or []
                known.extend(value)
            else:
                self._logprobs.setdefault(field, None)
        for field in choice.keys() - {"index", "delta"}:
            value = choice[field]
            if isinstance(value, list):
                self._beside[field] = listed = self._beside.get(field) or []
                listed.extend(value)
            elif field == "logprobs" or value is None:
                self._beside.setdefault(field, None)
            else:
                self._beside[field] = value

    def _take_call(self, call: dict[str, Any]) -> None:
        index = self._index(call)
        known = self._calls.setdefault(index, {})
        for field, value in call.items():
            if field == "function" and isinstance(value, dict):
                arguments = value.get("arguments")
                if isinstance(arguments, str):
                    self._arguments.setdefault(index, []).append(arguments)
                named = known.get(field) or {}
                known[field] = {**named, **{name: _renewed(named.get(name), v) for name, v in value.items()}}
            elif field == "custom":
                known[field] = joined(known.get(field), value)
            elif field != "index":
                known[field] = _renewed(known.get(field), value)

    def _index(self, call: dict[str, Any]) -> int:
        """Some upstreams leave it out: then a new id begins a new call."""
        if call.get("index") is not None:
            return _number(call["index"])
        last = max(self._calls, default=0)
        begins = call.get("id") is not None and self._calls.get(last, call).get("id") != call["id"]
        return last + 1 if begins else last

    def choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", **self._fields}
        message.update({field: "".join(pieces) for field, pieces in self._texts.items()})
        if self._calls:
            message["tool_calls"] = [self._call(i) for i in sorted(self._calls)]
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return {"finish_reason": None, **self._beside, **logprobs, "index": index, "message": message}

    def _call(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        if index not in self._arguments:
            return call
        return {**call, "function": {**call["function"], "arguments": "".join(self._arguments[index])}}


def _renewed(old: Any, new: Any) -> Any:
    """A name that is said again: some upstreams repeat it, or leave it null or empty, in each delta."""
    return old if new in (None, "") and old is not None else new


def _number(index: Any) -> int:
    if not isinstance(index, int):
        raise ValueError("an index is no number")
    return index
