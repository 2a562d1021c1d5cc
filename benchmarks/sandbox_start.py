"""Measures the duration of an attempt with one command in a process sandbox, next to bubblewrap alone.

    python benchmarks/sandbox_start.py [--quick] [--json] [--against CHECKOUT]

Attempts run one at a time, each with one command that does nothing. `--against` also measures another
checkout, which needs its own `.venv` (`scripts/setup`). The rows alternate, so that a slow minute of the
machine affects all of them; each figure is a median over the turns. CPU is user and system time of all
processes of a run with its start, which depends less on other work of the machine.
"""

from __future__ import annotations

import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import table
from launch import HERE
from table import Row, at_most, say

TURNS = 7
COUNT = 100  # attempts per turn
MOST = 1.10  # maximum, relative to another checkout
Measurement = Callable[[int], float]  # takes a number of attempts, returns seconds
BARE = ("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--unshare-net")


def main() -> None:
    parser = table.parser(__doc__ or "")
    parser.add_argument(
        "--against", type=Path, help="another checkout of holdwater, measured in the same minutes"
    )
    options = parser.parse_args()
    turns, count = (2, 20) if options.quick else (TURNS, COUNT)
    ways: dict[str, Measurement] = {
        "this checkout": lambda number: attempt_seconds(sys.executable, HERE, number)
    }
    if options.against:
        python, place = options.against / ".venv/bin/python", options.against / "benchmarks"
        ways["the other checkout"] = lambda number: attempt_seconds(
            str(python.absolute()), place.absolute(), number
        )
    if shutil.which("bwrap"):
        ways["bubblewrap alone"] = bare_seconds
    table.show(measure(ways, turns, count), json=options.json)


def measure(ways: dict[str, Measurement], turns: int, count: int) -> list[Row]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        say(f"turn {turn + 1} of {turns}")
        for name, seconds in ways.items():
            before = children_cpu()
            times[name].append(1000 * seconds(count) / count)
            cpu[name].append(1000 * (children_cpu() - before) / count)
    what = f"an attempt with one command, {turns} turns of {count}"
    rows = []
    for kind, seen in ((what, times), (f"{what}, CPU", cpu)):
        rows += [
            Row(f"{kind}: {name}", round(statistics.median(values), 2), "ms") for name, values in seen.items()
        ]
        if "the other checkout" in seen:
            pairs = zip(seen["this checkout"], seen["the other checkout"], strict=True)
            ratio = statistics.median(here / there for here, there in pairs)
            rows.append(at_most(f"{kind}: this checkout, times the other one", ratio, MOST, ""))
    return rows


def children_cpu() -> float:
    """Return the CPU seconds of all ended child processes and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def attempt_seconds(python: str, place: Path, count: int) -> float:
    """Return the seconds from the first attempt to the end of a run of `count` attempts."""
    with tempfile.TemporaryDirectory() as directory:
        words = ["run", f"{place / 'work.py'}:suite", "--command", "true", "--limit", str(count)]
        words += ["--out", f"{directory}/run", "--concurrency", "1", "--workers", "1", "--json", "--quiet"]
        done = subprocess.run(
            [python, "-m", "holdwater", *words], cwd=directory, capture_output=True, text=True, check=False
        )
        summary = json.loads(done.stdout)
    if summary["settled"] != count:
        raise SystemExit(f"{summary['settled']} of {count} attempts have settled: {done.stderr[-500:]}")
    return float(summary["seconds"])


def bare_seconds(count: int) -> float:
    begun = time.monotonic()
    for _ in range(count):
        subprocess.run(["bwrap", *BARE, "--", "true"], check=True)
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
