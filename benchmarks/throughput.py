"""Measures how fast instances without work settle, and how much the conductor's memory grows.

    python benchmarks/throughput.py [--quick] [--json] [--keep DIRECTORY]

100,000 instances run with the agent `nop`, 64 at once. It measures; it asserts nothing.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import table
from gauge import MB, fitted, pss
from launch import HERE, holdwater
from table import Row, at_most, say

import holdwater as hw

FULL, QUICK = 100_000, 10_000
STEP = 10_000  # instances per growth figure
SECONDS = 1.0  # between two readings


def main() -> None:
    options = table.options(__doc__ or "")
    count = QUICK if options.quick else FULL
    made = nullcontext(str(options.keep)) if options.keep else tempfile.TemporaryDirectory()
    with made as directory:
        rows = measured(Path(directory), count)
    if options.peers:
        rows.append(Row("not run", "no adapter for this work here", who="peers"))
    table.show(rows, json=options.json)


def measured(directory: Path, count: int) -> list[Row]:
    what = f"{count} instances of a no-op agent"
    say(what)
    out = directory / "nothing"
    readings: list[tuple[int, int]] = []  # settled samples, bytes of the conductor; bound: one per second
    arguments = [
        *("run", f"{HERE / 'work.py'}:suite", "--agent", "nop", "--out", str(out), "--limit", str(count)),
        *("--concurrency", "64", "--workers", "2", "--json", "--quiet"),
    ]
    ran = holdwater(arguments, directory / "nothing.log", during=lambda pid: _follow(pid, out, readings))
    summary = hw.show(out)
    rate = count / summary.seconds
    return [
        Row(
            f"{what}: settled", summary.settled, "", f"{count}", summary.settled == count and ran.status == 0
        ),
        Row(f"{what}: rate", round(rate), "1/s", ">= 500", rate >= 500),
        at_most(f"{what}: growth of the conductor once it is warm", _growth(readings), 1, "MB a 10,000"),
        Row(f"{what}: peak of the conductor", round(max(size for _, size in readings) / MB, 1), "MB"),
        Row(f"{what}: peak memory", round(ran.watch.peak.total / MB, 1), "MB"),
        Row(f"{what}: CPU an instance", round(1000 * ran.watch.cpu / count, 2), "ms"),
        Row(f"{what}: of it the conductor", round(1000 * ran.watch.root_cpu / count, 2), "ms"),
    ]


def _follow(pid: int, out: Path, readings: list[tuple[int, int]]) -> None:
    """Read the number of settled samples and the conductor's memory until it ends."""
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_ZOMBIE:
        try:
            settled = hw.show(out).settled
        except hw.HoldwaterError:
            settled = 0  # the ledger does not exist yet
        if size := pss(pid):
            readings.append((settled, size))
        time.sleep(SECONDS)


def _growth(readings: list[tuple[int, int]]) -> float:
    """Return the growth in MB per `STEP` instances, without the first `STEP` or the first half of a run."""
    most = max(settled for settled, _ in readings)
    first = STEP if most > 2 * STEP else most / 2
    late = [(settled, size) for settled, size in readings if settled >= first]
    slope = fitted([float(settled) for settled, _ in late], [float(size) for _, size in late])
    return slope.value * STEP / MB


if __name__ == "__main__":
    main()
