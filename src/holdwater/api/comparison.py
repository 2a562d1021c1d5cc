"""Compares runs of one suite, as `holdwater compare` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.comparison import (
    ComparisonReport,
    RunComparison,
    RunFigures,
    RunScores,
    compare_scores,
)
from ..core.errors import BadInput
from ..core.summary import compute_pass_rates
from ..ledger.directory import find_run
from ..ledger.reader import LedgerReader
from ..ledger.scores import read_scores, read_tags

TAGS = "tags"  # the field of an instance's data that has its tags


def compare(
    baseline: str | Path, run: str | Path, *others: str | Path, by: str | None = None
) -> ComparisonReport:
    """Compare `run` and each of `others` with `baseline`, instance by instance.

    `by` names a field of the instances' `data`: the report has a row for each of its values.
    """
    runs = [find_run(str(path)) for path in (baseline, run, *others)]
    with LedgerReader(runs[0]) as reader:
        scores = read_scores(reader)
        figures = [read_figures(reader, scores)]
        tags = read_tags(reader, TAGS if by is None else by)
    if by is not None and not tags:
        raise BadInput(f"no instance of `{runs[0]}` has the field `{by}` in its data")
    comparisons = []
    for path in runs[1:]:
        with LedgerReader(path) as reader:
            compared = read_scores(reader)
            figures.append(read_figures(reader, compared))
        comparisons.append(compare_run((runs[0], scores), (path, compared), tags))
    fields = {name: getattr(comparisons[0], name) for name in RunComparison.__struct_fields__}
    return ComparisonReport(**fields, runs=tuple(figures), others=tuple(comparisons[1:]))


def compare_run(
    baseline: tuple[Path, RunScores], other: tuple[Path, RunScores], tags: Mapping[str, Sequence[str]]
) -> RunComparison:
    """Compare two runs; raise BadInput if they have no instance in common."""
    names = (str(baseline[0]), str(other[0]))
    comparison = compare_scores(baseline[1], other[1], names, tags)
    if not comparison.instances and not comparison.unscored:
        if comparison.changed:
            reason = f"the content of all {len(comparison.changed)} common instances differs"
        else:
            reason = "they have no instance in common"
        raise BadInput(f"`{names[0]}` and `{names[1]}` cannot be compared: {reason}")
    return comparison


def read_figures(reader: LedgerReader, scores: RunScores) -> RunFigures:
    config, path = reader.config, reader.directory.path
    if config.recipe is not None or config.serving is not None:
        kind = "an image build" if config.recipe is not None else "a rollout server"
        raise BadInput(f"`{path}` cannot be compared: it is {kind}")
    summary = reader.summary()
    counts = Counter((found.scored, found.passed) for found in scores.values() if found.scored)
    return RunFigures(
        run=str(path),
        suite=config.suite,
        agent=config.agent,
        model=config.model,
        state=summary.state,
        samples=config.samples,
        settled=summary.settled,
        outcomes=summary.outcomes,
        score=summary.score,
        pass_at=compute_pass_rates(counts),
        usage=summary.usage,
        cost=summary.cost,
        seconds=summary.seconds,
    )
