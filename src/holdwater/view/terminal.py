"""The live display of a run: reads the ledger in a thread of its own and shows where the run stands.

It can neither stall nor fail the run: what goes wrong here is in `failed` and ends the display alone. The
closing table is in `report.py`; who draws on the screen is the caller's `Terminal`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from io import StringIO
from typing import Protocol

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..core.prices import dollars
from ..core.summary import Gauge, Summary
from .figures import cost, count, duration, line, saved, size, spec, tally, tokens
from .timeline import bars

EVERY_ON_TERMINAL = 0.5
EVERY_ELSEWHERE = 30.0
SHARE = 0.05  # of the time the display may spend on reading: a large ledger is read less often
MOST_FAILURES = 5  # readings that fail one after another end the display
RECENT = 20  # readings of memory that are drawn
NOTHING = "nothing left to do"  # what limits a run that is about to end
WINDOW = 300.0  # seconds that the rate is taken over


class Source(Protocol):
    """What the display reads: `ledger.Reader` is one."""

    def summary(self) -> Summary: ...

    def close(self) -> None: ...


class Terminal(Protocol):
    """A screen with a frame at its end that can be replaced; `draw` returns at once."""

    @property
    def size(self) -> tuple[int, int]: ...

    def draw(self, frame: str) -> None: ...


class Pace(msgspec.Struct, frozen=True):
    """How fast samples settle."""

    per_minute: float | None = None
    left: float | None = None  # seconds, where the total is known


class Pacer:
    """Measures the pace over the last minutes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=1200)

    def see(self, now: float, summary: Summary) -> Pace:
        self._seen.append((now, summary.settled))
        while now - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        then, settled = self._seen[0]
        if now - then < 1 or summary.settled <= settled:
            return Pace()
        rate = (summary.settled - settled) / (now - then)
        left = None if summary.total is None else max(0, summary.total - summary.settled) / rate
        return Pace(per_minute=rate * 60, left=left)


class Recent:
    """The latest readings of memory, in bytes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def see(self, gauge: Gauge | None) -> tuple[int, ...]:
        if gauge is not None and (not self._seen or self._seen[-1][0] < gauge.at):
            self._seen.append((gauge.at, gauge.memory))
        return tuple(memory for _, memory in self._seen)


class Display:
    """Shows a run while it runs: a frame on a terminal, a line now and then elsewhere."""

    def __init__(
        self,
        reader_factory: Callable[[], Source],
        say: Callable[[str], None],
        terminal: Terminal | None,
        clock: Callable[[], float] = time.monotonic,
        every: float | None = None,
    ) -> None:
        self._reader_factory = reader_factory
        self._say = say
        self._terminal = terminal
        self._clock = clock
        self._every = every or (EVERY_ON_TERMINAL if terminal else EVERY_ELSEWHERE)
        self._pacer = Pacer()
        self._recent = Recent()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="holdwater-display", daemon=True)
        self.failed: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """End the display and clear its frame; a reader that hangs is left behind after `timeout` seconds."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _watch(self) -> None:
        try:
            self._follow()
        except Exception as error:  # boundary: a display that breaks costs the run nothing  # noqa: BLE001
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
                except Exception:  # boundary: one bad reading does not end a display of hours
                    failures += 1
                    if failures == MOST_FAILURES:
                        raise
                pause = max(self._every, (self._clock() - before) / SHARE)
        finally:
            reader.close()

    def _show(self, summary: Summary) -> None:
        pace = self._pacer.see(self._clock(), summary)
        if self._terminal is None:
            self._say(progress_line(summary, pace))
            return
        # One column stays free: a terminal that is written to its last column wraps.
        page = render(summary, pace, self._recent.see(summary.gauge))
        self._terminal.draw(draw(page, self._terminal.size[0] - 1))


def draw(renderable: RenderableType, width: int) -> str:
    """What `renderable` looks like on a terminal of `width` columns, without the last line's end."""
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


def render(summary: Summary, pace: Pace, recent: tuple[int, ...] = ()) -> RenderableType:
    """The frame: where the run stands."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True, min_width=8)
    facts.add_column()
    facts.add_row("settled", Text(progress(summary, pace)))
    facts.add_row("outcomes", tally(summary.outcomes))
    if summary.gauge:
        facts.add_row("running", running(summary.gauge))
        facts.add_row("waiting", waiting(summary.gauge))
        facts.add_row("memory", memory(summary.gauge, recent))
        facts.add_row("disk", disk(summary.gauge))
    if summary.model is not None:
        facts.add_row("tokens", Text(tokens(summary.usage)))
    if summary.usage.priced:
        facts.add_row("cost", Text(cost(summary.usage)))
    if summary.saved.requests:
        facts.add_row("saved", Text(saved(summary.saved)))
    if summary.events:
        facts.add_row("events", Text(line(listed(summary.events)), "yellow"))
    return Group(heading(summary), *bar(summary), facts)


def heading(summary: Summary) -> Text:
    named = " · ".join(spec(part) for part in (summary.suite, summary.agent, summary.model) if part)
    title = Text(no_wrap=True, overflow="ellipsis")
    return title.append(named, "bold").append(f"  {line(summary.directory)}", "dim")


def bar(summary: Summary) -> list[RenderableType]:
    """A bar where the total is known, nothing otherwise."""
    if summary.total is None:
        return []
    row = Table.grid(expand=True)  # a bar alone does not end its line
    row.add_row(
        ProgressBar(total=max(1, summary.total), completed=summary.settled, finished_style="bar.complete")
    )
    return [row]


def progress(summary: Summary, pace: Pace) -> str:
    """`12 of 40, 18.2 a minute, 42s so far, 1m 32s left`."""
    if summary.total is None:
        settled = f"{summary.settled} of {summary.planned} planned yet"
    else:
        settled = f"{summary.settled} of {summary.total}"
    rate = [] if pace.per_minute is None else [f"{pace.per_minute:.1f} a minute"]
    left = [] if pace.left is None else [f"{duration(pace.left)} left"]
    return ", ".join([settled, *rate, f"{duration(summary.seconds)} so far", *left])


def running(gauge: Gauge) -> Text:
    phases = f" ({listed(gauge.phases)})" if gauge.phases else ""
    workers = f" on {gauge.workers} worker{'s' * (gauge.workers > 1)}" if gauge.workers else ""
    draining = f", {gauge.draining} draining" if gauge.draining else ""
    binds = f"; limited by {gauge.binds}" if gauge.binds and gauge.binds != NOTHING else ""
    return Text(f"{gauge.running}{phases}{workers}{draining}{binds}")


def waiting(gauge: Gauge) -> Text:
    if not any(gauge.waiting.values()):
        return Text("none", "dim")
    why = ", ".join(f"{number} for {reason}" for reason, number in largest(gauge.waiting) if number)
    return Text(line(why))


def memory(gauge: Gauge, recent: tuple[int, ...] = ()) -> Text:
    if not gauge.memory_limit:
        return Text(size(gauge.memory))
    share = gauge.memory / gauge.memory_limit
    bound = f", bound by {gauge.bound}" if gauge.bound else ""
    pressure = f", pressure {gauge.pressure:.0f}%" if (gauge.pressure or 0) >= 1 else ""
    used = f"{size(gauge.memory)} of {size(gauge.memory_limit)} ({share:.0%})"
    line = f"  {bars(recent, max(gauge.memory_limit, *recent))}" if len(recent) > 1 else ""
    return Text(f"{used}{bound}{pressure}{line}", alarm(share))


def disk(gauge: Gauge) -> Text:
    if not gauge.disk_total:
        return Text("unknown", "dim")
    share = 1 - gauge.disk_free / gauge.disk_total
    free = f"{size(gauge.disk_free)} free of {size(gauge.disk_total)}"
    if not gauge.disk_limit:
        return Text(free, alarm(share))
    used = gauge.disk_used / gauge.disk_limit
    budget = f"{size(gauge.disk_used)} of {size(gauge.disk_limit)} ({used:.0%})"
    return Text(f"{budget}, {free}", alarm(max(share, used)))


def alarm(share: float) -> str:
    return "red" if share > 0.95 else "yellow" if share > 0.85 else ""


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in largest(counts) if number)


def largest(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def progress_line(summary: Summary, pace: Pace) -> str:
    """The same as one line of facts, for logs."""
    total = "?" if summary.total is None else summary.total
    facts = {"settled": f"{summary.settled}/{total}", **{line(k, 40): v for k, v in summary.outcomes.items()}}
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
        facts["cost"] = dollars(summary.usage.nanodollars)
    return "progress " + " ".join(f"{name}={value}" for name, value in facts.items())
