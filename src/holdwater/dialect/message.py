"""The common form of messages and replies, independent of the dialect: role, content, reasoning, tool calls.

This module has the records and the rules that hold for every dialect. Each dialect's own module parses its
requests and replies into them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from blake3 import blake3

from ..core.records import Record

# A reference to a blob in raw JSON: an unescaped quote before the word always opens a string, because no
# letter can follow a closing quote.
REFERENCE = re.compile(rb'(?<!\\)"holdwater-(blob|base64|json):([0-9a-f]{64})(?::([^"\\]{0,255}))?"')
# The prefix of genuine blob references after decoding. It is random: no foreign text can begin with it.
REFERENCE_MARK = f"{secrets.token_hex(12)}-"
REFERENCE_WORD = "holdwater-"
MOST_OPEN_CALLS = 1024  # unanswered calls kept in memory

# Raised by decoding untrusted JSON.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
# Raised by reading untrusted JSON that does not have the expected shape.
SHAPE_ERRORS = (*DECODE_ERRORS, ValueError, TypeError, LookupError, AttributeError, OverflowError)

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}


class MessageMedia(Record, frozen=True):
    """An image, audio or file in a message: in the run's blobs, inline as base64, or at a URL."""

    type: str = ""  # for example `image/png`; empty: unknown
    blob: str = ""
    data: str = ""  # base64
    url: str = ""


class ToolCall(Record, frozen=True):
    name: str
    arguments: Any = None  # a JSON object, or the text if it is not valid JSON
    id: str = ""

    @property
    def named_arguments(self) -> dict[str, Any]:
        """The arguments as an object, for formats that have no other form."""
        given = self.arguments
        return given if isinstance(given, dict) else {} if given is None else {"input": given}


class CommonMessage(Record, frozen=True):
    role: str  # `system`, `user`, `assistant`, `tool`, or `unknown`
    parts: tuple[str | MessageMedia, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""  # the id of the call that a tool message answers
    tool: str = ""  # the tool's name, if the message has it
    failed: bool = False  # the tool reports an error

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.parts if isinstance(part, str))


class ReplyTokens(Record, frozen=True):
    """Token ids and log probabilities of a reply, where the upstream returns them."""

    prompt: tuple[int, ...] = ()
    completion: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()  # one per token; None: not returned, or not finite


class ModelReply(Record, frozen=True):
    """A parsed reply: the message of the first choice, and the messages of the other choices."""

    message: CommonMessage | None = None
    others: tuple[CommonMessage, ...] = ()
    finish: str = ""
    model: str = ""
    tokens: ReplyTokens = ReplyTokens()


def decode_referring(raw: bytes) -> Any:
    """Decode JSON of a recorded exchange as `decode_foreign` does; its media stay references."""
    if b'"holdwater-' in raw:
        mark = b'"' + REFERENCE_MARK.encode()
        raw = REFERENCE.sub(lambda match: mark + match[0].removeprefix(b'"holdwater-'), raw)
    return decode_foreign(raw)


def decode_foreign(raw: bytes) -> Any:
    """Decode foreign JSON; return it as text if it is invalid."""
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS:
        return raw.decode(errors="replace").replace(REFERENCE_MARK, REFERENCE_WORD)


def merge_messages(messages: Iterable[CommonMessage]) -> Iterator[CommonMessage]:
    """Join adjacent assistant messages: some dialects send reasoning, text and calls as separate items."""
    before: CommonMessage | None = None
    for message in messages:
        if before is not None and before.role == message.role == "assistant":
            before = _join_messages(before, message)
            continue
        if before is not None:
            yield before
        before = message
    if before is not None:
        yield before


def _join_messages(a: CommonMessage, b: CommonMessage) -> CommonMessage:
    return CommonMessage(
        role=a.role,
        parts=a.parts + b.parts,
        reasoning="\n\n".join(text for text in (a.reasoning, b.reasoning) if text),
        calls=a.calls + b.calls,
    )


def says_same(a: CommonMessage, b: CommonMessage) -> bool:
    """Return whether text and calls are the same. Reasoning and ids do not count: clients drop them."""
    return a.text.strip() == b.text.strip() and _list_calls(a) == _list_calls(b)


def digest_message(message: CommonMessage) -> bytes:
    """Return a digest that is equal for messages for which `says_same` is true."""
    said_ = msgspec.json.encode((message.text.strip(), _list_calls(message)), order="sorted")
    return blake3(said_).digest(16)


def _list_calls(message: CommonMessage) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in message.calls]


class CallPairing:
    """Assigns ids to calls without one, and to the matching tool messages, by tool name and order."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[ToolCall] = []  # bound: MOST_OPEN_CALLS

    def pair_message(self, message: CommonMessage) -> CommonMessage:
        if message.calls:
            calls = tuple([self._ensure_id(call) for call in message.calls])
            self._open = [*self._open, *calls][-MOST_OPEN_CALLS:]
            return message if calls == message.calls else msgspec.structs.replace(message, calls=calls)
        if message.role != "tool":
            return message
        call = self._find_call(message)
        if call is None:
            return message
        self._open.remove(call)
        return msgspec.structs.replace(message, answers=call.id, tool=message.tool or call.name)

    def _ensure_id(self, call: ToolCall) -> ToolCall:
        self._count += 1
        return call if call.id else msgspec.structs.replace(call, id=f"call_{self._count}")

    def _find_call(self, message: CommonMessage) -> ToolCall | None:
        for call in self._open:
            if call.id == message.answers or (not message.answers and call.name == message.tool):
                return call
        return None


# Typed access to foreign JSON: a value of another type counts as absent.


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_string(value: Any) -> str:
    return value if isinstance(value, str) and not value.startswith(REFERENCE_MARK) else ""


def to_part(value: Any) -> str | MessageMedia:
    """Return a text part. A text that consisted of one data URL was moved to the blobs and becomes media."""
    if isinstance(value, str):
        return to_media(value) if value.startswith(REFERENCE_MARK) else value
    return render_unknown(value)


def to_media(value: Any, type: str = "", *, bare: bool = False) -> MessageMedia:
    """Parse a media field: a blob reference, a data URL, base64 (`bare`) or a URL."""
    text = value if isinstance(value, str) else ""
    if text.startswith(REFERENCE_MARK):
        _, name, kind = [*text.removeprefix(REFERENCE_MARK).split(":", 2), ""][:3]
        return MessageMedia(type=kind.partition(";")[0] or type, blob=name)
    if text.startswith("data:") and ";base64," in text:
        kind, _, data = text.removeprefix("data:").partition(";base64,")
        return MessageMedia(type=kind.partition(";")[0] or type, data=data)
    return MessageMedia(type=type, data=text) if bare else MessageMedia(type=type, url=text)


def parse_call(call: dict[str, Any], arguments: str) -> ToolCall:
    """Parse a call whose arguments are in the field `arguments`."""
    return ToolCall(
        id=as_string(call.get("id")),
        name=as_string(call.get("name")),
        arguments=parse_arguments(call.get(arguments)),
    )


def parse_arguments(value: Any) -> Any:
    """Return the arguments of a call; some dialects send them as a JSON string."""
    if not isinstance(value, str):
        return restore_references(value)
    try:
        return msgspec.json.decode(value or "{}")
    except DECODE_ERRORS:
        return restore_references(value)


def restore_references(value: Any) -> Any:
    """Return `value` with blob references in their stored form."""
    if isinstance(value, str):
        return (
            REFERENCE_WORD + value.removeprefix(REFERENCE_MARK) if value.startswith(REFERENCE_MARK) else value
        )
    if isinstance(value, dict):
        return {key: restore_references(item) for key, item in value.items()}
    return [restore_references(item) for item in value] if isinstance(value, list) else value


def render_unknown(value: Any) -> str:
    """Render a value of an unknown kind as JSON."""
    return "" if value is None else msgspec.json.encode(restore_references(value)).decode()


def make_function_tool(name: str, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool definition in the Chat Completions format."""
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters or {}}}
