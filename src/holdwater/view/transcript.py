"""A conversation as people read it: turn by turn, what was new in the request and what the model replied.

It says how turns look; which there are is in `ledger/trajectory.py`. Text of agents and models cannot steer
the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from ..core.prices import dollars
from ..ledger.blobs import Blobs
from ..ledger.dialects import has_conversations
from ..ledger.message import Media, Message, ToolCall
from ..ledger.reader import AttemptRow
from ..ledger.trajectory import Tree, Turn
from .figures import block, called, duration, format_count, in_and_out, line, style_of

STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
INDENT = "  "
SHORT = 16  # characters of a blob's hash: enough to find its file


def render_title(attempt: AttemptRow, tree: Tree, *, samples: bool = False) -> Text:
    """Who acted and how it ended; `samples`: the instance has several, so that the first is named too."""
    sample = f" of sample {attempt.sample}" if samples or attempt.sample else ""
    text = Text(line(attempt.instance), "bold").append(f"  attempt {attempt.number}{sample}: ", "default")
    kind = attempt.kind or "not settled"
    text.append(called(kind) if attempt.kind else kind, style_of(kind))
    main, *others = [len(thread.numbers) for thread in tree.threads()] or [0]
    beside = f", {sum(others)} beside the trajectory" if others else ""
    return text.append(f", {format_count(main, 'turn')}{beside}", "default")


def render_turn(turn: Turn, blobs: Blobs, opens: bool = False) -> Iterator[Text]:
    """The paragraphs of a turn; `opens`: it is the first of its thread."""
    if opens and turn.thread:
        yield Text()
        yield Text(f"=== {beginning(turn)}", "bold")
    yield Text()
    yield Text(f"--- turn {turn.number}", "bold").append(f"  {facts(turn)}", "dim")
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


def beginning(turn: Turn) -> str:
    """Where a thread beside the trajectory comes from."""
    if turn.parent is None:
        kind = "a conversation" if has_conversations(turn.dialect) else f"`{turn.dialect}`, a call"
        return f"side {turn.thread}: {kind} of its own"
    total = turn.kept + turn.dropped
    return f"side {turn.thread}: branches off turn {turn.parent}, keeps {turn.kept} of its {total} messages"


def facts(turn: Turn) -> str:
    usage = turn.usage
    said = [
        time.strftime("%H:%M:%S", time.localtime(turn.started)),
        duration(turn.seconds),
        in_and_out(usage),
        dollars(usage.nanodollars) if usage.priced else "",
        "from the record" if turn.recorded else "",
        line(turn.model, 60),
        "" if turn.status == 200 else f"status {turn.status}",
        line(turn.finish, 40),
    ]
    return "  ".join(word for word in said if word)


def render_message(message: Message, blobs: Blobs) -> Iterator[Text]:
    title = Text(line(message.role), STYLES.get(message.role, "default"))
    about = [line(word, 80) for word in (message.tool, message.answers) if word]
    title.append(f"  {' '.join(about)}" if about else "", "dim").append(
        "  failed" if message.failed else "", "red"
    )
    yield title
    if message.reasoning:
        yield Text(block(message.reasoning, INDENT), "dim italic")
    for part in message.parts:
        yield Text(block(part, INDENT) if isinstance(part, str) else INDENT + pictured(part, blobs))
    for call in message.calls:
        yield render_call(call)


def render_call(call: ToolCall) -> Text:
    text = Text(f"{INDENT}> ").append(line(call.name, 80), "bold").append(f"  {line(call.id, 80)}", "dim")
    if isinstance(call.arguments, dict):
        for name, value in call.arguments.items():
            text.append(f"\n{INDENT * 2}{line(name, 80)}:", "dim").append(valued(value))
    elif call.arguments is not None:
        text.append(f"\n{INDENT}{valued(call.arguments)}")
    return text


def valued(value: object) -> str:
    """An argument: on its line, or below it where it has several."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    shown = block(text, INDENT * 3)
    return "\n" + shown if "\n" in shown else " " + shown.strip()


def pictured(media: Media, blobs: Blobs) -> str:
    """`[image/png 150 KB blob 3f2a...]`"""
    kind = line(media.type, 80) or "media"
    if media.blob:
        return f"[{kind} {kilobytes(len(blobs.get(media.blob)))} blob {media.blob[:SHORT]}]"
    if media.data:
        return f"[{kind} {kilobytes(len(media.data) * 3 // 4)} inline]"
    return f"[{kind} {line(media.url)}]"


def kilobytes(size: int) -> str:
    return f"{-(-size // 1024)} KB"


def wrap_text(text: Text, console: Console, width: int) -> Iterator[Text]:
    """The lines of `text`, each cut to `width` columns between words; what follows keeps its indentation."""
    for row in text.split("\n", allow_blank=True):
        margin = len(row.plain) - len(row.plain.lstrip(" "))
        margin = min(margin, width // 2)
        for part in row[margin:].wrap(console, width - margin):
            yield Text(" " * margin).append_text(part)
