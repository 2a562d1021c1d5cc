"""Measures the CPU time of a rollout with two commands and two held calls, beside bare subprocesses.

    python benchmarks/rollout_price.py [--quick] [--json] [--against CHECKOUT] [--network gateway,none]

A server with two workers runs rollouts of `price_work.py`, 16 at once; a policy in this process answers at
once. CPU is user and system time of the server and its workers, and apart from it that of all processes in
sandboxes with their launchers and helpers. `--against` also measures another checkout, which needs its own
`.venv`. All take turns, so that other work of the machine affects them alike; figures are medians.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import price_work
import psutil
import table
from flat_memory import directory_of
from launch import HERE, is_worker
from rollout_churn import PATIENCE, wait_until_up
from table import Row, at_most, say

from holdwater.client import AsyncClient, Instance

TURNS = 7
COUNT = 96  # rollouts per turn
AT_ONCE = 16
MOST = 25.0  # CPU ms of a rollout
PLAIN = "bare subprocesses"


class Usage(NamedTuple):
    """CPU seconds: of the server and its workers, and of everything in sandboxes."""

    server: float
    sandboxes: float

    def less(self, earlier: Usage) -> Usage:
        return Usage(self.server - earlier.server, self.sandboxes - earlier.sandboxes)


Way = Callable[[int], Usage]  # takes a number of rollouts


def main() -> None:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--against", type=Path, help="another checkout of holdwater, measured in turns")
    parser.add_argument("--network", default="gateway,none", help="networks of the sandboxes")
    options = parser.parse_args()
    turns, count = (2, 32) if options.quick else (TURNS, COUNT)
    with directory_of(options.keep) as directory, ExitStack() as stack:
        ways: dict[str, Way] = {PLAIN: _run_plainly}
        checkouts = {"": Path(sys.executable)}
        if options.against:
            checkouts[" (the other checkout)"] = options.against.absolute() / ".venv/bin/python"
        for name, python in checkouts.items():
            for network in options.network.split(","):
                out = directory / f"{len(ways)}"
                ways[f"network {network}{name}"] = stack.enter_context(_serve(python, out, network))
        rows = measure(ways, turns, count)
    table.show(rows, json=options.json)


def measure(ways: dict[str, Way], turns: int, count: int) -> list[Row]:
    seen: dict[str, list[Usage]] = {name: [] for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        say(f"turn {turn} of {turns}")
        for name, way in ways.items():
            begun = time.monotonic()
            used = way(count)
            if turn:  # the first one warms up
                seen[name].append(used)
                times[name].append(time.monotonic() - begun)
    what, rows = f"a rollout of two commands, {turns} turns of {count}", []
    for name, usages in seen.items():
        server = 1000 / count * statistics.median(each.server for each in usages)
        boxes = 1000 / count * statistics.median(each.sandboxes for each in usages)
        kind = f"{what}: {name}"
        if name == PLAIN:
            rows.append(Row(f"{kind}: CPU", round(server + boxes, 2), "ms"))
        else:
            rows.append(at_most(f"{kind}: CPU", server + boxes, MOST, "ms"))
            rows.append(Row(f"{kind}: CPU of server and workers", round(server, 2), "ms"))
            rows.append(Row(f"{kind}: CPU of sandboxes", round(boxes, 2), "ms"))
            bare = zip(usages, seen[PLAIN], strict=True)
            ratio = statistics.median(sum(ours) / sum(theirs) for ours, theirs in bare)
            rows.append(Row(f"{kind}: CPU / {PLAIN}", round(ratio, 2), "x"))
        rows.append(
            Row(f"{kind}: rollouts a second", round(count / statistics.median(times[name]), 1), "1/s")
        )
    return rows


def _run_plainly(count: int) -> Usage:
    before = _own_usage()
    for _ in range(count):
        if not price_work.look_plainly():
            raise SystemExit("a plain rollout failed")
    return _own_usage().less(before)


def _own_usage() -> Usage:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Usage(own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime)


@contextmanager
def _serve(python: Path, out: Path, network: str) -> Iterator[Way]:
    """Run a server with two workers, never recycled; yield the way to run rollouts on it."""
    address = f"unix:{out}.socket"
    command = [
        *(str(python), "-m", "holdwater", "serve", f"{HERE / 'price_work.py'}:suite", "--quiet"),
        *("--agent", f"{HERE / 'price_work.py'}:look", "--network", network),
        *("--out", str(out), "--listen", address, "--workers", "2", "--concurrency", str(AT_ONCE)),
        *("--recycle-after", "1000000"),
    ]
    with Path(f"{out}.log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ)
    try:
        asyncio.run(wait_until_up(address, server))

        def run(count: int) -> Usage:
            before = _read_usage(server.pid)
            asyncio.run(_order(address, count))
            return _read_usage(server.pid).less(before)

        yield run
    finally:
        server.terminate()
        server.wait(PATIENCE)


async def _order(address: str, count: int) -> None:
    """Keep orders in flight until all are answered."""
    left = iter(range(count))

    async def choose(call: object) -> str:
        return "b"

    async def ask(client: AsyncClient) -> None:
        for number in left:
            instance = Instance(id=f"look-{number}", instruction="Which drawer?", files=price_work.FILES)
            rollout = await client.run(instance, policy=choose)
            if rollout.outcome != "passed":
                raise SystemExit(f"a rollout failed: {rollout.failure}")

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask(client))


def _read_usage(server: int) -> Usage:
    """Return the CPU time of a server so far. All that its workers have reaped ran for sandboxes."""
    process = psutil.Process(server)
    workers = list(filter(is_worker, process.children()))
    own = sum(sum(each.cpu_times()[:2]) for each in (process, *workers))
    boxes = sum(sum(worker.cpu_times()[2:4]) for worker in workers)
    living = [child for worker in workers for child in worker.children(recursive=True)]
    return Usage(own, boxes + sum(sum(child.cpu_times()[:4]) for child in living))


if __name__ == "__main__":
    main()
