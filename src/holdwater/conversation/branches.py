"""Reads the branches of a forked attempt: one key for each turn of their main threads, from the records.

Turns that every fork repeats are not read. `core/branch_tree.py` makes the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from ..core.branch_tree import BranchEnd, BranchPath, BranchTree, grow_tree
from ..core.errors import BadInput, HoldwaterError
from ..core.fork_origin import ForkOrigin
from ..dialect.message import digest_message
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow
from .trajectory import ExchangeThread, ExchangeTree, find_attempt, open_conversation, read_thread_turns

MOST_TURNS = 300  # of each branch that are compared
LONGEST_TEXT = 60  # characters of a reply


def read_branch_tree(forks: Sequence[LedgerReader]) -> BranchTree:
    """Return the tree of the branches of some forks of one attempt, and of that attempt if it is there."""
    origin = _require_origin(forks[0])
    shared = min(_require_origin(fork).turn - _changes_reply(fork) for fork in forks)
    branches: list[BranchPath] = []
    repeated = 0  # places on the main thread
    try:
        with LedgerReader(Path(origin.directory)) as reader:
            row = reader.attempt(origin.attempt)
            if row is not None and reader.config.id == origin.run:
                tree = open_conversation(reader, row.attempt)
                repeated = sum(number <= shared for number in _list_main(tree))
                branches.append(_read_branch(reader, row, tree, repeated, recorded=True))
    except HoldwaterError:
        pass  # the tree has the forks alone
    for fork in forks:
        branches += _read_fork(fork, repeated)
    if not branches:
        raise BadInput("no branch has begun yet")
    return grow_tree(origin, branches)


def _require_origin(fork: LedgerReader) -> ForkOrigin:
    if fork.config.fork is None:
        raise BadInput(f"not a fork: `{fork.directory.path}`")
    return fork.config.fork


def _changes_reply(fork: LedgerReader) -> bool:
    origin = _require_origin(fork)
    return origin.say is not None or origin.then_say is not None


def _read_fork(fork: LedgerReader, repeated: int) -> Iterator[BranchPath]:
    instance = fork.find_instance(_require_origin(fork).instance)
    begun = {row.sample for row in fork.attempts(instance.id)} if instance is not None else ()
    for sample in sorted(begun):
        assert instance is not None
        row = find_attempt(fork, instance, sample, None)
        yield _read_branch(fork, row, open_conversation(fork, row.attempt), repeated)


def _read_branch(
    reader: LedgerReader, row: AttemptRow, tree: ExchangeTree, repeated: int, *, recorded: bool = False
) -> BranchPath:
    main = _list_main(tree)
    keys, texts = [b""] * min(repeated, len(main)), [""] * min(repeated, len(main))
    read = main[max(0, repeated - 1) : repeated + MOST_TURNS]
    for turn in read_thread_turns(tree, ExchangeThread(0, read)):
        if turn.number in main[:repeated]:
            continue
        said = (*turn.new, *((turn.reply,) if turn.reply is not None else ()))
        keys.append(blake3(b"".join(map(digest_message, said))).digest(16))
        texts.append(_describe_reply(turn.reply.text if turn.reply is not None else turn.error))
    end = BranchEnd(
        directory=str(reader.directory.path),
        attempt=row.attempt,
        sample=row.sample,
        kind=row.kind or "",
        turns=len(main),
        recorded=recorded,
    )
    return BranchPath(end, keys, texts)


def _list_main(tree: ExchangeTree) -> tuple[int, ...]:
    threads = tree.threads()
    return threads[0].numbers if threads else ()


def _describe_reply(text: str) -> str:
    flat = " ".join(text[: 4 * LONGEST_TEXT].split())
    return flat if len(flat) <= LONGEST_TEXT else f"{flat[: LONGEST_TEXT - 1]}…"
