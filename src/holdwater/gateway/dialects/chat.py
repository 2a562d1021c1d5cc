"""OpenAI Chat Completions: what a request asks for, how errors look, how a stream is read and put together.

It sees bytes and says what they mean; it neither sends nor records. `relay.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import Usage

NAME = "chat"
PATH = "chat/completions"
_TRUE = Raw(b"true")


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Asked(msgspec.Struct):
    """The keys of a request that change how it is passed on."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


def amended(head: dict[str, Raw], asked: Asked, model: str | None) -> dict[str, Raw]:
    """The keys that change on the way up: the model's name, and the wish for usage in a stream."""
    changed: dict[str, Raw] = {}
    if model is not None and asked.model != model:
        changed["model"] = Raw(msgspec.json.encode(model))
    if asked.stream and not asked.wants_usage:
        options = msgspec.json.decode(head.get("stream_options", b"null"), type=dict[str, Raw] | None) or {}
        changed["stream_options"] = Raw(msgspec.json.encode({**options, "include_usage": _TRUE}))
    return changed


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


def models_body(model: str | None) -> bytes:
    models = [{"id": model, "object": "model", "created": 0, "owned_by": "upstream"}] if model else []
    return msgspec.json.encode({"object": "list", "data": models})


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    usage: Any = None
    error: Any = None


class Whole(msgspec.Struct, frozen=True):
    """A reply that came in one piece."""

    usage: Usage
    error: Any  # what stands under `error`, if anything


def read_reply(body: bytes) -> Whole:
    """Raises `msgspec.MsgspecError` or `UnicodeDecodeError` if it is no reply."""
    if not body.isascii():
        body.decode()
    reply = msgspec.json.decode(body, type=_Reply)
    return Whole(_counted(reply.usage), reply.error)


def _counted(counts: Any) -> Usage:
    try:
        usage = msgspec.convert(counts, _Usage)
    except msgspec.ValidationError:
        return Usage(requests=1)  # none, or not in this dialect: unknown
    details = usage.prompt_tokens_details
    return Usage(
        requests=1,
        input_tokens=usage.prompt_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.completion_tokens or 0,
    )


class _Choice(msgspec.Struct):
    index: int = 0
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None
    id: Any = None
    created: Any = None
    model: Any = None
    system_fingerprint: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class Stream:
    """Reads a stream of events and puts the reply together. Knows which events the client did not ask for."""

    def __init__(self, wants_usage: bool) -> None:
        self._strips_usage = not wants_usage
        self._rest = b""  # the start of an event that has not ended: bounded by the relay
        self._envelope: dict[str, Any] = {}
        self._choices: dict[int, _Assembled] = {}
        self._usage: Any = None
        self.finished = False  # the reply is complete but for usage and the end mark
        self.done = False  # the end mark came
        self.error: Any = None

    def events(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes, each as it goes on to the client."""
        data = self._rest + piece if self._rest else piece
        start = 0
        while (end := _event_end(data, start)) > 0:
            event, start = data[start:end], end
            if self._passes(event):
                yield event
        self._rest = data[start:] if start else data

    @property
    def rest(self) -> bytes:
        """The start of an event whose end has not come."""
        return self._rest

    @property
    def began(self) -> bool:
        """Was anything said yet?"""
        return bool(self._choices)

    @property
    def ended(self) -> bool:
        """From here on, what comes ends the reply."""
        return self.finished or self.done or self.error is not None

    def reply(self) -> bytes:
        """What came, as one `chat.completion`."""
        choices = [self._choices[index].choice(index) for index in sorted(self._choices)]
        usage = {"usage": self._usage} if self._usage is not None else {}
        error = {"error": self.error} if self.error is not None else {}
        return msgspec.json.encode(
            {**self._envelope, "object": "chat.completion", "choices": choices, **usage, **error}
        )

    @property
    def usage(self) -> Usage:
        return _counted(self._usage)

    def _passes(self, event: bytes) -> bool:
        """Take `event` in; should it go on to the client?"""
        data = _data_of(event)
        if data == b"[DONE]":
            self.done = True
            return True
        if not data:
            return True  # a comment that keeps the connection alive
        try:
            chunk = _CHUNK.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.error = {"message": f"an event of the stream is no chunk: {error}", "type": "stream"}
            return True
        self._take(chunk)
        return bool(chunk.choices) or chunk.usage is None or not self._strips_usage

    def _take(self, chunk: _Chunk) -> None:
        if not self._envelope:
            fields = ("id", "created", "model", "system_fingerprint")
            self._envelope = {f: v for f in fields if (v := getattr(chunk, f)) is not None}
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.error is not None:
            self.error = chunk.error
        for choice in chunk.choices or ():
            self._choices.setdefault(choice.index, _Assembled()).take(choice)
            self.finished = self.finished or choice.finish_reason is not None


class _Assembled:
    """One choice of a reply that came in deltas."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}  # field -> its pieces
        self._fields: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}
        self._logprobs: dict[str, list[Any]] = {}
        self._finish: str | None = None

    def take(self, choice: _Choice) -> None:
        for field, value in (choice.delta or {}).items():
            if field == "tool_calls" and isinstance(value, list):
                for call in value:
                    self._take_call(call)
            elif isinstance(value, str) and field != "role":
                self._texts.setdefault(field, []).append(value)
            elif value is not None:
                self._fields[field] = value
        for field, value in (choice.logprobs or {}).items():
            if isinstance(value, list):
                self._logprobs.setdefault(field, []).extend(value)
        self._finish = choice.finish_reason or self._finish

    def _take_call(self, call: Any) -> None:
        if not isinstance(call, dict):
            return
        index = call.get("index", 0)
        known = self._calls.setdefault(index, {"type": "function"})
        known.update({k: v for k, v in call.items() if k not in ("index", "function") and v is not None})
        function = call.get("function") or {}
        fields = {k: v for k, v in function.items() if k != "arguments" and v is not None}
        known["function"] = {**known.get("function", {}), **fields}
        if isinstance(arguments := function.get("arguments"), str):
            self._arguments.setdefault(index, []).append(arguments)

    def choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, **self._fields}
        message.update({field: "".join(pieces) for field, pieces in self._texts.items()})
        if self._calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [self._call(i) for i in sorted(self._calls)]
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return {"index": index, "message": message, "finish_reason": self._finish, **logprobs}

    def _call(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        return {
            **call,
            "function": {**call["function"], "arguments": "".join(self._arguments.get(index, []))},
        }


def _event_end(data: bytes, start: int) -> int:
    """The position after the blank line that ends the event at `start`; 0 while there is none."""
    plain = data.find(b"\n\n", start)
    returns = data.find(b"\r\n\r\n", start, plain if plain >= 0 else len(data))
    if returns >= 0:
        return returns + 4
    return plain + 2 if plain >= 0 else 0


def _data_of(event: bytes) -> bytes:
    """The data of a server-sent event, its lines joined; empty for a comment."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)
