"""Many instances of an agent that does nothing: the conductor stays as small as it was, and is quick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_runner import SOURCE
from tests.in_process_run import whole
from tests.wait_bounds import stretch

STEP = 500  # instances between two readings
CONDUCT = """
import sys
import time

import holdwater as hw


def instances():
    for n in range(int(sys.argv[2])):
        yield hw.Instance(id=f"i{n}", instruction="do nothing", data={"n": n})


def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def watch(verdict):
    watch.count += 1
    if watch.count % STEP == 0:
        print(watch.count, anonymous(), time.monotonic(), flush=True)


watch.count = 0
suite = hw.Suite(name="many", instances=instances, grade=lambda instance, sandbox, answer: True)
if __name__ == "__main__":
    spec = f"{__file__}:suite"
    summary = hw.run(spec, "nop", out=sys.argv[1], observers=[watch], concurrency=30, workers=2)
    assert summary.exit_status == 0, summary
"""


class Readings:
    """What the conductor said of itself on its way."""

    def __init__(self, text: str) -> None:
        rows = [line.split() for line in text.splitlines()]
        self.kilobytes = {int(count): int(size) for count, size, _ in rows}
        self.times = {int(count): float(at) for count, _, at in rows}

    def growth(self, first: int, last: int, each: int) -> float:
        """Megabytes for `each` instances more, between `first` and `last`."""
        return (self.kilobytes[last] - self.kilobytes[first]) / 1024 * each / (last - first)

    def rate(self, first: int, last: int) -> float:
        """Instances a second."""
        return (last - first) / (self.times[last] - self.times[first])


def conduct(place: Path, count: int, seconds: float) -> Readings:
    file = place / "many.py"
    source = CONDUCT.replace("STEP", str(STEP)).replace("int(sys.argv[2])", str(count))
    file.write_text(source)
    done = subprocess.run(
        [sys.executable, str(file), str(place / "run")],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        timeout=stretch(seconds),
        check=True,
    )
    whole(place / "run")
    return Readings(done.stdout)


def test_three_thousand(tmp_path: Path) -> None:
    readings = conduct(tmp_path, 3000, 100)

    assert readings.growth(1500, 3000, each=1500) < 1.0, readings.kilobytes
    assert readings.rate(500, 3000) > 200 / stretch(1)


@pytest.mark.proof
def test_a_hundred_thousand(tmp_path: Path) -> None:
    readings = conduct(tmp_path, 100_000, 800)

    for start in range(10_000, 100_000, 10_000):
        grown = readings.growth(start, start + 10_000, each=10_000)
        assert grown < 1.0, (start, grown, readings.kilobytes)
    assert readings.rate(STEP, 100_000) >= 2000 / stretch(1)
