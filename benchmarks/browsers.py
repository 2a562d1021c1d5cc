"""Measures headless browsers at once: `examples/browser` with its scripted model, inside a memory budget.

    python benchmarks/browsers.py [--quick] [--json]

Memory is PSS of all processes of the run, with conductor, workers and browsers; the scripted model and its
server are in the conductor's process. CPU is user and system time of the same processes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import table
from gauge import MB, Watch
from launch import HERE
from table import Row, at_most

from holdwater.export.formats import export_run

PROGRAM = HERE.parent / "examples" / "browser" / "scripted_shopper.py"
BUDGET = "6GiB"
MOST_MEMORY = 6 * 1024**3 / MB


def main() -> None:
    options = table.parser(__doc__ or "").parse_args()
    table.show(measure(2 if options.quick else 20), json=options.json)


def measure(browsers: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        words = [str(PROGRAM), "--browsers", str(browsers), "--memory", BUDGET, "--out", str(run)]
        with (
            subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL) as process,
            Watch(process.pid, lambda counted: True, seconds=0.25) as watch,
        ):
            process.wait()
        attempts = read_attempts(run)
    passed = [row for row in attempts if row["kind"] == "passed"]
    acting = [row["acting"] for row in passed]
    largest = max(row["peak_memory"] for row in passed)
    what = f"{browsers} browsers, budget {BUDGET}"
    return [
        Row(f"{what}: passed", len(passed), "", f"{browsers}", len(passed) == browsers),
        Row(f"{what}: at once", count_at_once(passed), "", f"{browsers}", count_at_once(passed) == browsers),
        at_most(f"{what}: peak memory of all processes", watch.peak.total / MB, MOST_MEMORY, "MB"),
        Row(
            f"{what}: peak memory of a sandbox",
            round(largest / MB, 1),
            "MB",
        ),
        Row(f"{what}: the longest task", round(max(acting), 1), "s"),
        Row(f"{what}: CPU of a task", round(watch.cpu / browsers, 2), "s"),
    ]


def read_attempts(run: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryFile() as file:
        export_run(run, "attempts", "jsonl", file)
        file.seek(0)
        return [json.loads(line) for line in file]


def count_at_once(attempts: list[dict[str, Any]]) -> int:
    """Return the most attempts that acted at the same time."""
    begins = [
        (row["started"] + row["setup"], row["started"] + row["setup"] + row["acting"]) for row in attempts
    ]
    return max((sum(begin <= at < end for begin, end in begins) for at, _ in begins), default=0)


if __name__ == "__main__":
    main()
