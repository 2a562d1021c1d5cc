"""`holdwater transcript`: prints the conversation of an attempt, turn by turn, also of a running run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Annotated, BinaryIO

from cyclopts import Parameter

from .console import CommandConsole, expand_defaults, is_terminal, open_pager, terminal_size
from .flags import Flag, InstanceId, NamedRun

if TYPE_CHECKING:
    from rich.text import Text

    from ..api.reading import AttemptRow, ExchangeTree, Turn

STDOUT = 1


def transcript(
    run: NamedRun,
    instance: InstanceId,
    /,
    *,
    attempt: int | None = None,
    sample: int = 0,
    turn: Annotated[int | None, Parameter(name="--turn")] = None,
    raw: Flag = False,
    json: Flag = False,
) -> int:
    """Print the conversation of an attempt.

    The trajectory comes first, then the other threads: side calls, sub-agents, branches. On a terminal the
    text is wrapped and shown with `$PAGER`, or `less`.

    For example: `holdwater transcript latest add-1`, or `holdwater transcript runs/mine add-1 --turn 3 --raw`
    for the request of one turn as it was sent.

    Parameters
    ----------
    attempt
        The attempt's number in `holdwater show` (default: the attempt that decided the outcome).
    sample
        The sample's number, if there are several.
    turn
        Print only this turn: its new messages, and the reply.
    raw
        Print the whole request and the reply as JSON, as sent; without `--turn`, of the last turn.
    json
        Print one JSON document: a list of turns.
    """
    from ..api.reading import LedgerReader, find_attempt, find_instance, find_run, open_conversation

    with LedgerReader(find_run(run)) as reader:
        row = find_attempt(reader, find_instance(reader, instance), sample, attempt)
        tree = open_conversation(reader, row.attempt)
        if turn is not None:
            tree.find_thread(turn)  # raises for a missing turn before anything is printed
        if raw or json:
            with CommandConsole().stream() as out:
                print_raw(tree, turn, out) if raw else print_json(choose_turns(tree, turn), out)
        else:
            with open_pager() as page:
                print_text(row, tree, turn, page, samples=reader.config.samples > 1)
    return 0


def choose_turns(tree: ExchangeTree, number: int | None) -> Iterator[Turn]:
    from ..api.reading import read_thread_turns, read_turns

    return (
        read_turns(tree) if number is None else read_thread_turns(tree, tree.find_thread(number), only=number)
    )


def print_raw(tree: ExchangeTree, number: int | None, out: BinaryIO) -> None:
    from ..api.reading import render_raw_turn
    from ..core.errors import BadInput

    if not len(tree):
        raise BadInput("the attempt has made no model call")
    if number is None:
        number = next(turn for thread in tree.threads() for turn in thread.numbers[-1:])
    for piece in render_raw_turn(tree, number):
        out.write(piece)


def print_json(turns: Iterator[Turn], out: BinaryIO) -> None:
    import msgspec

    separator = b"["
    for turn in turns:
        out.write(separator + b"\n" + msgspec.json.encode(expand_defaults(turn)))
        separator = b","
    out.write(b"[]\n" if separator == b"[" else b"\n]\n")


def print_text(
    row: AttemptRow,
    tree: ExchangeTree,
    number: int | None,
    out: BinaryIO | IO[bytes],
    *,
    samples: bool = False,
) -> None:
    from rich.text import Text

    from ..view.transcript import render_title, render_turn

    paint = TranscriptPrinter(out)
    paint(render_title(row, tree, samples=samples))
    if not len(tree):
        paint(Text("no model call was made", "dim"))
    before = 0
    for turn in choose_turns(tree, number):
        for text in render_turn(turn, tree.blobs, opens=turn.thread != before):
            paint(text)
        before = turn.thread


class TranscriptPrinter:
    """Writes paragraphs: wrapped and in colour on a terminal, with unbroken lines otherwise."""

    def __init__(self, out: BinaryIO | IO[bytes]) -> None:
        import io

        from rich.console import Console as Rich

        self._out = out
        self._page = io.StringIO()
        self._terminal = is_terminal(STDOUT)
        self._width = terminal_size(STDOUT)[0]
        self._rich = Rich(
            file=self._page,
            force_terminal=self._terminal,
            width=self._width,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def __call__(self, text: Text) -> None:
        from ..view.transcript import wrap_text

        for row in wrap_text(text, self._rich, self._width) if self._terminal else (text,):
            self._rich.print(row, soft_wrap=True)
        self._out.write(self._page.getvalue().encode(errors="replace"))
        self._page.seek(0)
        self._page.truncate()
