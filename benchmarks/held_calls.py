"""Measures model calls that are answered at once: by a client's policy, and by a function in the worker.

    python benchmarks/held_calls.py [--quick] [--json] [--against CHECKOUT]

A server with one worker; the agent runs in the worker and calls its model again and again. A single rollout
gives the duration of a call, 32 rollouts at once the calls a second and the CPU time of a call: of the server
with its worker, and of the client. `--against` also measures another checkout, which needs its own `.venv`.
All take turns; figures are medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import table
from flat_memory import directory_of
from launch import HERE, is_worker
from rollout_churn import PATIENCE, wait_until_up
from table import Row, at_most, say

from holdwater.client import AsyncClient, Instance
from holdwater.core.serving_protocol import ModelChoice, ModelSource

TURNS = 5
CALLS = 100  # of a single rollout, and of each at once
AT_ONCE = 32
MOST_P50 = 1.0  # ms
LEAST_RATE = 1500  # calls a second


class Figures(NamedTuple):
    """Of one turn. Durations are in seconds."""

    p50: float
    p90: float
    rate: float
    server: float  # CPU seconds of a call
    client: float


Way = Callable[[int], Figures]  # takes a number of calls


def main() -> None:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--against", type=Path, help="another checkout of holdwater, measured in turns")
    options = parser.parse_args()
    turns, calls = (2, 30) if options.quick else (TURNS, CALLS)
    with directory_of(options.keep) as directory, ExitStack() as stack:
        checkouts = {"": Path(sys.executable)}
        if options.against:
            checkouts[" (the other checkout)"] = options.against.absolute() / ".venv/bin/python"
        ways: dict[str, Way] = {}
        for name, python in checkouts.items():
            for kind in ("held", "in the worker"):
                out = directory / f"{len(ways)}"
                ways[f"{kind}{name}"] = stack.enter_context(_serve(python, out, held=kind == "held"))
        rows = measure(ways, turns, calls)
    table.show(rows, json=options.json)


def measure(ways: dict[str, Way], turns: int, calls: int) -> list[Row]:
    seen: dict[str, list[Figures]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        say(f"turn {turn} of {turns}")
        for name, way in ways.items():
            figures = way(calls)
            if turn:  # the first one warms up
                seen[name].append(figures)
    rows = []
    for name, turns_seen in seen.items():
        p50, p90, rate, server, client = map(statistics.median, zip(*turns_seen, strict=True))
        rows += [
            at_most(f"a call {name}: p50", 1000 * p50, MOST_P50, "ms"),
            Row(f"a call {name}: p90", round(1000 * p90, 2), "ms"),
            Row(f"{AT_ONCE} at once, {name}", round(rate), "1/s", f">= {LEAST_RATE}", rate >= LEAST_RATE),
            Row(f"{AT_ONCE} at once, {name}: CPU of server and worker", round(1000 * server, 2), "ms"),
            Row(f"{AT_ONCE} at once, {name}: CPU of the client", round(1000 * client, 2), "ms"),
        ]
    return rows


@contextmanager
def _serve(python: Path, out: Path, *, held: bool) -> Iterator[Way]:
    """Run a server with one worker, never recycled; yield the way to make calls on it."""
    address = f"unix:{out}.socket"
    policy = [] if held else ["--policy", f"{HERE / 'held_work.py'}:answer"]
    command = [
        *(str(python), "-m", "holdwater", "serve", f"{HERE / 'held_work.py'}:suite", "--quiet"),
        *("--agent", f"{HERE / 'held_work.py'}:call", *policy, "--recycle-after", "1000000"),
        *("--out", str(out), "--listen", address, "--workers", "1", "--concurrency", str(AT_ONCE)),
    ]
    with Path(f"{out}.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ)
    try:
        asyncio.run(wait_until_up(address, server))
        yield lambda calls: asyncio.run(_call(address, server.pid, calls, held=held))
    finally:
        server.terminate()
        server.wait(PATIENCE)


async def _call(address: str, server: int, calls: int, *, held: bool) -> Figures:
    async def choose(call: object) -> str:
        return "b"

    options: dict[str, Any] = (
        {"policy": choose} if held else {"model": ModelChoice(source=ModelSource.FUNCTION)}
    )

    async def ask(client: AsyncClient) -> list[float]:
        instance = Instance(id="call", instruction="Call.", data={"calls": calls})
        rollout = await client.run(instance, **options)
        if rollout.outcome != "passed":
            raise SystemExit(f"a rollout failed: {rollout.failure}")
        return list(rollout.answer)

    async with AsyncClient(address) as client:
        alone = statistics.quantiles(await ask(client), n=10)
        own, theirs, begun = time.process_time(), _read_cpu(server), time.monotonic()
        await asyncio.gather(*(ask(client) for _ in range(AT_ONCE)))
        count, seconds = AT_ONCE * calls, time.monotonic() - begun
        client_cpu, server_cpu = time.process_time() - own, _read_cpu(server) - theirs
    return Figures(alone[4], alone[8], count / seconds, server_cpu / count, client_cpu / count)


def _read_cpu(server: int) -> float:
    process = psutil.Process(server)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *filter(is_worker, process.children())))


if __name__ == "__main__":
    main()
