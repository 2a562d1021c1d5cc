"""The pages about whole runs: the list of runs, and one run over time with its outcomes and failures."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..conversation.model_usage import ModelUsageSums
from ..core.errors import HoldwaterError
from ..core.summary import RunGauge, RunSummary, compute_pass_rates
from ..ledger.directory import RunDirectory
from ..ledger.listing import (
    FIGURE_SORTS,
    ListedSample,
    count_failures,
    list_extremes,
    list_kinds,
    list_marks,
    list_running,
)
from ..ledger.reader import LedgerReader
from ..ledger.schema import FIGURES_VERSION
from .live import PageEvent, PageWork
from .page import PageRequest, PageResponse, load_templates, render_data, render_page
from .run_pool import FoundRun, RunPool, read_state

MOST_CELLS = 2000  # of a waffle; the rest is counted
MOST_POINTS = 2000  # of a chart
EXTREMES = ("time", "cost", "tries", "memory", "tokens")
HIGHEST = 5  # rows of the slowest and most expensive samples
MARKS = {  # kind of an event -> its label on the time axis
    "worker.lost": "worker lost",
    "worker.retired": "recycled",
    "governor.preempt": "preempted",
    "model.steered": "steered",
    "control.pause": "paused",
    "control.unpause": "unpaused",
    "control.stop": "stop",
    "control.set": "set",
    "control.cancel": "cancel",
    "control.retry": "retry",
    "control.note": "note",
}
MEMORY = ("memory", "memory_limit", "leased", "sandboxes")
DISK = ("disk_used", "disk_limit", "disk_free")
COLUMNS = ("at", *MEMORY, *DISK, "running", "workers", "lag")
RUN_SORTS = ("started", "score", "cost", "seconds", "settled", "state", "name")
RUN_STATES = ("running", "finished", "interrupted", "stopped", "unfinished", "unreadable")
DEFAULT_ORDER = {"state": "up", "name": "up"}  # of the others: down
PROGRESS_SECONDS = 0.5


class ListedRun(NamedTuple):
    """A run in the list of runs; without a summary it cannot be read, and `problem` says why."""

    found: FoundRun
    summary: RunSummary | None
    problem: str = ""

    @property
    def state(self) -> str:
        return self.summary.state if self.summary is not None else "unreadable"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the share of passed samples."""
        return compute_interval(self.summary) if self.summary is not None else None


def show_runs(asked: PageRequest) -> PageResponse:
    wanted, state = asked.query.get("find", "").lower(), asked.query.get("state", "")
    runs = [run for run in read_runs(asked.pool) if wanted in _describe(run).lower()]
    runs = [run for run in runs if not state or run.state == state]
    sort, order = asked.query.get("sort", "started"), asked.query.get("order", "")
    runs.sort(key=lambda run: _rank(run, sort), reverse=(order or DEFAULT_ORDER.get(sort, "down")) == "down")
    groups: dict[str, list[ListedRun]] = {}
    for run in runs:
        groups.setdefault(run.summary.suite if run.summary else "", []).append(run)
    choices = {"sorts": RUN_SORTS, "states": RUN_STATES, "orders": ("down", "up")}
    return render_page(
        "runs.html", asked=asked, groups=groups, sort=sort, state=state, order=order, **choices
    )


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


def count_models(asked: PageRequest) -> PageWork:
    """Yield the usage of each model as a table, while the exchanges of the run are read."""
    told = time.monotonic()
    with asked.pool.open(asked.run) as reader:
        counts = reader.counts()
        sums = ModelUsageSums(reader)
        for _ in sums.sum_attempts():
            if time.monotonic() >= told + PROGRESS_SECONDS:
                told = time.monotonic()
                yield PageEvent("progress", f"{sums.attempts} of {counts.attempts} attempts")
                yield _render_models(sums)
            else:
                yield None
    yield _render_models(sums)
    skipped = f", without {sums.skipped} turns that are too large or damaged" if sums.skipped else ""
    yield PageEvent("end", f"{sums.attempts} attempts{skipped}")


def _render_models(sums: ModelUsageSums) -> PageEvent:
    models = sorted(sums.models.items(), key=lambda item: (-item[1].nanodollars, -item[1].tokens, item[0]))
    return PageEvent("part", load_templates().get_template("models.html").render(models=models))


def show_extremes(asked: PageRequest) -> PageResponse:
    """Show failures by kind and the most extreme samples: the page loads this part afterwards."""
    with asked.pool.open(asked.run) as reader:
        failures, highest = count_failures(reader), _list_highest(reader)
    return render_page("extremes.html", run=asked.run, failures=failures, highest=highest)


def read_timeline(asked: PageRequest) -> PageResponse:
    """Return the readings of a run as columns for the chart, and the marks on its axis."""
    with asked.pool.open(asked.run) as reader:
        gauges = thin_gauges(reader.gauges())
        marks = sorted([*list_marks(reader, MARKS), *_find_kills(gauges)])
    reasons = sorted({reason for gauge in gauges for reason in gauge.waiting})
    return render_data(
        {
            **{name: [getattr(gauge, name) for gauge in gauges] for name in COLUMNS},
            "waiting": {reason: [gauge.waiting.get(reason, 0) for gauge in gauges] for reason in reasons},
            "binds": [gauge.binds for gauge in gauges],
            "marks": [{"at": at, "label": label, "message": message[:300]} for at, label, message in marks],
        }
    )


def _find_kills(gauges: Sequence[RunGauge]) -> Iterator[tuple[float, str, str]]:
    """Yield a mark for each reading that saw further OOM kills in the run's own control group."""
    for before, after in pairwise(gauges):
        if after.oom_kills > before.oom_kills:
            yield after.at, "OOM", f"{after.oom_kills - before.oom_kills} in the run's control group"


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


def _list_highest(reader: LedgerReader) -> dict[str, Sequence[ListedSample]]:
    has_figures = reader.version >= FIGURES_VERSION
    names = [name for name in EXTREMES if has_figures or name not in FIGURE_SORTS]
    return {name: list_extremes(reader, name, HIGHEST) for name in names}


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
    if sort in DEFAULT_ORDER:
        return run.state if sort == "state" else run.found.name
    value = getattr(summary, sort if sort in RUN_SORTS else "started") if summary else None
    return -1.0 if value is None else value
