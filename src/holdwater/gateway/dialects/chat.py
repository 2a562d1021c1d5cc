"""OpenAI Chat Completions: reads requests, writes errors, reads streams and assembles their replies.

It is the only one of the four dialects whose streams report usage only on request: the gateway requests it,
and removes it from the stream if the client did not.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..request_parser import RequestForm
from . import KEEP_ALIVE_COMMENT, AdaptedRequest, ParsedReply, RequestTarget, as_stream, impose_model
from .sse import EventStream, decode_object, join_values

_TRUE = Raw(b"true")
_STREAM = msgspec.json.Decoder(bool | None)
_OPTIONS = msgspec.json.Decoder(dict[str, Raw] | None)


class ChatDialect:
    """Implements `Dialect`."""

    form = RequestForm("chat", "messages")
    keep_alive = KEEP_ALIVE_COMMENT

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        stream = _STREAM.decode(head.get("stream", b"null"))
        options = _OPTIONS.decode(head.get("stream_options", b"null")) or {}
        wants_usage = bytes(options.get("include_usage", b"")) == b"true"
        changes = impose_model(head, model)
        if stream and not wants_usage:
            changes["stream_options"] = Raw(msgspec.json.encode({**options, "include_usage": _TRUE}))
        return AdaptedRequest(place, changes, wants_usage=wants_usage)

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})

    def read_reply(self, body: bytes) -> ParsedReply:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_ChatReply)
        return ParsedReply(count_usage(reply.usage), reply.error)

    def stream(self, asked: AdaptedRequest) -> ChatStream:
        return ChatStream(asked.wants_usage)

    def render_stream(self, reply: bytes) -> list[bytes]:
        return as_stream.render_chat(reply)


class _ChatReply(msgspec.Struct):
    usage: Any = None
    error: Any = None


class _ChatDetails(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _ChatUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _ChatDetails | None = None
    completion_tokens_details: _ChatDetails | None = None


def count_usage(counts: Any) -> ModelUsage:
    """Return the usage that an upstream reports for a call."""
    try:
        usage = msgspec.convert(counts, _ChatUsage)
    except msgspec.ValidationError:
        return ModelUsage(requests=1)  # missing, or not in this dialect: unknown
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
        chunk = decode_object(data)
        choices, usage = chunk.pop("choices", None) or [], chunk.pop("usage", None)
        self.error = chunk.pop("error", None) or self.error
        self._usage = self._usage if usage is None else usage
        for field, value in chunk.items():
            if self._envelope.get(field) is None:
                self._envelope[field] = value
        for choice in choices:
            self._take_choice(_check_index(choice.get("index", 0)), choice)
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


class ChatStream(ChoiceStream):
    """Assembles a message per choice."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__(wants_usage)
        self._choices: dict[int, _ChoiceAssembly] = {}

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        self._choices.setdefault(index, _ChoiceAssembly()).take(choice)

    def _assemble(self) -> list[dict[str, Any]]:
        return [self._choices[index].build_choice(index) for index in sorted(self._choices)]

    def _reply(self) -> dict[str, Any]:
        return {**super()._reply(), "object": "chat.completion"}


class _ChoiceAssembly:
    """One choice of a reply that came in deltas.

    A field that no delta has is absent, and null differs from empty: a client that receives the reply again
    must send back the same message.
    """

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
                self._fields[field] = join_values(self._fields.get(field), value)
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
        index = self._find_index(call)
        known = self._calls.setdefault(index, {})
        for field, value in call.items():
            if field == "function" and isinstance(value, dict):
                arguments = value.get("arguments")
                if isinstance(arguments, str):
                    self._arguments.setdefault(index, []).append(arguments)
                named = known.get(field) or {}
                known[field] = {
                    **named,
                    **{name: _renew_name(named.get(name), v) for name, v in value.items()},
                }
            elif field == "custom":
                known[field] = join_values(known.get(field), value)
            elif field != "index":
                known[field] = _renew_name(known.get(field), value)

    def _find_index(self, call: dict[str, Any]) -> int:
        """Return the index of a call. Some upstreams omit it: then a new id begins a new call."""
        if call.get("index") is not None:
            return _check_index(call["index"])
        last = max(self._calls, default=0)
        begins = call.get("id") is not None and self._calls.get(last, call).get("id") != call["id"]
        return last + 1 if begins else last

    def build_choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", **self._fields}
        message.update({field: "".join(pieces) for field, pieces in self._texts.items()})
        if self._calls:
            message["tool_calls"] = [self._build_call(i) for i in sorted(self._calls)]
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return {"finish_reason": None, **self._beside, **logprobs, "index": index, "message": message}

    def _build_call(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        if index not in self._arguments:
            return call
        return {**call, "function": {**call["function"], "arguments": "".join(self._arguments[index])}}


def _renew_name(old: Any, new: Any) -> Any:
    """Return the latest value: some upstreams repeat a name, or leave it null or empty, in each delta."""
    return old if new in (None, "") and old is not None else new


def _check_index(index: Any) -> int:
    if not isinstance(index, int):
        raise ValueError("`index` is not a number")
    return index
