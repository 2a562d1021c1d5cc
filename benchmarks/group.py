"""Runs the command in a real memory group with a limit, for scenes and benchmarks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdwater.sandbox.cgroup import locate_home, remove_group

ROOT = Path(__file__).parents[1]
GREEDY = ROOT / "benchmarks" / "greedy.py"


class Group:
    """A control group, and the number of kills at its own limit."""

    def __init__(self, path: Path, limit: int, version: str) -> None:
        self.path = path
        self._v2 = version == "v2"
        self._limit = path / ("memory.max" if self._v2 else "memory.limit_in_bytes")
        self.set(limit)

    def set(self, limit: int) -> None:
        self._limit.write_text(str(limit))

    @property
    def used(self) -> int:
        """Return the bytes that the kernel cannot reclaim."""
        rows = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        names = ("anon", "shmem") if self._v2 else ("total_rss", "total_shmem")
        return sum(int(rows[name]) for name in names)

    def kills(self) -> int:
        """Return how often the kernel killed because this group was full, not a child group; from its log."""
        told = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
        at_our_limit = re.findall(rf"oom_memcg=\S*/{re.escape(self.path.name)},", told)
        events = self.path / ("memory.events.local" if self._v2 else "memory.oom_control")
        rows = dict(line.split() for line in events.read_text().splitlines())
        return max(len(at_our_limit), int(rows["oom_kill"]))

    def run(
        self, out: Path, *words: str, seconds: float = 600, during: Callable[[], object] = lambda: None
    ) -> Played:
        """Run `holdwater run` in this group; call `during` repeatedly, until it returns something true."""
        enter = 'echo $$ >"$1"; shift; exec "$@"'
        command = [
            sys.executable,
            "-m",
            "holdwater",
            "run",
            *words,
            "--out",
            str(out),
            "--json",
            "--quiet",
        ]
        began, highest = time.monotonic(), 0
        with (
            (out.parent / f"{out.name}.out").open("wb") as told,
            (out.parent / f"{out.name}.err").open("wb") as err,
        ):
            process = subprocess.Popen(
                ["/bin/sh", "-c", enter, "sh", str(self.path / "cgroup.procs"), *command],
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=err,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            )
            while process.poll() is None:
                highest = max(highest, self.used)
                if during() or time.monotonic() - began > seconds:
                    process.kill()
                time.sleep(0.05)
        text = (out.parent / f"{out.name}.out").read_text()
        return Played(process.returncode, json.loads(text) if text else {}, time.monotonic() - began, highest)


class Played:
    """The result of a run."""

    def __init__(self, status: int, summary: dict[str, Any], seconds: float, highest: int) -> None:
        self.status = status
        self.summary = summary
        self.seconds = seconds
        self.highest = highest  # maximum bytes in use in the group


class NoGroup(Exception):
    """No control group can be created; the message says why."""


@contextmanager
def memory_group(limit: int) -> Iterator[Group]:
    """Yield a group below this process's own."""
    home = locate_home()
    if not home.usable:
        raise NoGroup(home.why)
    path = Path(home.memory, f"scene-{os.getpid()}-{time.monotonic_ns()}")
    path.mkdir()
    try:
        yield Group(path, limit, home.kind)
    finally:
        until = time.monotonic() + 10
        while not all(remove_group(d) for d in sorted(path.rglob("*/"), reverse=True)) or not remove_group(
            path
        ):
            if time.monotonic() > until:
                raise NoGroup(f"it does not get empty: {path}")
            time.sleep(0.05)
