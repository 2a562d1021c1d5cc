"""The live display of a run: reads the ledger in its own thread and shows the run's progress.

It can neither block nor fail the run: an error here ends only the display and is stored in `failed`. The
closing table is in `report.py`; the caller's `FrameScreen` draws on the screen.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Protocol

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..core.prices import format_dollars
from ..core.summary import RunGauge, RunSummary
from .formatting import (
    bars,
    cost,
    count,
    duration,
    line,
    make_facts,
    name_run,
    saved_usage,
    size,
    tally,
    tokens,
)

EVERY_ON_TERMINAL = 0.5
EVERY_ELSEWHERE = 30.0
READING_SHARE = 0.05  # maximum share of time spent on reading: a large ledger is read less often
MOST_FAILURES = 5  # consecutive failed readings that end the display
MOST_CONTROLS = 3  # requests to the running run
RECENT = 20  # memory readings in the chart
NOTHING_LEFT = "nothing left to do"  # the limit of a run that is about to end
PACE_SECONDS = 300.0  # seconds over which the rate is measured


class SummarySource(Protocol):
    """The source that the display reads, such as `LedgerReader`."""

    def summary(self) -> RunSummary: ...

    def close(self) -> None: ...


class FrameScreen(Protocol):
    """A screen with a replaceable frame at its end; `draw` returns at once."""

    @property
    def size(self) -> tuple[int, int]: ...

    def draw(self, frame: str) -> None: ...


class SettlePace(msgspec.Struct, frozen=True):
    """The rate at which samples settle."""

    per_minute: float | None = None
    left: float | None = None  # seconds; None if the total is unknown


class PaceMeter:
    """Measures the rate over the last PACE_SECONDS."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=1200)

    def measure(self, now: float, summary: RunSummary) -> SettlePace:
        self._seen.append((now, summary.settled))
        while now - self._seen[0][0] > PACE_SECONDS:
            self._seen.popleft()
        then, settled = self._seen[0]
        if now - then < 1 or summary.settled <= settled:
            return SettlePace()
        rate = (summary.settled - settled) / (now - then)
        left = None if summary.total is None else max(0, summary.total - summary.settled) / rate
        return SettlePace(per_minute=rate * 60, left=left)


class RecentMemory:
    """The latest memory readings, in bytes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def add_reading(self, gauge: RunGauge | None) -> tuple[int, ...]:
        if gauge is not None and (not self._seen or self._seen[-1][0] < gauge.at):
            self._seen.append((gauge.at, gauge.memory))
        return tuple(memory for _, memory in self._seen)


class LiveDisplay:
    """Shows a run while it runs: a frame on a terminal, periodic lines otherwise."""

    def __init__(
        self,
        reader_factory: Callable[[], SummarySource],
        say: Callable[[str], None],
        terminal: FrameScreen | None,
        clock: Callable[[], float] = time.monotonic,
        every: float | None = None,
    ) -> None:
        self._reader_factory = reader_factory
        self._say = say
        self._terminal = terminal
        self._clock = clock
        self._every = every or (EVERY_ON_TERMINAL if terminal else EVERY_ELSEWHERE)
        self._pacer = PaceMeter()
        self._recent = RecentMemory()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holdwater-display", daemon=True)
        self.failed: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the display and clear its frame; abandon a hanging reader after `timeout` seconds."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _watch(self) -> None:
        try:
            self._follow()
        except Exception as error:  # boundary: a broken display must not affect the run  # noqa: BLE001
            self.failed = f"{type(error).__name__}: {error}"
        finally:
            if self._terminal:
                self._terminal.draw("")

    def _follow(self) -> None:
        reader = self._reader_factory()
        try:
            pause = 0.0 if self._terminal else self._every
            failures = 0
            while not self._stopped.wait(pause):
                before = self._clock()
                try:
                    self._show(reader.summary())
                    failures = 0
                except Exception:  # boundary: one failed reading must not end a display of hours
                    failures += 1
                    if failures == MOST_FAILURES:
                        raise
                pause = max(self._every, (self._clock() - before) / READING_SHARE)
        finally:
            reader.close()

    def _show(self, summary: RunSummary) -> None:
        pace = self._pacer.measure(self._clock(), summary)
        if self._terminal is None:
            self._say(progress_line(summary, pace))
            return
        # One column stays free: a terminal wraps when its last column is written.
        page = render_frame(summary, pace, self._recent.add_reading(summary.gauge))
        self._terminal.draw(draw(page, self._terminal.size[0] - 1))


def draw(renderable: RenderableType, width: int) -> str:
    """Render a page for a terminal of `width` columns, without the final newline."""
    page = StringIO()
    console = Console(
        file=page,
        force_terminal=True,
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    console.print(renderable)
    return page.getvalue().rstrip("\n")


def render_frame(summary: RunSummary, pace: SettlePace, recent: tuple[int, ...] = ()) -> RenderableType:
    """Render the frame with the run's progress."""
    facts = make_facts(8)
    facts.add_row("settled", Text(describe_progress(summary, pace)))
    facts.add_row("outcomes", tally(summary.outcomes))
    if summary.gauge:
        facts.add_row("running", render_running(summary.gauge))
        facts.add_row("waiting", render_waiting(summary.gauge))
        facts.add_row("memory", render_memory(summary.gauge, recent))
        facts.add_row("disk", render_disk(summary.gauge))
    if summary.model is not None:
        facts.add_row("tokens", Text(tokens(summary.usage)))
    if summary.usage.priced:
        facts.add_row("cost", Text(cost(summary.usage)))
    if summary.saved.requests:
        facts.add_row("saved", Text(saved_usage(summary.saved)))
    if summary.events:
        facts.add_row("events", Text(line(list_counts(summary.events)), "yellow"))
    for name, text in render_control(summary, MOST_CONTROLS):
        facts.add_row(name, text)
    return Group(render_heading(summary), *render_bar(summary), facts)


def render_heading(summary: RunSummary) -> Text:
    title = Text(no_wrap=True, overflow="ellipsis")
    return title.append(name_run(summary), "bold").append(f"  {line(summary.directory)}", "dim")


def render_bar(summary: RunSummary) -> list[RenderableType]:
    """Render a bar if the total is known, nothing otherwise."""
    if summary.total is None:
        return []
    row = Table.grid(expand=True)  # a bar does not end its line by itself
    row.add_row(
        ProgressBar(total=max(1, summary.total), completed=summary.settled, finished_style="bar.complete")
    )
    return [row]


def describe_progress(summary: RunSummary, pace: SettlePace) -> str:
    """Return `12 of 40, 18.2 a minute, 42s so far, 1m 32s left`."""
    if summary.total is None:
        settled = f"{summary.settled} of {summary.planned} planned yet"
    else:
        settled = f"{summary.settled} of {summary.total}"
    rate = [] if pace.per_minute is None else [f"{pace.per_minute:.1f} a minute"]
    left = [] if pace.left is None else [f"{duration(pace.left)} left"]
    return ", ".join([settled, *rate, f"{duration(summary.seconds)} so far", *left])


def render_control(summary: RunSummary, most: int) -> Iterator[tuple[str, Text]]:
    """Render a pause and the last requests to the running run, each with a name."""
    for event in summary.control[-most:]:
        yield event.verb, Text(f"{format_clock(event.at)} {line(event.message, 200)}", "dim")
    if summary.paused is not None:
        said = f"since {format_clock(summary.paused.since)}: `holdwater unpause` continues the run"
        yield "paused", Text(said, "yellow")


def format_clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def render_running(gauge: RunGauge) -> Text:
    phases = f" ({list_counts(gauge.phases)})" if gauge.phases else ""
    workers = f" on {gauge.workers} worker{'s' * (gauge.workers > 1)}" if gauge.workers else ""
    draining = f", {gauge.draining} draining" if gauge.draining else ""
    binds = f"; limited by {gauge.binds}" if gauge.binds and gauge.binds != NOTHING_LEFT else ""
    return Text(f"{gauge.running}{phases}{workers}{draining}{binds}")


def render_waiting(gauge: RunGauge) -> Text:
    if not any(gauge.waiting.values()):
        return Text("none", "dim")
    why = ", ".join(f"{number} for {reason}" for reason, number in sort_counts(gauge.waiting) if number)
    return Text(line(why))


def render_memory(gauge: RunGauge, recent: tuple[int, ...] = ()) -> Text:
    if not gauge.memory_limit:
        return Text(size(gauge.memory))
    share = gauge.memory / gauge.memory_limit
    bound = f", bound by {gauge.bound}" if gauge.bound else ""
    pressure = f", pressure {gauge.pressure:.0f}%" if (gauge.pressure or 0) >= 1 else ""
    used = f"{size(gauge.memory)} of {size(gauge.memory_limit)} ({share:.0%})"
    line = f"  {bars(recent, max(gauge.memory_limit, *recent))}" if len(recent) > 1 else ""
    return Text(f"{used}{bound}{pressure}{line}", alarm_style(share))


def render_disk(gauge: RunGauge) -> Text:
    if not gauge.disk_total:
        return Text("unknown", "dim")
    share = 1 - gauge.disk_free / gauge.disk_total
    free = f"{size(gauge.disk_free)} free of {size(gauge.disk_total)}"
    if not gauge.disk_limit:
        return Text(free, alarm_style(share))
    used = gauge.disk_used / gauge.disk_limit
    budget = f"{size(gauge.disk_used)} of {size(gauge.disk_limit)} ({used:.0%})"
    return Text(f"{budget}, {free}", alarm_style(max(share, used)))


def alarm_style(share: float) -> str:
    return "red" if share > 0.95 else "yellow" if share > 0.85 else ""


def list_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sort_counts(counts) if number)


def sort_counts(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def progress_line(summary: RunSummary, pace: SettlePace) -> str:
    """Return the progress as one line, for logs."""
    total = "?" if summary.total is None else summary.total
    facts = {"settled": f"{summary.settled}/{total}", **{line(k, 40): v for k, v in summary.outcomes.items()}}
    if summary.paused is not None:
        facts |= {"paused": "yes"}
    if summary.gauge:
        facts |= {"running": summary.gauge.running, "waiting": sum(summary.gauge.waiting.values())}
        facts |= {"memory": size(summary.gauge.memory).replace(" ", "")}
        facts |= {"limited_by": summary.gauge.binds.replace(" ", "-") or "nothing"}
        facts |= {"disk_free": size(summary.gauge.disk_free).replace(" ", "")}
    if pace.per_minute is not None:
        facts["per_minute"] = f"{pace.per_minute:.1f}"
    if pace.left is not None:
        facts["left"] = duration(pace.left).replace(" ", "")
    facts |= {"tokens": count(summary.usage.tokens)}
    if summary.cost:
        facts["cost"] = format_dollars(summary.usage.nanodollars)
    return "progress " + " ".join(f"{name}={value}" for name, value in facts.items())
