"""Reads a run, also a running one: `show`, `audit`, `export`, `transcript`, and `read` for trajectories.

A trajectory holds a few rows; its messages are read from disk on request, one exchange at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from ..conversation.branches import read_branch_tree
from ..conversation.nodes import MediaMode, build_nodes
from ..conversation.order_results import read_answer
from ..conversation.trajectory import ExchangeTree as ExchangeTree
from ..conversation.trajectory import Turn as Turn
from ..conversation.trajectory import find_attempt as find_attempt
from ..conversation.trajectory import open_conversation as open_conversation
from ..conversation.trajectory import read_thread_turns as read_thread_turns
from ..conversation.trajectory import read_turns as read_turns
from ..conversation.trajectory import render_raw_turn as render_raw_turn
from ..core.branch_tree import BranchTree
from ..core.errors import BadInput, HoldwaterError
from ..core.records import AttemptFailure, ModelUsage, Verdict
from ..core.serving_protocol import MessageNode
from ..core.summary import RunSummary
from ..core.token_sequences import TokenSequence as TokenSequence
from ..core.token_sequences import build_sequences
from ..export.formats import DIRECTORY_FORMATS as DIRECTORY_FORMATS
from ..export.formats import export_run
from ..export.openai import find_last_answered, render_chat_messages, render_chat_tools
from ..ledger.audit import AuditReport as AuditReport
from ..ledger.audit import audit_run
from ..ledger.blobs import BlobStore
from ..ledger.directory import RunDirectory as RunDirectory
from ..ledger.directory import find_run as find_run
from ..ledger.images import BuildReport as BuildReport
from ..ledger.images import report_build
from ..ledger.images import require_recipe as require_recipe
from ..ledger.reader import LedgerReader as LedgerReader
from ..ledger.rollouts import (
    RolloutFilter,
    RolloutRow,
    count_rollouts,
    find_ended_attempt,
    read_groups,
    read_rollouts,
)
from ..ledger.rows import AttemptRow as AttemptRow
from ..ledger.rows import InstanceRow as InstanceRow

T = TypeVar("T")


def show(path: str | Path) -> RunSummary:
    """Return the summary of a run."""
    with LedgerReader(path) as reader:
        return reader.summary()


def audit(path: str | Path) -> AuditReport:
    """Prove that nothing is missing: planned = settled, one verdict per attempt, every segment intact."""
    return audit_run(path)


def export(
    path: str | Path,
    out: BinaryIO | str | Path,
    *,
    what: str | None = None,
    format: str = "jsonl",
    everything: bool = False,
) -> str:
    """Stream a run, or a part of it, to `out`: a file, or a directory if the format needs one.

    The formats `atif`, `openhands`, `harbor`, and `swebench` with a path, write directories. Return a
    description of the omitted data.
    """
    return export_run(path, what, format, Path(out) if isinstance(out, str) else out, everything=everything)


def transcript(
    path: str | Path, instance: str, *, sample: int = 0, attempt: int | None = None
) -> Iterator[Turn]:
    """Yield the turns of an attempt, one in memory at a time: the trajectory, then the other threads."""
    with LedgerReader(path) as reader:
        row = find_attempt(reader, find_instance(reader, instance), sample, attempt)
        yield from read_turns(open_conversation(reader, row.attempt))


def find_instance(reader: LedgerReader, name: str) -> InstanceRow:
    """Return the row of an instance; raise BadInput, with the closest id, if there is none."""
    if found := reader.find_instance(name):
        return found
    names = [row.name for row in islice(reader.instances(), 1000)]
    near = get_close_matches(name, names, n=1)
    hint = (
        f"did you mean `{near[0]}`?" if near else f"the run has, for example, `{names[0]}`" if names else ""
    )
    raise BadInput(f"no such instance in the run: `{name[:200]}`", hint)


class ForkReport(RunSummary, frozen=True, kw_only=True):
    """The summary of a fork, and its branches."""

    branches: BranchTree | None  # None: they cannot be read


def report_run(reader: LedgerReader, summary: RunSummary) -> RunSummary | BuildReport:
    """Return the data that `--json` prints: a run's summary, or the report of an image build."""
    if reader.config.recipe is not None:
        return report_build(reader, summary)
    if summary.fork is None:
        return summary
    fields = {name: getattr(summary, name) for name in RunSummary.__struct_fields__}
    try:
        return ForkReport(**fields, branches=read_branch_tree([reader]))
    except HoldwaterError:
        return ForkReport(**fields, branches=None)


def read(
    run: str | Path,
    *,
    outcome: str | None = None,
    only: Sequence[str] = (),
    attempts: Literal["chosen", "all"] = "chosen",
) -> TrajectoryReader:
    """Return the trajectories of a run (a directory, or `latest`). Nothing is read before the iteration.

    `outcome` is `passed`, `failed` or the place of a failure; `only` are patterns of instance ids. `chosen`
    selects one attempt per closed sample, `all` every attempt that has ended.
    """
    directory = RunDirectory.open(find_run(str(run)))
    return TrajectoryReader(directory, RolloutFilter(outcome=outcome, only=tuple(only), attempts=attempts))


class TrajectoryReader:
    """A run's trajectories; each iteration reads the current state of the run."""

    def __init__(self, directory: RunDirectory, wanted: RolloutFilter) -> None:
        self._directory = directory
        self._wanted = wanted

    def __iter__(self) -> Iterator[Trajectory]:
        """Yield samples in the order of planning, or with `all` attempts in the order of their start."""
        with LedgerReader(self._directory) as reader:
            for row in read_rollouts(reader, self._wanted):
                yield _make_trajectory(reader, row)

    def __len__(self) -> int:
        """Return the current number of trajectories."""
        with LedgerReader(self._directory) as reader:
            return count_rollouts(reader, self._wanted)

    def groups(self) -> Iterator[list[Trajectory]]:
        """Yield trajectories that belong together: of one order, or of one instance in an ordinary run.

        Only finished groups are yielded, each with its selected trajectories.
        """
        with LedgerReader(self._directory) as reader:
            for rows in read_groups(reader, self._wanted):
                yield [_make_trajectory(reader, row) for row in rows]

    def attempt(self, attempt: int) -> Trajectory:
        """Return the trajectory of one attempt, named by the `reference` of a result."""
        with LedgerReader(self._directory) as reader:
            return _make_trajectory(reader, find_ended_attempt(reader, attempt))


class Trajectory:
    """An attempt that has ended: its result and, on request, its messages."""

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
        """`passed`, `failed`, or the place of the failure."""
        return self._row.kind

    @property
    def reward(self) -> float | None:
        """The score; None if the attempt could not be scored."""
        return self._row.score

    @property
    def order(self) -> int | None:
        """The number of its order; None in an ordinary run."""
        return self._row.order

    @property
    def key(self) -> str | None:
        """The key of its order."""
        return self._row.key

    @property
    def member(self) -> int:
        """The index in its order, or among the samples of its instance: 0, 1, 2, ..."""
        return self._row.member

    @property
    def metrics(self) -> dict[str, float]:
        return self._verdict.grade.metrics if self._verdict.grade else {}

    @property
    def answer(self) -> Any:
        """The agent's answer."""
        return read_answer(self._directory, self._verdict)

    @property
    def failure(self) -> AttemptFailure | None:
        return self._verdict.failure

    @property
    def usage(self) -> ModelUsage:
        return self._verdict.usage

    @property
    def verdict(self) -> Verdict:
        """The full verdict: times, children, exchanges, ..."""
        return self._verdict

    def nodes(self, *, media: MediaMode = "reference") -> Iterator[MessageNode]:
        """Yield every message once, with parent links; media are references or `inline`."""
        return self._read_kept(lambda tree: build_nodes(tree, media))

    def turns(self) -> Iterator[Turn]:
        """Yield the model calls, the main thread first (`turn.thread` is 0)."""
        return self._read_kept(read_turns)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the main thread in Chat Completions format, up to the last reply; media are data URLs."""
        return self._read_kept(_main_messages)

    def tools(self) -> list[dict[str, Any]]:
        """Return the tools of the main thread in Chat Completions format."""
        tree = self._tree()
        last = find_last_answered(tree)
        return render_chat_tools(tree, last) if last else []

    def sequences(self) -> list[TokenSequence]:
        """Return the token sequences of all threads, if the upstream returned token ids."""
        return build_sequences(self.nodes())

    def blob(self, name: str) -> bytes:
        """Return a medium by its reference in a message (`holdwater-blob:...`) or by its hash."""
        hash_ = name.removeprefix("holdwater-blob:").removeprefix("holdwater-base64:").partition(":")[0]
        return BlobStore(self._directory.blobs).get(hash_)

    def _read_kept(self, reading: Callable[[ExchangeTree], Iterator[T]]) -> Iterator[T]:
        try:
            yield from reading(self._tree())
        except FileNotFoundError:
            self._tree()  # raises if the exchanges were dropped in the meantime
            raise

    def _tree(self) -> ExchangeTree:
        with LedgerReader(self._directory) as reader:
            return open_conversation(reader, self.attempt)


def _make_trajectory(reader: LedgerReader, row: RolloutRow) -> Trajectory:
    return Trajectory(reader.directory, row, reader.whole_verdict(row.attempt))


def _main_messages(tree: ExchangeTree) -> Iterator[dict[str, Any]]:
    last = find_last_answered(tree)
    return render_chat_messages(tree, last) if last else iter(())
