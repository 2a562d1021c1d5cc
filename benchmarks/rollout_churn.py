"""Measures one worker of a rollout server for trainers; with `--peers` also a worker of verifiers.

    python benchmarks/rollout_churn.py [--quick] [--json] [--peers] [--rows 1,2,3] [--keep DIRECTORY]
    python benchmarks/rollout_churn.py --hours 1 [--samples FILE.jsonl] [--plot FILE.svg]

A client keeps orders in flight; the agent runs in the worker and sends its whole history each turn to an
upstream in a separate process. The figures are those of the worker alone. It asserts nothing. With `--hours`
it runs the days of training of `churn_day.py` instead of the rows.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import content
import msgspec
import peer_rollouts
import psutil
import table
import zstandard
from churn_day import GROUPS, MEMBERS, TrainingLoad, measure_day
from churn_meter import Seen, Work, measured
from flat_memory import directory_of
from gateway_load import upstream
from gauge import MB
from launch import HERE, MODEL, is_worker, size_of
from raw_http import REPLY
from table import Row, at_most, say

from holdwater.client import AsyncClient, Instance, ServerGone

PATIENCE = 60.0  # seconds for a server to start, and to end
IMAGE = 112_500  # bytes: 150 KB in a data URL
TEXT = 2_000
SCALED = 1_000  # rollouts of the last row on a peer: more would take too long


class Works(msgspec.Struct, frozen=True):
    """The work of each row."""

    images: Work
    talks: Work
    churn: Work


FULL = Works(
    images=Work("image", 40, 4, 45, IMAGE),
    talks=Work("text", 512, 256, 20, TEXT),
    churn=Work("text", 20_000, 64, 2, TEXT),  # the slope is measured over the second half
)
QUICK = Works(
    images=Work("image", 4, 4, 10, IMAGE),
    talks=Work("text", 64, 64, 5, TEXT),
    churn=Work("text", 200, 64, 2, TEXT),
)


def main() -> None:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--hours", type=float, help="a day of training in each hour, instead of the rows")
    parser.add_argument("--samples", type=Path, help="a file for the memory in each second, with `--hours`")
    parser.add_argument("--plot", type=Path, help="an SVG file for memory over time, with `--hours`")
    options = parser.parse_args()
    if options.hours is not None:
        with directory_of(options.keep) as directory:
            rows = _train(directory, TrainingLoad(options.hours), options.samples, options.plot)
        table.show(rows, json=options.json)
        return
    works = QUICK if options.quick else FULL
    chosen = options.rows.split(",") if options.rows else list(ROWS)
    rows = []
    with directory_of(options.keep) as directory:
        for number in chosen:
            rows += ROWS[number](directory, works, options.peers)
    table.show(rows, json=options.json)


def images(directory: Path, works: Works, peers: bool) -> list[Row]:
    """Row 1: long conversations with an image in each turn, and their size on disk."""
    work, out = works.images, directory / "images"
    seen = _ours(out, work)
    kept = size_of(out / "exchanges") + size_of(out / "blobs")
    rows = [
        at_most(f"{work}: peak memory", seen.peak / MB, 130, "MB"),
        *_rested(work, seen, 15),
        at_most(f"{work}: CPU a turn", 1000 * seen.cpu / work.calls, 8, "ms"),
        _server(work, seen),
        _rate(work, seen),
        Row(f"{work}: disk", round(kept / MB, 1), "MB"),
        at_most(f"{work}: disk / unique compressed bytes", kept / _unique(work), 1.05, ""),
    ]
    return rows + (_beside(work, work, seen, directory) if peers else [])


def talks(directory: Path, works: Works, peers: bool) -> list[Row]:
    """Row 2: many at once, a little text."""
    work = works.talks
    seen = _ours(directory / "talks", work)
    rows = [
        at_most(f"{work}: peak memory", seen.peak / MB, 110, "MB"),
        *_rested(work, seen, None),
        at_most(f"{work}: CPU a turn", 1000 * seen.cpu / work.calls, 1.2, "ms"),
        _server(work, seen),
        _rate(work, seen),
    ]
    return rows + (_beside(work, work, seen, directory, faster=4) if peers else [])


def churn(directory: Path, works: Works, peers: bool) -> list[Row]:
    """Row 3: many short rollouts; the worker's memory must not grow."""
    work = works.churn
    seen = _ours(directory / "churn", work)
    rows = [
        _sloped(work, seen),
        Row(f"{work}: memory in each tenth", " ".join(f"{mean / MB:.1f}" for mean in seen.tenths()), "MB"),
        Row(f"{work}: peak memory", round(seen.peak / MB, 1), "MB"),
        *_rested(work, seen, None),
        Row(f"{work}: CPU a turn", round(1000 * seen.cpu / work.calls, 2), "ms"),
        _server(work, seen),
        _rate(work, seen),
    ]
    scaled = work._replace(rollouts=min(SCALED, work.rollouts))
    return rows + (_beside(work, scaled, seen, directory) if peers else [])


ROWS: dict[str, Callable[[Path, Works, bool], list[Row]]] = {"1": images, "2": talks, "3": churn}


def _train(directory: Path, load: TrainingLoad, samples: Path | None, drawn: Path | None) -> list[Row]:
    """Run days of training on `holdwater serve` with one worker, which is never replaced."""
    say(str(load))
    out = directory / "training"
    with (
        upstream() as port,
        _serving(out, f"http://127.0.0.1:{port}/v1", GROUPS * MEMBERS) as (address, worker, server),
    ):
        samples = samples or directory / "samples.jsonl"
        return measure_day(address, (worker, server), load, out, samples, drawn)


def _ours(out: Path, work: Work) -> Seen:
    """Run the work on `holdwater serve` with one worker, which is never replaced."""
    say(str(work))
    over = 0

    def one_more() -> None:
        nonlocal over
        over += 1

    with (
        upstream() as port,
        _serving(out, f"http://127.0.0.1:{port}/v1", work.at_once) as (address, worker, server),
    ):
        return measured(worker, lambda: asyncio.run(_drive(address, work, one_more)), lambda: over, server)


async def _drive(address: str, work: Work, one_more: Callable[[], None]) -> None:
    """Keep orders in flight until all are answered."""
    left = iter(range(work.rollouts))
    data = {"kind": work.kind, "turns": work.turns, "size": work.size}

    async def ask(client: AsyncClient) -> None:
        for number in left:
            instance = Instance(id=f"talk-{number}", instruction="Talk.", data=data)
            rollout = await client.run(instance)
            if rollout.outcome != "passed" or rollout.exchanges != work.turns:
                raise SystemExit(f"a rollout failed: {rollout.failure}")
            one_more()

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for _ in range(work.at_once):
            group.create_task(ask(client))


@contextmanager
def _serving(out: Path, url: str, at_once: int) -> Iterator[tuple[str, int, int]]:
    """Run a server with one worker, never recycled; yield its address, the worker's pid and its own pid."""
    address = f"unix:{out}.socket"
    command = [
        *(sys.executable, "-m", "holdwater", "serve", f"{HERE / 'churn_work.py'}:suite", "--quiet"),
        *("--agent", f"{HERE / 'churn_work.py'}:talk", "--model", MODEL, "--base-url", url),
        *("--out", str(out), "--listen", address, "--workers", "1", "--concurrency", str(at_once)),
        *("--recycle-after", "1000000"),
    ]
    with Path(f"{out}.log").open("wb") as log:
        env = {**os.environ, "OPENAI_API_KEY": "benchmark"}
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
    try:
        asyncio.run(wait_until_up(address, server))
        (worker,) = filter(is_worker, psutil.Process(server.pid).children())
        yield address, worker.pid, server.pid
    finally:
        server.terminate()
        server.wait(PATIENCE)


async def wait_until_up(address: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE
    async with AsyncClient(address) as client:
        while True:
            try:
                if (await client.health()).ok:
                    return
            except ServerGone:
                pass  # it does not exist yet
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server at `{address}` does not come up")
            await asyncio.sleep(0.2)


def _server(work: Work, seen: Seen) -> Row:
    what = f"{work}: CPU a turn of the server's own process, beside it"
    return Row(what, round(1000 * seen.beside / work.calls, 2), "ms")


def _rate(work: Work, seen: Seen, who: str = "holdwater") -> Row:
    return Row(f"{work}: turns a second", round(work.calls / seen.seconds, 1), "1/s", who=who)


def _rested(work: Work, seen: Seen, most: float | None) -> list[Row]:
    what, grown = f"{work}: memory at rest beyond that at the start", (seen.rest - seen.start) / MB
    at_rest = Row(what, round(grown, 1), "MB") if most is None else at_most(what, grown, most, "MB")
    return [Row(f"{work}: memory at the start", round(seen.start / MB, 1), "MB"), at_rest]


def _sloped(work: Work, seen: Seen) -> Row:
    slope = seen.slope().times(1000 / MB)
    flat = slope.value <= 2 * slope.error  # no growth beyond two standard errors
    value = f"{slope.value:+.2f} ± {slope.error:.2f}"
    return Row(f"{work}: slope", value, "MB a 1,000 rollouts", "0", flat)


def _unique(work: Work) -> int:
    """Return the zstd-compressed size of all new content in the work: each image, and each text once."""
    squeeze = zstandard.ZstdCompressor(level=3).compress
    seeds = [f"talk-{number}/{turn}" for number in range(work.rollouts) for turn in range(work.turns)]
    said = "".join(f"Look at {seed}." for seed in seeds).encode() + REPLY
    return sum(len(squeeze(content.image(seed, work.size))) for seed in seeds) + len(squeeze(said))


def _beside(work: Work, theirs: Work, ours: Seen, directory: Path, faster: float | None = None) -> list[Row]:
    """Return the figures of verifiers on the same work, or a part of it, relative to ours."""
    say(f"verifiers: {theirs}")
    try:
        with upstream() as port:
            peer = peer_rollouts.measured(theirs, f"http://127.0.0.1:{port}/v1", directory)
    except peer_rollouts.NotRun as error:
        return [Row("not run", str(error), who="verifiers")]
    seen, who = peer.seen, peer.who
    quicker = (work.calls / ours.seconds) / (theirs.calls / seen.seconds)
    cpu = (seen.cpu / theirs.calls) / (ours.cpu / work.calls)
    target = ("", None) if faster is None else (f">= {faster:g}", quicker >= faster)
    return [
        Row(f"{theirs}: peak memory", round(seen.peak / MB, 1), "MB", who=who),
        Row(f"{theirs}: memory at the start", round(seen.start / MB, 1), "MB", who=who),
        Row(f"{theirs}: memory at rest", round(seen.rest / MB, 1), "MB", who=who),
        Row(f"{theirs}: CPU a turn", round(1000 * seen.cpu / theirs.calls, 2), "ms", who=who),
        _rate(theirs, seen, who),
        Row(f"{theirs}: trajectories as JSON lines", round(peer.disk / MB, 1), "MB", who=who),
        Row(f"{work}: peak memory, verifiers' / ours", round(seen.peak / ours.peak, 1), "x"),
        Row(f"{work}: CPU a turn, verifiers' / ours", round(cpu, 1), "x"),
        Row(f"{work}: turns a second, ours / verifiers'", round(quicker, 1), "x", *target),
    ]


if __name__ == "__main__":
    main()
