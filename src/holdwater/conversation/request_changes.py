"""Compares a request with the one that it continues: what the client kept, removed, edited and added.

Only the end of the earlier request that was not kept is read: the record says how many messages stayed. Texts
are compared line by line, up to a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher, unified_diff
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from ..dialect import find_dialect
from ..dialect.interface import Dialect
from ..dialect.message import (
    CommonMessage,
    MessageMedia,
    as_dict,
    as_string,
    decode_referring,
    restore_references,
    says_same,
)
from .exchange_tree import ExchangeTree
from .trajectory import parse_reply

MOST_MESSAGES = 300  # of each side that are compared
MOST_LINES = 1000  # of a text that are compared
MOST_SHOWN = 200  # lines of one difference
LONGEST_LINE = 160  # characters; longer lines are compared in pieces

ChangeKind = Literal["added", "removed", "edited", "returned"]
DiffLine = tuple[Literal["added", "removed", "same", "place"], str]


class MessageChange(NamedTuple):
    """A message that the earlier request does not have, or has in another form."""

    kind: ChangeKind  # `returned`: the reply to the earlier request, as it was
    number: int  # of the message in its request, from 1
    message: CommonMessage
    lines: tuple[DiffLine, ...] = ()  # of an edited message


class FieldChange(NamedTuple):
    """A tool, a prompt outside the messages or a parameter that differs."""

    kind: ChangeKind
    name: str
    lines: tuple[DiffLine, ...]


class RequestChanges(NamedTuple):
    """The difference between a request and the one that it continues."""

    before: int | None  # the earlier exchange; None: the request continues none
    kept: int  # messages at the beginning that are the same
    messages: tuple[MessageChange, ...]
    fields: tuple[FieldChange, ...]
    cut: bool = False  # there are more messages than are compared

    def count(self, kind: ChangeKind) -> int:
        return sum(change.kind == kind for change in self.messages)


def compare_request(tree: ExchangeTree, number: int) -> RequestChanges:
    """Compare the request of an exchange with that of its parent."""
    exchange = tree.exchange(number)
    dialect = find_dialect(exchange.dialect)
    parent, keep = exchange.parent, exchange.keep
    new = [bytes(raw) for raw in exchange.append[:MOST_MESSAGES]]
    if parent is None:
        messages = _parse(dialect, new)
        added = tuple(MessageChange("added", place, said) for place, said in enumerate(messages, 1))
        return RequestChanges(None, 0, added, (), len(exchange.append) > MOST_MESSAGES)
    old = [bytes(raw) for _, raw in islice(tree.request(parent, keep), MOST_MESSAGES)]
    total = tree.node(parent).total
    cut = len(exchange.append) > MOST_MESSAGES or total - keep > MOST_MESSAGES
    before, after = _parse(dialect, old), _parse(dialect, new)
    reply = parse_reply(tree.exchange(parent)).message if total == keep else None
    changes = [*_compare_messages(before, after, keep, reply)]
    if old and not changes and old != new[: len(old)]:  # they differ in fields that no message shows
        lines = tuple(compare_texts(_render_raw(old), _render_raw(new)))
        changes.append(MessageChange("edited", keep + 1, CommonMessage("unknown"), lines))
    fields = () if exchange.head is None else _compare_heads(dialect, tree.head(parent), tree.head(number))
    return RequestChanges(parent, keep, tuple(changes), tuple(fields), cut)


def compare_texts(before: str, after: str) -> Iterator[DiffLine]:
    """Yield the lines of a unified difference, without its heading."""
    one, other = (list(islice(_split_lines(text), MOST_LINES)) for text in (before, after))
    for shown, line in enumerate(islice(unified_diff(one, other, n=2, lineterm=""), 2, None)):
        if shown == MOST_SHOWN:
            yield "place", "…"
            return
        if line.startswith("@@"):
            yield "place", line
        else:
            yield "added" if line[0] == "+" else "removed" if line[0] == "-" else "same", line[1:]


def render_plain(message: CommonMessage) -> str:
    """Return a message as plain text."""
    lines = [message.reasoning] if message.reasoning else []
    lines += [part if isinstance(part, str) else _describe_media(part) for part in message.parts]
    for call in message.calls:
        lines.append(f"{call.name}:")
        lines += [f"{name}: {_render_value(value)}" for name, value in call.named_arguments.items()]
    return "\n".join(lines)


def _compare_messages(
    before: list[CommonMessage], after: list[CommonMessage], keep: int, reply: CommonMessage | None
) -> Iterator[MessageChange]:
    if reply is not None and after and after[0].role == "assistant":
        if says_same(after[0], reply):
            yield MessageChange("returned", keep + 1, after[0])
        else:
            yield _edit(keep + 1, reply, after[0])
        after, keep = after[1:], keep + 1
    one, other = ([msgspec.json.encode(said, order="sorted") for said in side] for side in (before, after))
    for kind, a, b, c, d in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        pairs = 0
        while pairs < min(b - a, d - c) and before[a + pairs].role == after[c + pairs].role:
            yield _edit(keep + c + pairs + 1, before[a + pairs], after[c + pairs])
            pairs += 1
        for place in range(a + pairs, b):
            yield MessageChange("removed", keep + place + 1, before[place])
        for place in range(c + pairs, d):
            yield MessageChange("added", keep + place + 1, after[place])


def _edit(number: int, before: CommonMessage, after: CommonMessage) -> MessageChange:
    lines = tuple(compare_texts(render_plain(before), render_plain(after)))
    if not lines:  # ids and the like
        lines = tuple(compare_texts(_render_value(before), _render_value(after)))
    return MessageChange("edited", number, after, lines)


def _compare_heads(dialect: Dialect, before: dict[str, Any], after: dict[str, Any]) -> Iterator[FieldChange]:
    """Yield the tools, then the other fields that differ."""
    old, new = _name_tools(dialect, before), _name_tools(dialect, after)
    yield from _compare_fields(old, new, "tool ")
    if old or new:
        before, after = ({**head, "tools": None} for head in (before, after))
    yield from _compare_fields(before, after, "")


def _compare_fields(before: dict[str, Any], after: dict[str, Any], noun: str) -> Iterator[FieldChange]:
    for name in [*before, *(name for name in after if name not in before)]:
        one, other = before.get(name), after.get(name)
        if one != other:
            texts = ("" if value is None else _render_value(value) for value in (one, other))
            kind: ChangeKind = "edited" if name in before and name in after else "added"
            kind = "removed" if name not in after else kind
            yield FieldChange(kind, noun + name, tuple(compare_texts(*texts)))


def _name_tools(dialect: Dialect, head: dict[str, Any]) -> dict[str, Any]:
    tools = list(dialect.parse_tools(head))
    return {
        as_string(as_dict(tool.get("function")).get("name")) or f"{place}": tool
        for place, tool in enumerate(tools)
    }


def _parse(dialect: Dialect, messages: list[bytes]) -> list[CommonMessage]:
    return dialect.parse_messages([decode_referring(raw) for raw in messages])


def _split_lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        yield line[:LONGEST_LINE]
        for start in range(LONGEST_LINE, len(line), LONGEST_LINE):
            yield line[start : start + LONGEST_LINE]


def _render_raw(messages: Iterable[bytes]) -> str:
    return "\n".join(_render_value(decode_referring(raw)) for raw in messages)


def _render_value(value: Any) -> str:
    if isinstance(value, str):
        return str(restore_references(value))
    shown = msgspec.json.encode(restore_references(msgspec.to_builtins(value)))
    return msgspec.json.format(shown, indent=2).decode("utf-8", "replace")


def _describe_media(media: MessageMedia) -> str:
    return f"[{media.type or 'media'} {media.blob[:16] or media.url[:200]}]"
