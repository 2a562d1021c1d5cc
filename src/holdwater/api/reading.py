"""Trajectories in bulk, for training: `holdwater.read(run)`, lazily and while the run may still be running.

Each is a few rows; what was said is read from disk when it is asked for, an exchange at a time. One run in a
page is `show`, files for other programs are `export`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..core.records import Failure, Usage, Verdict
from ..core.serving import Node
from ..ledger.blobs import Blobs
from ..ledger.directory import RunDirectory
from ..ledger.export_openai import chat_messages, chat_tools, last_answered
from ..ledger.latest import find_run
from ..ledger.nodes import Media, nodes_of
from ..ledger.reader import Reader
from ..ledger.results import answer_of
from ..ledger.rollouts import RolloutRow, Wanted, count, ended_attempt, groups, rollouts
from ..ledger.sequences import Tokens as Tokens
from ..ledger.sequences import sequences
from ..ledger.trajectory import Tree, Turn, conversation_of, turns

T = TypeVar("T")


def read(
    run: str | Path,
    *,
    outcome: str | None = None,
    only: Sequence[str] = (),
    attempts: Literal["chosen", "all"] = "chosen",
) -> TrajectoryReader:
    """The trajectories of a run: a directory, or `latest`. Nothing is read before it is iterated over.

    `outcome` is `passed`, `failed` or a failure's place; `only` are patterns of instance ids. `chosen` is one
    attempt for each sample that is closed, `all` is every attempt that has ended.
    """
    directory = RunDirectory.open(find_run(str(run)))
    return TrajectoryReader(directory, Wanted(outcome=outcome, only=tuple(only), attempts=attempts))


class TrajectoryReader:
    """A run's trajectories; each iteration reads what is there by then."""

    def __init__(self, directory: RunDirectory, wanted: Wanted) -> None:
        self._directory = directory
        self._wanted = wanted

    def __iter__(self) -> Iterator[Trajectory]:
        """Samples in the order in which they were planned, or attempts as they began."""
        with Reader(self._directory) as reader:
            for row in rollouts(reader, self._wanted):
                yield _trajectory(reader, row)

    def __len__(self) -> int:
        """How many there are now."""
        with Reader(self._directory) as reader:
            return count(reader, self._wanted)

    def groups(self) -> Iterator[list[Trajectory]]:
        """Trajectories that belong together: one order's, or one instance's in an ordinary run.

        Only groups that are over as a whole; of each, what was asked for.
        """
        with Reader(self._directory) as reader:
            for rows in groups(reader, self._wanted):
                yield [_trajectory(reader, row) for row in rows]

    def attempt(self, attempt: int) -> Trajectory:
        """The trajectory of one attempt, which a result's `reference` names."""
        with Reader(self._directory) as reader:
            return _trajectory(reader, ended_attempt(reader, attempt))


class Trajectory:
    """An attempt that is over: how it ended, and on request what was said in it."""

    def __init__(self, directory: RunDirectory, row: RolloutRow, verdict: Verdict) -> None:
        self._directory = directory
        self._row = row
        self._verdict = verdict

    def __repr__(self) -> str:
        return f"<Trajectory {self.instance!r} sample={self.sample} outcome={self.outcome!r}>"

    @property
    def instance(self) -> str:
        return self._row.instance

    @property
    def sample(self) -> int:
        return self._row.sample

    @property
    def attempt(self) -> int:
        return self._row.attempt

    @property
    def outcome(self) -> str:
        """`passed`, `failed`, or the place of its failure."""
        return self._row.kind

    @property
    def reward(self) -> float | None:
        """Its score; None: it could not be scored."""
        return self._row.score

    @property
    def order(self) -> int | None:
        """The number of the order that it belongs to; None in an ordinary run."""
        return self._row.order

    @property
    def key(self) -> str | None:
        """That order's key."""
        return self._row.key

    @property
    def member(self) -> int:
        """Which of its order it is, or of the samples of its instance: 0, 1, 2, ..."""
        return self._row.member

    @property
    def metrics(self) -> dict[str, float]:
        return self._verdict.grade.metrics if self._verdict.grade else {}

    @property
    def answer(self) -> Any:
        """What the agent returned."""
        return answer_of(self._directory, self._verdict)

    @property
    def failure(self) -> Failure | None:
        return self._verdict.failure

    @property
    def usage(self) -> Usage:
        return self._verdict.usage

    @property
    def verdict(self) -> Verdict:
        """All that is known of how it ended: times, children, exchanges, ..."""
        return self._verdict

    def nodes(self, *, media: Media = "reference") -> Iterator[Node]:
        """Every message that was sent or said, once, with parent links; media as references or `inline`."""
        return self._kept(lambda tree: nodes_of(tree, media))

    def turns(self) -> Iterator[Turn]:
        """The model calls, the main thread first: `turn.thread` is 0 there."""
        return self._kept(turns)

    def messages(self) -> Iterator[dict[str, Any]]:
        """The main thread in the form of Chat Completions, up to the last reply; media are data URLs."""
        return self._kept(_spoken)

    def tools(self) -> list[dict[str, Any]]:
        """The tools of the main thread in the same form."""
        tree = self._tree()
        last = last_answered(tree)
        return chat_tools(tree, last) if last else []

    def tokens(self, *, beside: bool = False) -> Iterator[Tokens]:
        """The main thread as token ids with a mask, where the upstream gave them: one, or several.

        Another begins where a prompt does not begin with what came before it. `beside`: other threads too.
        """
        return self._kept(lambda tree: sequences(tree, beside=beside))

    def blob(self, name: str) -> bytes:
        """A medium, by a reference in a message (`holdwater-blob:...`) or by its hash alone."""
        hash_ = name.removeprefix("holdwater-blob:").removeprefix("holdwater-base64:").partition(":")[0]
        return Blobs(self._directory.blobs).get(hash_)

    def _kept(self, reading: Callable[[Tree], Iterator[T]]) -> Iterator[T]:
        try:
            yield from reading(self._tree())
        except FileNotFoundError:
            self._tree()  # says so, if it was dropped meanwhile
            raise

    def _tree(self) -> Tree:
        with Reader(self._directory) as reader:
            return conversation_of(reader, self.attempt)


def _trajectory(reader: Reader, row: RolloutRow) -> Trajectory:
    return Trajectory(reader.directory, row, reader.whole_verdict(row.attempt))


def _spoken(tree: Tree) -> Iterator[dict[str, Any]]:
    last = last_answered(tree)
    return chat_messages(tree, last) if last else iter(())
