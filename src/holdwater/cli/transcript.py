"""`holdwater transcript`: the conversation of an attempt, a turn at a time. The run may be running."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Annotated, BinaryIO

from cyclopts import Parameter

from .console import Console, is_terminal, terminal_size, whole
from .flags import Flag, find_run
from .pager import paged

if TYPE_CHECKING:
    from rich.text import Text

    from ..ledger.reader import AttemptRow
    from ..ledger.trajectory import Tree, Turn

STDOUT = 1


def transcript(
    run: str,
    instance: str,
    /,
    *,
    attempt: int | None = None,
    sample: int = 0,
    turn: Annotated[int | None, Parameter(name="--turn")] = None,
    raw: Flag = False,
    json: Flag = False,
) -> int:
    """Print the conversation of an attempt.

    The trajectory comes first, then what went on beside it: side calls, sub-agents, branches. On a terminal
    it is wrapped and shown by `$PAGER`, or `less`.

    For example: `holdwater transcript latest add-1`, or `holdwater transcript runs/mine add-1 --turn 3 --raw`
    for the request of one turn as it was sent.

    Parameters
    ----------
    run
        The run's directory; `latest` is the newest in `runs/`.
    instance
        The id of an instance of the run.
    attempt
        Which attempt, as `holdwater show` counts them; otherwise the one that the outcome was chosen from.
    sample
        Which sample, where there are several.
    turn
        One turn alone: what was new, and the reply.
    raw
        The whole request and the reply as JSON, as they were sent; without `--turn`, of the last turn.
    json
        Print one JSON document: a list of turns.
    """
    from ..ledger.reader import Reader
    from ..ledger.trajectory import conversation_of, find_attempt
    from .show import find_instance

    with Reader(find_run(run)) as reader:
        row = find_attempt(reader, find_instance(reader, instance), sample, attempt)
        tree = conversation_of(reader, row.attempt)
        if turn is not None:
            tree.thread_of(turn)  # refuses one that is not there before anything is printed
        if raw or json:
            with Console().stream() as out:
                print_raw(tree, turn, out) if raw else print_json(chosen(tree, turn), out)
        else:
            with paged() as page:
                print_text(row, tree, turn, page, samples=reader.config.samples > 1)
    return 0


def chosen(tree: Tree, number: int | None) -> Iterator[Turn]:
    from ..ledger.trajectory import thread_turns, turns

    return turns(tree) if number is None else thread_turns(tree, tree.thread_of(number), only=number)


def print_raw(tree: Tree, number: int | None, out: BinaryIO) -> None:
    from ..core.errors import BadInput
    from ..ledger.raw import raw_turn

    if not len(tree):
        raise BadInput("the attempt has made no model call")
    if number is None:
        number = next(turn for thread in tree.threads() for turn in thread.numbers[-1:])
    for piece in raw_turn(tree, number):
        out.write(piece)


def print_json(turns: Iterator[Turn], out: BinaryIO) -> None:
    import msgspec

    separator = b"["
    for turn in turns:
        out.write(separator + b"\n" + msgspec.json.encode(whole(turn)))
        separator = b","
    out.write(b"[]\n" if separator == b"[" else b"\n]\n")


def print_text(
    row: AttemptRow, tree: Tree, number: int | None, out: BinaryIO | IO[bytes], *, samples: bool = False
) -> None:
    from rich.text import Text

    from ..view.transcript import render_title, render_turn

    paint = Painter(out)
    paint(render_title(row, tree, samples=samples))
    if not len(tree):
        paint(Text("no model call was made", "dim"))
    before = 0
    for turn in chosen(tree, number):
        for text in render_turn(turn, tree.blobs, opens=turn.thread != before):
            paint(text)
        before = turn.thread


class Painter:
    """Writes paragraphs: on a terminal in colour and wrapped, elsewhere with long lines left whole."""

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
