"""The live display: what it shows at each width, and that it cannot hurt the run."""

from __future__ import annotations

import threading

import pytest
from rich.text import Text
from tests.wait_bounds import stretch

from holdwater.core.records import GiB, MiB, ModelUsage
from holdwater.core.summary import RunGauge, RunSummary
from holdwater.view.formatting import bars, count, duration, line, memory_over_time, size, summarize_limits
from holdwater.view.live_display import (
    LiveDisplay,
    PaceMeter,
    RecentMemory,
    SettlePace,
    draw,
    progress_line,
    render_disk,
    render_frame,
    render_memory,
)
from holdwater.view.report import OutcomeOverview, totals


def summary(settled: int = 12, total: int | None = 40, **changes: object) -> RunSummary:
    fields: dict[str, object] = {
        "run": "r1",
        "directory": "runs/20300102-030405-demo",
        "suite": "demo",
        "agent": "bash",
        "model": "scripted",
        "state": "running",
        "planned": 30,
        "settled": settled,
        "total": total,
        "outcomes": {"model": 1, "failed": 2, "passed": 9},
        "usage": ModelUsage(
            requests=412, input_tokens=1_234_567, cached_tokens=800_000, output_tokens=34_000
        ),
        "seconds": 42.0,
        "gauge": RunGauge(
            at=0.0,
            running=8,
            waiting={"slot": 16, "back-off": 4},
            workers=2,
            draining=1,
            memory=1234 * MiB,
            memory_limit=8 * GiB,
            disk_free=12 * GiB,
            disk_total=80 * GiB,
            phases={"acting": 6, "grading": 2},
            pressure=12.4,
            bound="container",
            binds="memory",
        ),
        "events": {"worker.lost": 1},
    }
    return RunSummary(**{**fields, **changes})  # type: ignore[arg-type]


def lines(frame: str) -> list[str]:
    return [Text.from_ansi(row).plain for row in frame.split("\n")]


@pytest.mark.parametrize("width", [20, 60, 80, 120])
def test_no_row_of_the_frame_is_wider_than_the_terminal(width: int) -> None:
    frame = draw(render_frame(summary(), SettlePace(per_minute=18.2, left=92.0)), width)

    assert max(Text.from_ansi(row).cell_len for row in frame.split("\n")) <= width


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_frame_says_all_that_is_asked_of_it(width: int) -> None:
    shown = " ".join(
        " ".join(lines(draw(render_frame(summary(), SettlePace(per_minute=18.2, left=92.0)), width))).split()
    )

    for fact in (
        "12 of 40, 18.2 a minute, 42s so far, 1m 32s left",
        "9 passed, 2 failed, 1 model error",
        "8 (6 acting, 2 grading) on 2 workers, 1 draining",
        "16 for slot, 4 for back-off",
        "1.2 GiB of 8.0 GiB (15%), bound by container, pressure 12%",
        "12.0 GiB free of 80.0 GiB",
        "1.2M in (800.0k cached), 34.0k out, 412 calls",
        "1 worker.lost",
    ):
        assert fact in shown


def test_an_unknown_total_is_not_made_up() -> None:
    shown = "\n".join(lines(draw(render_frame(summary(total=None), SettlePace(per_minute=18.2)), 80)))

    assert "12 of 30 planned yet, 18.2 a minute, 42s so far" in shown
    assert "left" not in shown
    assert "━" not in shown


@pytest.mark.parametrize("pressure", [None, 0.4])
def test_pressure_that_is_unknown_or_nothing_is_not_shown(pressure: float | None) -> None:
    gauge = RunGauge(at=0.0, memory=MiB, memory_limit=GiB, pressure=pressure)

    assert render_memory(gauge).plain == "1 MiB of 1.0 GiB (0%)"


def test_a_disk_budget_is_shown_with_its_usage() -> None:
    free = {"disk_free": 30 * GiB, "disk_total": 80 * GiB}

    assert render_disk(RunGauge(at=0.0, **free)).plain == "30.0 GiB free of 80.0 GiB"
    used = render_disk(RunGauge(at=0.0, disk_used=19 * GiB, disk_limit=20 * GiB, **free))
    assert used.plain == "19.0 GiB of 20.0 GiB (95%), 30.0 GiB free of 80.0 GiB"
    assert used.style == "yellow"


def test_a_run_without_a_gauge_is_shown() -> None:
    shown = "\n".join(
        lines(draw(render_frame(summary(gauge=None, outcomes={}, settled=0), SettlePace()), 80))
    )

    assert "0 of 40, 42s so far" in shown


def test_no_colour_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    frame = draw(render_frame(summary(), SettlePace()), 80)

    assert "\x1b[32m" not in frame and "\x1b[38" not in frame


def test_names_from_outside_do_not_steer_the_terminal() -> None:
    frame = draw(
        render_frame(summary(suite="a\x1b[2Jb", agent="[red]x[/red]", directory="d\ne"), SettlePace()), 80
    )

    assert "\x1b[2J" not in frame
    assert "[red]x[/red]" in lines(frame)[0]
    assert "d e" in lines(frame)[0]


def test_the_line_for_logs_is_one_line_of_facts() -> None:
    told = progress_line(summary(), SettlePace(per_minute=18.2, left=92.0))

    assert told == (
        "progress settled=12/40 model=1 failed=2 passed=9 running=8 waiting=20 memory=1.2GiB "
        "limited_by=memory disk_free=12.0GiB per_minute=18.2 left=1m32s tokens=1.3M"
    )


def test_the_pace_is_that_of_recent_minutes_without_a_resumed_past() -> None:
    pacer = PaceMeter()
    pacer.measure(0.0, summary(settled=1000, total=2000))
    pacer.measure(300.0, summary(settled=1300, total=2000))

    pace = pacer.measure(600.0, summary(settled=1400, total=2000))

    assert pace == SettlePace(per_minute=20.0, left=1800.0)


def test_a_pace_needs_something_settled() -> None:
    pacer = PaceMeter()
    pacer.measure(0.0, summary(settled=5))

    assert pacer.measure(100.0, summary(settled=5)) == SettlePace()


class Source:
    """A reader of a run that never changes; it says when it has been read."""

    def __init__(self, error: Exception | None = None) -> None:
        self.read = threading.Event()
        self.closed = False
        self.error = error

    def summary(self) -> RunSummary:
        self.read.set()
        if self.error:
            raise self.error
        return summary()

    def close(self) -> None:
        self.closed = True


class Screen:
    size = (80, 24)

    def __init__(self) -> None:
        self.frames: list[str] = []
        self.drawn = threading.Event()

    def draw(self, frame: str) -> None:
        self.frames.append(frame)
        self.drawn.set()


def test_the_display_draws_and_leaves_a_clear_screen() -> None:
    source, screen, said = Source(), Screen(), list[str]()
    display = LiveDisplay(lambda: source, said.append, screen)

    display.start()
    assert screen.drawn.wait(stretch(10))
    display.stop()

    assert "passed" in screen.frames[0]
    assert screen.frames[-1] == ""
    assert source.closed and not said and display.failed is None


def test_without_a_terminal_it_says_lines() -> None:
    said = threading.Event()
    told: list[str] = []
    display = LiveDisplay(Source, lambda text: (told.append(text), said.set())[0], None, every=0.01)

    display.start()
    assert said.wait(stretch(10))
    display.stop()

    assert told[0].startswith("progress settled=12/40 ")


def test_a_reader_that_fails_ends_the_display_alone() -> None:
    source = Source(OSError("disk on fire"))
    ended = threading.Event()
    source.close = ended.set  # type: ignore[method-assign]
    display = LiveDisplay(lambda: source, lambda text: None, Screen(), every=0.01)

    display.start()
    assert ended.wait(stretch(10)), "it fails again and again, and is given up"
    display.stop()

    assert display.failed == "OSError: disk on fire"


def test_a_reader_that_hangs_does_not_hold_the_end_up() -> None:
    hung = threading.Event()
    display = LiveDisplay(lambda: hung.wait() and Source(), lambda text: None, Screen())  # type: ignore[arg-type,return-value]

    display.start()
    display.stop(timeout=0.05)

    hung.set()  # let the thread go


def test_a_display_that_was_never_started_stops() -> None:
    LiveDisplay(Source, lambda text: None, None).stop()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.44, "0.4s"), (9.96, "10s"), (59.6, "1m 00s"), (185, "3m 05s"), (7620, "2h 07m"), (270000, "3d 03h")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_sizes_and_counts() -> None:
    assert [size(n) for n in (2048, 640 * MiB, 3 * GiB // 2)] == ["2 KiB", "640 MiB", "1.5 GiB"]
    assert [count(n) for n in (940, 12_345, 999_999, 4_500_000)] == ["940", "12.3k", "1.0M", "4.5M"]


def test_a_line_is_short_and_safe() -> None:
    assert line("a\n b\tc\x1b[31m\x1b[2J") == "a b c�[2J"
    assert len(line("x" * 5000, 80)) == 80


def test_the_frame_says_what_limits_the_run_and_draws_its_memory() -> None:
    recent = RecentMemory()
    for at in range(10):
        drawn = recent.add_reading(RunGauge(at=float(at), memory=at * GiB, memory_limit=8 * GiB))
    recent.add_reading(RunGauge(at=9.0, memory=GiB))  # the same reading again

    shown = "\n".join(lines(draw(render_frame(summary(), SettlePace(), drawn), 120)))

    assert "on 2 workers, 1 draining; limited by memory" in shown
    assert f"  {bars([at * GiB for at in range(10)], 9 * GiB)}" in shown


@pytest.mark.parametrize(
    ("values", "most", "drawn"),
    [([], 8, ""), ([0, 4, 8], 8, "▁▅█"), ([1, 8, 1, 1], 8, "█▂"), ([3], 0, "▁"), ([9], 8, "█")],
)
def test_bars_show_the_most_of_each_part(values: list[float], most: float, drawn: str) -> None:
    assert bars(values, most, width=3 if len(values) < 4 else 2) == drawn


def test_the_limits_of_a_run_are_shown_by_share_of_time() -> None:
    gauges = [RunGauge(at=0.0, binds=binds) for binds in ("memory", "memory", "memory", "slots", "")]

    assert summarize_limits(gauges) == "memory 75 %, slots 25 %"
    assert (
        memory_over_time([RunGauge(at=0.0, memory=4 * GiB, memory_limit=8 * GiB)])
        == "▅ at most 4.0 GiB of 8.0 GiB"
    )


def test_a_page_of_a_run_in_progress_says_what_limits_it_now() -> None:
    nothing = OutcomeOverview(rows=(), hidden=0, first={}, slowest=())

    now = "\n".join(lines(draw(totals(summary(), nothing, []), 120)))
    then = "\n".join(lines(draw(totals(summary(state="finished"), nothing, []), 120)))

    assert "limited by memory" in now and "16 for slot" in now
    assert "limited by" not in then
