"""Compares runs of one suite, as `holdwater compare` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import structs

from ..conversation.branches import read_branch_tree
from ..core.branch_tree import BranchTree
from ..core.comparison import ComparisonReport
from ..ledger.directory import find_run
from ..ledger.reader import LedgerReader
from ..ledger.scores import compare_runs


def compare(
    baseline: str | Path, run: str | Path, *others: str | Path, by: str | None = None
) -> ComparisonReport:
    """Compare `run` and each of `others` with `baseline`, instance by instance.

    `by` names a field of the instances' `data`: the report has a row for each of its values. Forks of one of
    the runs are also shown as branches of the attempt that they repeat.
    """
    paths = [find_run(str(path)) for path in (baseline, run, *others)]
    return structs.replace(compare_runs(paths, by), branches=tuple(read_branch_trees(paths)))


def read_branch_trees(paths: Sequence[Path]) -> Iterator[BranchTree]:
    """Yield the tree of each attempt of these runs that some of them fork."""
    with ExitStack() as stack:
        readers = [stack.enter_context(LedgerReader(path)) for path in paths]
        runs = {reader.config.id for reader in readers}
        forks: dict[tuple[str, int], list[LedgerReader]] = {}
        for reader in readers:
            origin = reader.config.fork
            if origin is not None and origin.run in runs:
                forks.setdefault((origin.run, origin.attempt), []).append(reader)
        for same in forks.values():
            yield read_branch_tree(same)
