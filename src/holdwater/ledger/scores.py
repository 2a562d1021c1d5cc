"""Reads the scores of runs and compares them: a small row for each instance in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..core.comparison import (
    ComparisonReport,
    InstanceScores,
    RunComparison,
    RunFigures,
    RunScores,
    bootstrap_pass_rates,
    compare_scores,
)
from ..core.errors import BadInput, LedgerCorrupt
from . import instance_tags
from .reader import LedgerReader


def compare_runs(runs: Sequence[Path], by: str | None = None) -> ComparisonReport:
    """Compare each run with the first one, instance by instance; `by` is the field that has the tags."""
    with LedgerReader(runs[0]) as reader:
        scores = read_scores(reader)
        figures = [read_figures(reader, scores)]
        tags = read_tags(reader, instance_tags.TAGS if by is None else by)
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
        pass_at=bootstrap_pass_rates(counts),
        usage=summary.usage,
        cost=summary.cost,
        seconds=summary.seconds,
        fork=config.fork,
    )


def read_scores(reader: LedgerReader) -> dict[str, InstanceScores]:
    """Return the scores of all planned instances, in the order of planning."""
    return {row[1]: InstanceScores(*row[2:]) for row in reader.paged(_SCORES)}


def read_tags(reader: LedgerReader, field: str) -> dict[str, tuple[str, ...]]:
    """Return the values of a field of `Instance.data`: a list has several tags, any other value is one."""
    found = {}
    for row in reader.instances():
        try:
            tags = instance_tags.read_tags(reader.payload(row.id), field)
        except msgspec.MsgspecError as e:
            raise LedgerCorrupt(f"instance `{row.name}` of the run cannot be read: {e}") from e
        if tags:
            found[row.name] = tags
    return found


_SCORES = """
    SELECT i.id, i.name, i.digest,
        coalesce(sum(o.kind IN ('passed', 'failed')), 0), coalesce(sum(o.kind = 'passed'), 0),
        coalesce(sum(CASE WHEN o.kind IN ('passed', 'failed') THEN o.score END), 0.0),
        coalesce(sum(o.kind NOT IN ('passed', 'failed')), 0)
    FROM instance i LEFT JOIN outcome o ON o.instance = i.id
    WHERE i.id > ? GROUP BY i.id ORDER BY i.id LIMIT ?
"""
