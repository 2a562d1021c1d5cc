"""The pages about whole runs: the list of runs, and one run over time with its outcomes and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..core.errors import HoldwaterError
from ..core.summary import RunGauge, RunSummary, compute_pass_rates
from ..ledger.directory import RunDirectory
from ..ledger.listing import (
    FIGURE_SORTS,
    SampleFilter,
    SampleList,
    count_failures,
    list_kinds,
    list_marks,
    list_running,
)
from ..ledger.reader import LedgerReader
from .page import PageRequest, PageResponse, render_data, render_page
from .run_pool import FoundRun, RunPool, read_state

MOST_CELLS = 2000  # of a waffle; the rest is counted
MOST_POINTS = 2000  # of a chart
HIGHEST = 5  # rows of the slowest and most expensive samples
MARKS = {  # kind of an event -> its label on the time axis
    "worker.lost": "worker lost",
    "worker.recycled": "recycled",
    "memory.oom": "OOM",
    "governor.preempted": "preempted",
    "resume.changed": "resumed",
    "serve.steered": "steered",
    "control.pause": "paused",
    "control.unpause": "unpaused",
    "control.stop": "stop",
    "control.set": "set",
    "control.cancel": "cancel",
    "control.retry": "retry",
    "control.note": "note",
}
COLUMNS = ("at", "memory", "leased", "memory_limit", "sandboxes", "disk_used", "running", "workers", "lag")
RUN_SORTS = ("started", "score", "cost", "seconds", "state")


class ListedRun(NamedTuple):
    """A run in the list of runs; without a summary it cannot be read, and `problem` says why."""

    found: FoundRun
    summary: RunSummary | None
    problem: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the share of passed samples."""
        return compute_interval(self.summary) if self.summary is not None else None


def show_runs(asked: PageRequest) -> PageResponse:
    wanted = asked.query.get("find", "").lower()
    runs = [run for run in read_runs(asked.pool) if wanted in _describe(run).lower()]
    sort = asked.query.get("sort", "started")
    runs.sort(key=lambda run: _rank(run, sort), reverse=sort != "state")
    groups: dict[str, list[ListedRun]] = {}
    for run in runs:
        groups.setdefault(run.summary.suite if run.summary else "", []).append(run)
    return render_page("runs.html", asked=asked, groups=groups, sort=sort, sorts=RUN_SORTS)


def read_runs(pool: RunPool) -> Iterator[ListedRun]:
    """Read the summary of every run; a damaged one does not hide the others."""
    for found in pool.list_runs():
        try:
            yield ListedRun(found, read_summary(pool, found))
        except (HoldwaterError, OSError) as error:
            yield ListedRun(found, None, str(error))


def read_summary(pool: RunPool, found: FoundRun) -> RunSummary:
    """Return the summary of a run; if it has ended, it is read again only after a change of its ledger."""
    state = read_state(RunDirectory(found.path))
    known = pool.summaries.get(found.id)
    if known is not None and known[0] == state:
        return known[1]
    with pool.open(found.id) as reader:
        summary = reader.summary()
    if summary.ended is not None:
        pool.summaries[found.id] = state, summary
    return summary


def show_run(asked: PageRequest) -> PageResponse:
    with asked.pool.open(asked.run) as reader:
        summary = reader.summary()
        cells = list_kinds(reader, MOST_CELLS)
        values: dict[str, Any] = {
            "cells": cells,
            "hidden": max(0, summary.planned - len(cells)),
            "events": reader.events(last=30),
            "serves": reader.config.serving is not None,
        }
    interval = compute_interval(summary)
    return render_page("run.html", asked=asked, run=asked.run, summary=summary, interval=interval, **values)


def show_extremes(asked: PageRequest) -> PageResponse:
    """Show failures by kind and the most extreme samples: the page loads this part afterwards."""
    with asked.pool.open(asked.run) as reader:
        failures, highest = count_failures(reader), _list_highest(reader)
    return render_page("extremes.html", run=asked.run, failures=failures, highest=highest)


def read_timeline(asked: PageRequest) -> PageResponse:
    """Return the readings of a run as columns for the chart, and the marks on its axis."""
    with asked.pool.open(asked.run) as reader:
        gauges = thin_gauges(reader.gauges())
        marks = list_marks(reader, MARKS)
    reasons = sorted({reason for gauge in gauges for reason in gauge.waiting})
    return render_data(
        {
            **{name: [getattr(gauge, name) for gauge in gauges] for name in COLUMNS},
            "waiting": {reason: [gauge.waiting.get(reason, 0) for gauge in gauges] for reason in reasons},
            "binds": [gauge.binds for gauge in gauges],
            "marks": [{"at": at, "label": label, "message": message[:300]} for at, label, message in marks],
        }
    )


def show_moment(asked: PageRequest) -> PageResponse:
    at = float(asked.read_number("at"))
    with asked.pool.open(asked.run) as reader:
        running = list_running(reader, at)
    return render_page("moment.html", run=asked.run, at=at, running=running)


def compute_interval(summary: RunSummary) -> tuple[float, float] | None:
    """Return the 95 % interval of pass@1."""
    counts = {(1, 1): summary.outcomes.get("passed", 0), (1, 0): summary.outcomes.get("failed", 0)}
    rates = summary.pass_at or compute_pass_rates(counts)
    return (rates[0].low, rates[0].high) if rates else None


def _list_highest(reader: LedgerReader) -> dict[str, Sequence[Any]]:
    names = ("time", "cost", "tries", "memory", "tokens")
    lists = {name: SampleFilter(sort=name, descending=True) for name in names}
    if not SampleList(reader, SampleFilter()).has_figures:
        lists = {name: wanted for name, wanted in lists.items() if name not in FIGURE_SORTS}
    rows = {name: SampleList(reader, wanted).read_page(HIGHEST) for name, wanted in lists.items()}
    return {name: found for name, found in rows.items() if found and found[0].position}


def thin_gauges(gauges: Iterator[RunGauge]) -> Sequence[RunGauge]:
    """Return at most `MOST_POINTS` readings, evenly chosen, in bounded memory."""
    kept: list[RunGauge] = []
    step = 1
    for number, gauge in enumerate(gauges):
        if number % step == 0:
            kept.append(gauge)
            if len(kept) >= 2 * MOST_POINTS:
                kept, step = kept[::2], 2 * step
    return kept


def _describe(run: ListedRun) -> str:
    summary = run.summary
    if summary is None:
        return run.found.name
    return " ".join((run.found.name, summary.suite, summary.agent, summary.model or "", summary.state))


def _rank(run: ListedRun, sort: str) -> Any:
    summary = run.summary
    if sort == "state":
        return summary.state if summary else ""
    value = getattr(summary, sort if sort in RUN_SORTS else "started") if summary else None
    return -1.0 if value is None else value
