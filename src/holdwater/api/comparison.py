"""Compares runs of one suite, as `holdwater compare` does."""

from __future__ import annotations

from pathlib import Path

from ..core.comparison import ComparisonReport
from ..ledger.directory import find_run
from ..ledger.scores import compare_runs


def compare(
    baseline: str | Path, run: str | Path, *others: str | Path, by: str | None = None
) -> ComparisonReport:
    """Compare `run` and each of `others` with `baseline`, instance by instance.

    `by` names a field of the instances' `data`: the report has a row for each of its values.
    """
    return compare_runs([find_run(str(path)) for path in (baseline, run, *others)], by)
