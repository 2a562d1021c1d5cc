"""Renders a conversation turn by turn: the new messages of each request, and the model's reply.

This module formats turns; `conversation/trajectory.py` selects them. Text of agents and models cannot control
the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from ..conversation.trajectory import ExchangeTree, Turn
from ..core.prices import format_dollars
from ..dialect import has_conversations
from ..dialect.message import CommonMessage, MessageMedia, ToolCall
from ..ledger.blobs import BlobStore
from ..ledger.rows import AttemptRow
from .formatting import block, duration, format_count, line, outcome_name, style_of, token_counts

STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
INDENT = "  "
SHORT = 16  # characters of a blob's hash; enough to find its file


def render_title(attempt: AttemptRow, tree: ExchangeTree, *, samples: bool = False) -> Text:
    """Render the instance, the attempt and its outcome; with `samples`, name the sample too."""
    sample = f" of sample {attempt.sample}" if samples or attempt.sample else ""
    text = Text(line(attempt.instance), "bold").append(f"  attempt {attempt.number}{sample}: ", "default")
    kind = attempt.kind or "not settled"
    text.append(outcome_name(kind) if attempt.kind else kind, style_of(kind))
    main, *others = [len(thread.numbers) for thread in tree.threads()] or [0]
    beside = f", {sum(others)} outside the trajectory" if others else ""
    return text.append(f", {format_count(main, 'turn')}{beside}", "default")


def render_turn(turn: Turn, blobs: BlobStore, opens: bool = False) -> Iterator[Text]:
    """Yield the paragraphs of a turn; `opens` marks the first turn of its thread."""
    if opens and turn.thread:
        yield Text()
        yield Text(f"=== {describe_thread(turn)}", "bold")
    yield Text()
    yield Text(f"--- turn {turn.number}", "bold").append(f"  {turn_facts(turn)}", "dim")
    if turn.dropped and not (opens and turn.thread):
        yield Text(f"keeps {turn.kept} messages, drops {turn.dropped}", "dim")
    for message in turn.new:
        yield from render_message(message, blobs)
    if turn.reply is not None:
        yield from render_message(turn.reply, blobs)
    for place, other in enumerate(turn.others, 2):
        yield Text(f"choice {place}", "dim")
        yield from render_message(other, blobs)
    if turn.error or turn.reply is None:
        yield Text(f"error  {line(turn.error, 2000) or f'no reply, status {turn.status}'}", "red")


def describe_thread(turn: Turn) -> str:
    """Describe the origin of a thread outside the trajectory."""
    if turn.parent is None:
        kind = "a conversation" if has_conversations(turn.dialect) else f"`{turn.dialect}`, a call"
        return f"side {turn.thread}: {kind} of its own"
    total = turn.kept + turn.dropped
    return f"side {turn.thread}: branches off turn {turn.parent}, keeps {turn.kept} of its {total} messages"


def turn_facts(turn: Turn) -> str:
    usage = turn.usage
    said = [
        time.strftime("%H:%M:%S", time.localtime(turn.started)),
        duration(turn.seconds),
        token_counts(usage),
        format_dollars(usage.nanodollars) if usage.priced else "",
        "from the record" if turn.recorded else "",
        line(turn.model, 60),
        "" if turn.status == 200 else f"status {turn.status}",
        line(turn.finish, 40),
    ]
    return "  ".join(word for word in said if word)


def render_message(message: CommonMessage, blobs: BlobStore) -> Iterator[Text]:
    title = Text(line(message.role), STYLES.get(message.role, "default"))
    about = [line(word, 80) for word in (message.tool, message.answers) if word]
    title.append(f"  {' '.join(about)}" if about else "", "dim").append(
        "  failed" if message.failed else "", "red"
    )
    yield title
    if message.reasoning:
        yield Text(block(message.reasoning, INDENT), "dim italic")
    for part in message.parts:
        yield Text(block(part, INDENT) if isinstance(part, str) else INDENT + describe_media(part, blobs))
    for call in message.calls:
        yield render_call(call)


def render_call(call: ToolCall) -> Text:
    text = Text(f"{INDENT}> ").append(line(call.name, 80), "bold").append(f"  {line(call.id, 80)}", "dim")
    if isinstance(call.arguments, dict):
        for name, value in call.arguments.items():
            text.append(f"\n{INDENT * 2}{line(name, 80)}:", "dim").append(format_value(value))
    elif call.arguments is not None:
        text.append(f"\n{INDENT}{format_value(call.arguments)}")
    return text


def format_value(value: object) -> str:
    """Format an argument: on its own line, or below it if it has several lines."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    shown = block(text, INDENT * 3)
    return "\n" + shown if "\n" in shown else " " + shown.strip()


def describe_media(media: MessageMedia, blobs: BlobStore) -> str:
    """Return a short description: `[image/png 150 KB blob 3f2a...]`."""
    kind = line(media.type, 80) or "media"
    if media.blob:
        return f"[{kind} {kilobytes(len(blobs.get(media.blob)))} blob {media.blob[:SHORT]}]"
    if media.data:
        return f"[{kind} {kilobytes(len(media.data) * 3 // 4)} inline]"
    return f"[{kind} {line(media.url)}]"


def kilobytes(size: int) -> str:
    return f"{-(-size // 1024)} KB"


def wrap_text(text: Text, console: Console, width: int) -> Iterator[Text]:
    """Yield the lines of `text`, wrapped to `width` columns; continuation lines keep the indentation."""
    for row in text.split("\n", allow_blank=True):
        margin = len(row.plain) - len(row.plain.lstrip(" "))
        margin = min(margin, width // 2)
        for part in row[margin:].wrap(console, width - margin):
            yield Text(" " * margin).append_text(part)
