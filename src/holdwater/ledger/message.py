"""A message in one form, whatever the dialect: who speaks, what is said, which tools are called.

Records, and the rules that hold for every dialect. What each dialect looks like is in `dialects.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from blake3 import blake3

from ..core.records import Record
from .media import renamed

# What true references begin with once they are decoded; what anybody else wrote cannot begin so.
MARK = f"{secrets.token_hex(12)}-"
WORD = "holdwater-"
MOST_OPEN = 1024  # calls without an answer that are remembered

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign JSON raises


class Media(Record, frozen=True):
    """A medium in a message: in the run's blobs, inline as base64, or somewhere else."""

    type: str = ""  # `image/png`; empty where it is not known
    blob: str = ""
    data: str = ""  # base64
    url: str = ""


class ToolCall(Record, frozen=True):
    name: str
    arguments: Any = None  # an object, or the text that is none
    id: str = ""


class Message(Record, frozen=True):
    role: str  # `system`, `user`, `assistant`, `tool`, or `unknown`
    parts: tuple[str | Media, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""  # the id of the call that a tool's message answers
    tool: str = ""  # the tool's name, where the message says it
    failed: bool = False  # the tool's own word for it

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.parts if isinstance(part, str))


def referring(raw: bytes) -> Any:
    """`decoded` for JSON of a record whose media stay references."""
    return decoded(renamed(raw, MARK.encode()))


def decoded(raw: bytes) -> Any:
    """Foreign JSON; what cannot be read comes back as text."""
    try:
        return msgspec.json.decode(raw)
    except _UNREADABLE:
        return raw.decode(errors="replace").replace(MARK, WORD)


def merged(messages: Iterable[Message]) -> Iterator[Message]:
    """Neighbouring messages of the assistant as one: some dialects send thought, text and calls apart."""
    before: Message | None = None
    for message in messages:
        if before is not None and before.role == message.role == "assistant":
            before = _joined(before, message)
            continue
        if before is not None:
            yield before
        before = message
    if before is not None:
        yield before


def _joined(a: Message, b: Message) -> Message:
    return Message(
        role=a.role,
        parts=a.parts + b.parts,
        reasoning="\n\n".join(text for text in (a.reasoning, b.reasoning) if text),
        calls=a.calls + b.calls,
    )


def same(a: Message, b: Message) -> bool:
    """Do they say the same and call the same? Thoughts and ids do not count: clients drop them."""
    return a.text.strip() == b.text.strip() and _called(a) == _called(b)


def gist(message: Message) -> bytes:
    """A digest that messages have in common which are the `same`."""
    said_ = msgspec.json.encode((message.text.strip(), _called(message)), order="sorted")
    return blake3(said_).digest(16)


def _called(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in message.calls]


class Pairing:
    """Gives an id to calls that have none, and to the answers that stand for them, by name and order."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[ToolCall] = []  # bound: MOST_OPEN

    def named(self, message: Message) -> Message:
        if message.calls:
            calls = tuple(self._identified(call) for call in message.calls)
            self._open = [*self._open, *calls][-MOST_OPEN:]
            return msgspec.structs.replace(message, calls=calls)
        if message.role != "tool":
            return message
        call = self._answered(message)
        if call is None:
            return message
        self._open.remove(call)
        return msgspec.structs.replace(message, answers=call.id, tool=message.tool or call.name)

    def _identified(self, call: ToolCall) -> ToolCall:
        self._count += 1
        return call if call.id else msgspec.structs.replace(call, id=f"call_{self._count}")

    def _answered(self, message: Message) -> ToolCall | None:
        for call in self._open:
            if call.id == message.answers or (not message.answers and call.name == message.tool):
                return call
        return None


# Foreign JSON, taken for what it should be: anything else counts as absent.


def fields(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def string(value: Any) -> str:
    return value if isinstance(value, str) and not value.startswith(MARK) else ""


def said(value: Any) -> str | Media:
    """A text; one that is a data URL from end to end was put into the blobs and is a medium."""
    if isinstance(value, str):
        return medium(value) if value.startswith(MARK) else value
    return compact(value)


def medium(value: Any, type: str = "", *, bare: bool = False) -> Media:
    """What stands where media stand: a reference, a data URL, base64 (`bare`) or a URL."""
    text = value if isinstance(value, str) else ""
    if text.startswith(MARK):
        _, name, kind = [*text.removeprefix(MARK).split(":", 2), ""][:3]
        return Media(type=kind.partition(";")[0] or type, blob=name)
    if text.startswith("data:") and ";base64," in text:
        kind, _, data = text.removeprefix("data:").partition(";base64,")
        return Media(type=kind.partition(";")[0] or type, data=data)
    return Media(type=type, data=text) if bare else Media(type=type, url=text)


def arguments(value: Any) -> Any:
    """The arguments of a call, which some dialects send as JSON in a text."""
    if not isinstance(value, str):
        return plain(value)
    try:
        return msgspec.json.decode(value or "{}")
    except _UNREADABLE:
        return plain(value)


def plain(value: Any) -> Any:
    """`value` with references as they stand on disk."""
    if isinstance(value, str):
        return WORD + value.removeprefix(MARK) if value.startswith(MARK) else value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def compact(value: Any) -> str:
    """What nobody knows how to show, as JSON."""
    return "" if value is None else msgspec.json.encode(plain(value)).decode()
