"""Starts the measured processes: the scripted upstream, `holdwater` commands and peers, under a `Watch`.

The upstream is a separate process and is not counted; neither are sandboxes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
from gauge import SECONDS, Counts, Watch

HERE = Path(__file__).absolute().parent
MODEL = "benchmark"
PATIENCE = 30.0  # seconds for the upstream to start


class Launched(NamedTuple):
    """The result and the usage of a command."""

    status: int
    watch: Watch
    seconds: float


@contextmanager
def upstream(turns: int, size: int) -> Iterator[str]:
    """Run the scripted model with replies of `size` bytes; yield its base URL."""
    command = [
        *(sys.executable, "-m", "holdwater.testing.scripted_model"),
        *("--turns", str(turns), "--bytes", str(size)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(PATIENCE)


def run(directory: Path, log: Path, agent: Sequence[str], count: int, url: str | None) -> Launched:
    """Run `holdwater run` with `count` instances as the benchmarks do: 30 at once, two workers."""
    return holdwater(run_arguments(directory, agent, count, url), log)


def run_arguments(directory: Path, agent: Sequence[str], count: int, url: str | None) -> list[str]:
    model = ["--model", MODEL, "--base-url", url] if url else []
    return [
        *("run", f"{HERE / 'work.py'}:suite", "--out", str(directory), "--limit", str(count)),
        *("--concurrency", "30", "--workers", "2", "--json", "--quiet"),
        *model,
        *agent,
    ]


def holdwater(
    arguments: Sequence[str],
    log: Path,
    during: Callable[[int], None] | None = None,
    seconds: float = SECONDS,
) -> Launched:
    """Run a `holdwater` command; `during` gets its process id while it runs."""
    command = [sys.executable, "-m", "holdwater", *arguments]
    return measured(command, log, is_worker, during=during, seconds=seconds)


def measured(
    command: Sequence[str],
    log: Path,
    counts: Counts,
    *,
    env: Mapping[str, str] | None = None,
    during: Callable[[int], None] | None = None,
    seconds: float = SECONDS,
) -> Launched:
    """Run `command` under a watch; write its output to `log`."""
    begun = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "OPENAI_API_KEY": "benchmark", **(env or {})},
        )
    with Watch(process.pid, counts, seconds) as watch:
        if during is not None:
            during(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # not reaped: the watch reads it once more
    return Launched(process.wait(), watch, time.monotonic() - begun)


def is_worker(process: psutil.Process) -> bool:
    return "holdwater.rollout.worker" in process.cmdline()


def anything(process: psutil.Process) -> bool:
    return True


def size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
