"""Measures the cost of measuring: of processes with 30 idle sandboxes, and of one governor reading.

    python benchmarks/metering.py [--quick] [--json]

It measures; it asserts nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import table
from launch import HERE, is_worker
from table import Row, at_most, say

from holdwater.governor.meter import ResourceMeter
from holdwater.governor.resource_reading import AttemptUse, FleetCensus
from holdwater.governor.run_usage import MemoryFootprint

SANDBOXES = 30
SETTLING, WATCHED = 10.0, 20.0  # seconds
LOOKS = 300


def main() -> None:
    options = table.options(__doc__ or "")
    rows = looks()
    with tempfile.TemporaryDirectory() as directory:
        rows += idle(Path(directory), 5.0 if options.quick else WATCHED)
    if options.peers:
        rows.append(Row("not run", "none of them measures", who="peers"))
    table.show(rows, json=options.json)


def looks() -> list[Row]:
    """Measure the parts of one reading, and their cost at its two rates."""
    place = Path.cwd()
    meter, footprint = ResourceMeter({"run": place, "scratch": place}, 1 << 40), MemoryFootprint()
    uses = {attempt: AttemptUse(sandbox=1 << 20) for attempt in range(SANDBOXES)}
    census = FleetCensus(workers=2, pids=(os.getpid(), os.getppid()), uses=uses)
    begun = time.process_time()
    for _ in range(LOOKS):
        meter.read(footprint.read(census))
    each = (time.process_time() - begun) / LOOKS
    return [
        Row("readings of one look", round(1000 * each, 2), "ms"),
        at_most("of a core, when calm: one look a second", 100 * each, 1, "%"),
        at_most("of a core, when attempts wait or grow: five", 500 * each, 1, "%"),
    ]


def idle(directory: Path, seconds: float) -> list[Row]:
    """Measure these processes, metering included, while the sandboxes are idle."""
    say(f"{SANDBOXES} sandboxes that do nothing")
    words = (
        "--concurrency",
        str(SANDBOXES),
        "--workers",
        "2",
        "--quiet",
        "--json",
        "--out",
        f"{directory}/run",
    )
    agent = ("--agent", f"{HERE / 'idle.py'}:wait")
    command = [sys.executable, "-m", "holdwater", "run", f"{HERE / 'idle.py'}:suite", *agent, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        time.sleep(SETTLING)
        conductor = psutil.Process(process.pid)
        workers = [child for child in conductor.children() if is_worker(child)]
        before = [_cpu(one) for one in (conductor, *workers)]
        time.sleep(seconds)
        after = [_cpu(one) for one in (conductor, *workers)]
        process.terminate()
    used = [100 * (b - a) / seconds for a, b in zip(before, after, strict=True)]
    return [
        at_most("whole conductor", used[0], 1, "% of a core"),
        Row("a whole worker, with 15 of them", round(sum(used[1:]) / len(used[1:]), 2), "% of a core"),
    ]


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
