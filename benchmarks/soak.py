"""A long run with every kind of failure and a worker killed every minute: is memory flat, is nothing lost?

    python benchmarks/soak.py [--minutes 30] [--plot FILE.svg] [--json] [--quick] [--keep DIRECTORY]

Talks, sandboxes, failures, hangs, leaks and high memory usage (`mixed.py`) run in a budget of 768 MiB, 12 at
once. It prints the slope of resident memory with its error, the disk space per verdict, the lag of event
loops, and the losses. It measures; it asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import plot
import psutil
import table
from gauge import MB, fitted
from launch import HERE, MODEL, is_worker, measured, size_of, upstream
from table import Row, at_most, say

import holdwater as hw
from holdwater.ledger.reader import LedgerReader

BUDGET = "768MiB"
KILL_EVERY = 60.0  # seconds
WARM = 0.2  # share of the run before memory is measured, so that it settles


def main() -> None:
    options = _options()
    made = nullcontext(str(options.keep)) if options.keep else tempfile.TemporaryDirectory()
    with made as directory:
        rows = soaked(Path(directory), 0.7 if options.quick else options.minutes, options.plot)
    table.show(rows, json=options.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--plot", type=Path, help="an SVG file for memory over time")
    parser.add_argument("-q", "--quick", action="store_true", help="under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--peers", action="store_true", help="nothing: no peer survives it long enough")
    parser.add_argument("--keep", type=Path, help="keep the run in this directory")
    return parser.parse_args()


def soaked(directory: Path, minutes: float, plotted: Path | None) -> list[Row]:
    out = directory / "soak"
    say(f"{minutes:g} minutes of everything")
    with upstream(turns=8, size=2_000) as url:
        arguments = [
            *("run", f"{HERE / 'mixed.py'}:suite", "--agent", f"{HERE / 'mixed.py'}:live", "--out", str(out)),
            *("--model", MODEL, "--base-url", url, "--memory", BUDGET, "--concurrency", "12"),
            *("--workers", "2", "--json", "--quiet"),
        ]
        command = [sys.executable, "-m", "holdwater", *arguments]
        stop = {"SOAK_STOP": str(time.time() + 60 * minutes)}
        kills: list[float] = []  # times of kills; bound: one per minute
        ran = measured(
            command,
            directory / "soak.log",
            is_worker,
            env=stop,
            during=lambda pid: _kill(pid, kills),
            seconds=1.0,
        )
    return _rows(out, ran.status, len(kills), plotted)


def _kill(pid: int, kills: list[float]) -> None:
    """Kill a worker every minute until the run has ended."""
    conductor, dice, due = psutil.Process(pid), random.Random(7), time.monotonic() + KILL_EVERY
    while conductor.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.5)
        if time.monotonic() < due:
            continue
        due += KILL_EVERY
        workers = [child for child in conductor.children() if is_worker(child)]
        if workers:
            os.kill(dice.choice(workers).pid, signal.SIGKILL)
            kills.append(time.monotonic())


def _rows(out: Path, status: int, kills: int, plotted: Path | None) -> list[Row]:
    summary, audit = hw.show(out), hw.audit(out)
    with LedgerReader(out) as reader:
        gauges = list(reader.gauges())
    begun = gauges[0].at
    minutes = [(gauge.at - begun) / 60 for gauge in gauges]
    warm = [index for index, at in enumerate(minutes) if at >= WARM * minutes[-1] and gauges[index].running]
    hours = [minutes[i] / 60 for i in warm]
    whole = fitted(hours, [float(gauges[i].memory) for i in warm])
    ours = fitted(hours, [float(gauges[i].memory - gauges[i].sandboxes) for i in warm])
    if plotted is not None:
        memory = list(zip(minutes, (gauge.memory / MB for gauge in gauges), strict=True))
        limit = list(zip(minutes, (gauge.memory_limit / MB for gauge in gauges), strict=True))
        mine = list(zip(minutes, ((gauge.memory - gauge.sandboxes) / MB for gauge in gauges), strict=True))
        series = {"in use": memory, "budget": limit, "conductor and workers": mine}
        plot.save(plotted, "Memory of a soak", "MB", series)
    lost = audit.lost + audit.duplicated + audit.corrupt
    return [
        Row("settled", summary.settled, f"in {summary.seconds / 60:.1f} min"),
        Row("outcomes", ", ".join(f"{n} {kind}" for kind, n in sorted(summary.outcomes.items()))),
        Row("workers killed", kills),
        Row("events", ", ".join(f"{n} {kind}" for kind, n in sorted(summary.events.items()))),
        Row("exit status", status, "", "0 or 1", status in (0, 1)),
        Row("lost, duplicated or corrupt", lost, "", "0", lost == 0 and audit.ok),
        Row(
            "slope of conductor and workers, warm",
            round(ours.value / MB, 1),
            f"+- {ours.error / MB:.1f} MB/h",
        ),
        Row("slope with sandboxes", round(whole.value / MB, 1), f"+- {whole.error / MB:.1f} MB/h"),
        Row("most memory in use", round(max(gauge.memory for gauge in gauges) / MB), "MB"),
        Row("disk a verdict", round(size_of(out) / summary.attempts / 1000, 1), "kB"),
        at_most("longest lag of a worker's loop", max(gauge.lag for gauge in gauges), 1.0, "s"),
    ]


if __name__ == "__main__":
    main()
