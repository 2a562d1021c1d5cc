"""Two runs side by side: what was fixed and broken, and where the conversations about one instance part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import NamedTuple

from ..conversation.trajectory import ExchangeThread, ExchangeTree, Turn, find_attempt, read_thread_turns
from ..core.errors import BadInput
from ..dialect.message import digest_message
from ..ledger.rows import AttemptRow
from ..ledger.scores import compare_runs
from .page import PageRequest, PageResponse, render_page
from .transcript_pages import describe_messages, open_tree

WINDOW = 10  # turns of each run after the one in which they part
MOST_NAMES = 200


class ShownSide(NamedTuple):
    """The conversation of one run about an instance."""

    run: str
    name: str  # of the run
    row: AttemptRow
    turns: list[Turn]  # from the one on in which they part


def show_comparison(asked: PageRequest) -> PageResponse:
    """Compare the runs of the address; without any, offer the runs to compare."""
    names = [asked.query[side] for side in ("a", "b") if asked.query.get(side)]
    runs = asked.pool.list_runs()
    report = None
    if len(names) == 2:
        report = compare_runs([asked.pool.find(name).path for name in names], asked.query.get("by") or None)
    return render_page("compare.html", asked=asked, runs=runs, report=report, most=MOST_NAMES)


def show_parting(asked: PageRequest) -> PageResponse:
    """Show both conversations from the first turn on whose request differs."""
    name, sample = asked.query.get("instance", ""), asked.read_number("sample")
    sides, readers = [], []
    for side in ("a", "b"):
        run = asked.query.get(side, "")
        with asked.pool.open(run) as reader:
            instance = reader.find_instance(name)
            if instance is None:
                raise BadInput(f"no such instance in `{reader.directory.path}`: `{name[:200]}`")
            row = find_attempt(reader, instance, sample, None)
            readers.append((run, str(reader.directory.path), row, open_tree(reader, row.attempt)))
    same = count_common_turns(readers[0][3], readers[1][3])
    for run, path, row, tree in readers:
        sides.append(ShownSide(run, path, row, list(_read_from(tree, same))))
    return render_page(
        "parting.html", asked=asked, instance=name, same=same, sides=sides, **describe_messages()
    )


def count_common_turns(first: ExchangeTree, second: ExchangeTree) -> int:
    """Return the number of turns at the beginning of both trajectories whose requests say the same."""
    for number, (one, other) in enumerate(zip_longest(_read_trajectory(first), _read_trajectory(second))):
        if one is None or other is None or _digest_request(one) != _digest_request(other):
            return number
    return len(first.threads()[0].numbers) if first.threads() else 0


def _read_trajectory(tree: ExchangeTree) -> Iterator[Turn]:
    threads = tree.threads()
    return read_thread_turns(tree, threads[0]) if threads else iter(())


def _read_from(tree: ExchangeTree, place: int) -> Iterator[Turn]:
    """Yield a window of turns from a place in the trajectory on."""
    threads = tree.threads()
    if threads:
        numbers = threads[0].numbers[max(0, place - 1) : place + WINDOW]
        turns = read_thread_turns(tree, ExchangeThread(0, numbers))
        yield from islice(turns, 1 if place else 0, None)


def _digest_request(turn: Turn) -> tuple[bytes, ...]:
    return tuple(digest_message(message) for message in turn.new)
