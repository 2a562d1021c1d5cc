"""Measures the duration of CPU-bound agents with `--concurrency auto` and with fixed concurrency.

    python benchmarks/crowding.py [--quick] [--json] [--keep DIRECTORY]

Each agent is a process that uses 2 s of CPU and waits 1 s. It measures; it asserts nothing.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import table
from table import Row, say

import holdwater as hw
from holdwater.api import runs as api
from holdwater.ledger.reader import LedgerReader

COUNT, FEW = 60, 24
FIXED = 37  # the number that memory let `auto` run before it considered the CPU
ALONE = 3.0  # seconds that a single agent takes
LINE = "import time\nwhile time.process_time() < 2: pass\ntime.sleep(1)"


def main() -> None:
    options = table.options(__doc__ or "")
    made = nullcontext(str(options.keep)) if options.keep else tempfile.TemporaryDirectory()
    with made as directory:
        rows = measured(Path(directory), FEW if options.quick else COUNT)
    table.show(rows, json=options.json)


def measured(directory: Path, count: int) -> list[Row]:
    rows = []
    for name, concurrency in (("auto", "auto"), ("fixed", FIXED)):
        say(f"{name}: {count} agents")
        seconds = play(directory / name, count, concurrency)
        rows += read_rows(f"`--concurrency {concurrency}`", directory / name, seconds)
    rows.append(Row("load of the machine at the end", round(os.getloadavg()[0], 1)))
    return rows


def play(out: Path, count: int, concurrency: int | str) -> float:
    def instances() -> Iterator[hw.Instance]:
        for number in range(count):
            yield hw.Instance(id=f"i{number}")

    async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        await sandbox.run(["python3", "-c", LINE])

    def grade(instance: hw.Instance, sandbox: hw.Sandbox, answer: str | None) -> bool:
        return True

    suite = hw.Suite(name="crowd", instances=instances, grade=grade)
    began = time.monotonic()
    api.run(suite, solve, out=out, concurrency=concurrency)
    return time.monotonic() - began


def read_rows(name: str, out: Path, seconds: float) -> list[Row]:
    with LedgerReader(out) as reader:
        acting = sorted(row.settled - row.started for row in reader.attempts() if row.settled is not None)
        gauges = list(reader.gauges())
    bound = sum(gauge.binds == "cpu" for gauge in gauges) / max(1, len(gauges))
    return [
        Row(f"{name}: whole run", round(seconds, 1), "s"),
        Row(f"{name}: an attempt, p50", round(statistics.median(acting), 1), "s"),
        Row(f"{name}: the slowest against one alone", round(acting[-1] / ALONE, 1), "x"),
        Row(f"{name}: most at once", max(gauge.running for gauge in gauges)),
        Row(f"{name}: limited by cpu", round(100 * bound), "%"),
    ]


if __name__ == "__main__":
    main()
