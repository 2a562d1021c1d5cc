"""Model calls of Python agents in this process: a client without a connection, requests without a body.

The gateway handles them like any other call. Only the new messages of a continued conversation are copied and
hashed; no message is kept as bytes. The client does not retry: the gateway does.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Raw
from multidict import CIMultiDict

from ..core.errors import ModelFailed
from .body import RequestBody, RetainedBytes, join_request
from .request_parser import ParsedRequest, digest
from .upstreams.retry import parse_error

PIECE = 64 * 1024  # bytes encoded before they are sent
LARGE = 16 * 1024  # characters from which a text is worth not encoding each time

_encode = msgspec.json.Encoder().encode
_PLACEHOLDER = secrets.token_hex(16)  # replaces a text; random, so no message contains it


class InProcessRequest:
    """The part of a request that the relay needs."""

    transport = None
    headers = CIMultiDict({"Accept": "*/*", "Content-Type": "application/json", "User-Agent": "holdwater"})

    def __init__(self, head: dict[str, Raw], messages: LazyMessages) -> None:
        self._head = head
        self._messages = messages

    def make_body(self, key: str, retention: RetainedBytes) -> RequestBody:
        return RequestBody(join_request(key, _encode(self._head), self._span), None, retention)

    def parse(self, key: str) -> ParsedRequest:
        """Return the parsed request, in the form in which a recorder parses other requests."""
        messages, span = self._messages, self._span
        head = dict(self._head) if span is not None else {**self._head, key: Raw(b"[]")}
        return ParsedRequest(head, messages, 0, messages.digests, span, None)

    @property
    def _span(self) -> LazyMessages | None:
        return self._messages if len(self._messages.entries) else None


IncomingRequest = web.BaseRequest | InProcessRequest


class MessageCopy(NamedTuple):
    """A message: a copy that shares the texts, and the size and digest of its bytes."""

    message: Any
    size: int
    digest: bytes
    lasts: bool  # an equal message has the same bytes
    parts: tuple[bytes | str, ...] = ()  # its bytes, with large texts unencoded; empty: encode the message

    def encode(self) -> list[bytes]:
        if not self.parts:
            return [_encode(self.message)]
        return [part.encode() if isinstance(part, str) else part for part in self.parts]


class LazyMessages:
    """The immutable messages of a request, as JSON that is encoded when it is sent."""

    def __init__(self, entries: Sequence[MessageCopy]) -> None:
        self.entries = entries
        self.digests = b"".join([entry.digest for entry in entries])
        self._size = sum([entry.size for entry in entries]) + max(1, len(entries)) + 1

    def __len__(self) -> int:
        """Return the size in bytes."""
        return self._size

    def __getitem__(self, part: slice) -> list[bytes]:
        """Return the JSON of some of the messages, one by one."""
        return [b"".join(entry.encode()) for entry in self.entries[part]]

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole JSON array in small pieces."""
        held, size = [b"["], 0
        for number, entry in enumerate(self.entries):
            if number:
                held.append(b",")
            held += entry.encode()
            size += entry.size
            if size >= PIECE:
                yield b"".join(held)
                held, size = [], 0
        held.append(b"]")
        yield b"".join(held)


class MessageHistory:
    """The messages of an agent's last request. The agent may change its own: requests use copies."""

    def __init__(self) -> None:
        self._entries: list[MessageCopy] = []  # bound: the messages of one request

    def copy_messages(self, messages: Sequence[Mapping[str, Any]]) -> LazyMessages:
        known = 0
        for entry, message in zip(self._entries, messages, strict=False):
            # Python does not compare texts that are the same object, so a long history costs almost nothing.
            if not entry.lasts or entry.message != message:
                break
            known += 1
        self._entries = [*self._entries[:known], *map(_copy_message, messages[known:])]
        return LazyMessages(self._entries)


def _copy_message(message: Mapping[str, Any]) -> MessageCopy:
    try:
        copy, lasts = _copy_value(message), True
    except _UnstableValue:
        copy, lasts = msgspec.json.decode(_encode(message)), False
    content = _encode(copy)
    parts = _split_texts(copy) if lasts and len(content) >= LARGE else ()
    return MessageCopy(copy, len(content), digest(content), lasts, parts)


def _split_texts(message: Any) -> tuple[bytes | str, ...]:
    """Split a message's JSON at its large texts that need no escaping; return parts and texts in turn."""
    texts: list[str] = []
    around = _encode(_replace_texts(message, texts)).split(_PLACEHOLDER.encode())
    return (around[0], *(part for pair in zip(texts, around[1:], strict=True) for part in pair))


def _replace_texts(value: Any, texts: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _replace_texts(item, texts) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_texts(item, texts) for item in value]
    if value is None or len(value) < LARGE or not value.isascii() or len(_encode(value)) != len(value) + 2:
        return value
    texts.append(value)
    return _PLACEHOLDER


class _UnstableValue(Exception):
    """A value whose equals may encode differently: `1`, `True` and `1.0` are equal."""


def _copy_value(value: Any) -> Any:
    kind = type(value)
    if kind is str or value is None:
        return value
    if kind is dict:
        return {_check_key(key): _copy_value(item) for key, item in value.items()}
    if kind is list:
        return [_copy_value(item) for item in value]
    raise _UnstableValue


def _check_key(key: Any) -> str:
    if type(key) is not str:
        raise _UnstableValue
    return key


RequestSender = Callable[[str, InProcessRequest], Awaitable[tuple[int, bytes]]]
"""Takes a key and a request; returns the status and body of the response: `Gateway.ask`."""


class ChatClient:
    """One attempt's client for its model."""

    def __init__(
        self,
        ask: RequestSender,
        url: str,
        sandbox_url: str,
        key: str,
        name: str,
        side_name: str = "",
    ) -> None:
        self.url = url
        self.sandbox_url = sandbox_url
        self.key = key
        self.name = name
        self.side_name = side_name or name
        self._ask = ask
        self._conversation = MessageHistory()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the reply's JSON; raise `ModelFailed` with the upstream's message if there is none."""
        if options.get("stream"):
            raise ValueError("`chat` does not support `stream`: it returns the whole reply")
        head = {name: Raw(_encode(value)) for name, value in {"model": self.name, **options}.items()}
        status, content = await self._ask(
            self.key, InProcessRequest(head, self._conversation.copy_messages(messages))
        )
        if status != 200:
            raise _make_error(status, content)
        reply = _decode_reply(content)
        if "choices" not in reply:
            raise _make_error(status, content)
        return reply


def _decode_reply(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelFailed(f"the model's reply is not valid JSON: {error}", kind="garbage") from None


def _make_error(status: int, content: bytes) -> ModelFailed:
    message = parse_error(content).message or "no message"
    again = status in (408, 409, 429) or status >= 500
    return ModelFailed(f"the model call failed with {status}: {message}", kind=str(status), again=again)
