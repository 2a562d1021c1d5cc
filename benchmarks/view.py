"""Measures the browser view on large runs: time to the first byte of each page, and memory of the process.

    python benchmarks/view.py [--quick] [--json] [--peers] [--beside]

The ledger itself writes the runs: 100,000 instances, transcripts of 500 and of 20,000 turns, a message of
50 MB, and 2,000 images. `--peers` opens conversations in Chromium instead, here and in Inspect View;
`--beside` plays a run with and without an open view. It measures; it asserts nothing.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import table
import view_peers
from table import Row, at_most, say
from view_runs import fetch, find_runs, new_run, serve, write_talk

from holdwater.core.records import (
    Attempt,
    AttemptFailure,
    FailureOrigin,
    Grade,
    ModelUsage,
    Outcome,
    PhaseTimes,
    Verdict,
)
from holdwater.ledger.ledger import Ledger, PlannedInstance

INSTANCES, TURNS, LONG, MESSAGE, IMAGES = 100_000, 500, 20_000, 50 << 20, 2000
BATCH = 2000  # settled at once, as the writer commits them together
REPEATS = 20
SEARCH = 5.0  # seconds
FIRST_BYTE, MEMORY = 300.0, 80.0  # targets: ms at the 95th percentile, MiB


def main() -> None:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--beside", action="store_true", help="the same run with and without an open view")
    options = parser.parse_args()
    share = 20 if options.quick else 1
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        if options.peers or options.beside:
            measure_there = view_peers.measure_peers if options.peers else view_peers.measure_beside
            table.show(measure_there(place, share), json=options.json)
            return
        say(f"writing {INSTANCES // share} instances")
        asyncio.run(write_instances(place / "instances", INSTANCES // share))
        say("writing transcripts")
        asyncio.run(write_transcripts(place / "transcripts", share))
        rows = measure(place)
    table.show(rows, json=options.json)


async def write_instances(path: Path, count: int) -> None:
    chance = random.Random(1)
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        for start in range(0, count, BATCH):
            names = [f"repo{number % 12}__{number}" for number in range(start, min(count, start + BATCH))]
            planned = [
                PlannedInstance(name=name, digest=b"d", payload=make_payload(name), place="suite")
                for name in names
            ]
            rows = await ledger.plan(planned)
            first = await ledger.next_attempt()
            await asyncio.gather(
                *(settle(ledger, first + at, row, chance.random()) for at, row in enumerate(rows))
            )


def make_payload(name: str) -> bytes:
    return msgspec.msgpack.encode({"data": {"tags": [name.partition("__")[0]]}})


async def settle(ledger: Ledger, attempt: int, row: int, luck: float) -> None:
    await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
    usage = ModelUsage(requests=5, input_tokens=int(1e5 * luck), output_tokens=int(1e3 * luck))
    times = PhaseTimes(setup=1.0, acting=600 * luck, grading=2.0)
    failed = luck > 0.97
    failure = AttemptFailure(where=FailureOrigin.MODEL, kind="timeout", message="no reply for 300 s")
    verdict = Verdict(
        attempt=attempt,
        token=ledger.token,
        failure=failure if failed else None,
        grade=None if failed else Grade(passed=luck < 0.6, score=round(luck, 3)),
        usage=usage,
        times=times,
        peak_memory=int(3e8 * luck),
    )
    await ledger.settle(verdict)
    kind = "model" if failed else "passed" if luck < 0.6 else "failed"
    where = FailureOrigin.MODEL if failed else None
    score = None if failed else round(luck, 3)
    outcome = Outcome(instance=row, sample=0, attempt=attempt, kind=kind, score=score, where=where)
    await ledger.close_sample(outcome)


async def write_transcripts(path: Path, share: int) -> None:
    """Write an instance for each shape: 500 turns, 20,000 turns, one large message, many images."""
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        for name, turns, text, images in (
            ("turns", TURNS, 2000, 0),
            ("long", LONG // share, 200, 0),
            ("message", 2, MESSAGE // share, 0),
            ("images", IMAGES // share, 100, 1),
        ):
            await write_talk(ledger, directory, name, turns, text, images)


def measure(place: Path) -> list[Row]:
    with serve(place) as (served, pid):
        rows = [time_page(served, title, paths) for title, paths in list_pages(served).items()]
        rows.append(time_search(served))
        memory = psutil.Process(pid).memory_info().rss / (1 << 20)
        rows.append(at_most("memory of the view after all pages", memory, MEMORY, "MiB"))
        rows.append(at_most("its peak within all pages", read_peak(pid) / (1 << 20), MEMORY, "MiB"))
        for title, path in list_downloads(served).items():
            count = sum(len(piece) for piece in read_pieces(served, path))
            say(f"{title}: {count / 1e6:.1f} MB")
        rows.append(
            at_most("its peak after whole texts and raw turns", read_peak(pid) / (1 << 20), MEMORY, "MiB")
        )
        return rows


def read_peak(pid: int) -> int:
    """Return the most memory that a process ever had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def list_downloads(served: dict[str, str]) -> dict[str, str]:
    talks = f"/runs/{find_runs(served)['transcripts']}/attempts"
    page = fetch(served, f"{talks}/3/transcript")[1].decode()
    name = re.findall(r"of=(\w+)&amp;as=file", page)[0]
    return {
        "the text of 50 MB": f"{talks}/3/text?turn=1&of={name}&as=file",
        "its turn as it was sent": f"{talks}/3/raw?turn=2",
        "turn 1,000 as it was sent": f"{talks}/2/raw?turn=1000",
    }


def read_pieces(served: dict[str, str], path: str) -> Iterator[bytes]:
    """Yield a response as it comes: the client of the benchmark stays small too."""
    request = urllib.request.Request(
        served["url"] + path, headers={"Authorization": f"Bearer {served['token']}"}
    )
    with urllib.request.urlopen(request) as reply:
        while piece := reply.read(1 << 20):
            yield piece


def list_pages(served: dict[str, str]) -> dict[str, str]:
    runs = find_runs(served)
    table_page, talks = f"/runs/{runs['instances']}/instances", f"/runs/{runs['transcripts']}/attempts"
    return {
        "runs": "/",
        "a run of 100,000 instances": f"/runs/{runs['instances']}",
        "its failures and extremes, loaded afterwards": f"/runs/{runs['instances']}/extremes",
        "instances": table_page,
        "instances by cost": f"{table_page}?sort=cost&order=down",
        "instances by name, found by failure": f"{table_page}?sort=name&text=no+reply",
        "instances of a tag, by cost": f"{table_page}?tag=repo3&sort=cost&order=down",
        "instances, nothing found": f"{table_page}?name=nothing",
        "a transcript of 500 turns": f"{talks}/1/transcript?turn=450",
        "a transcript of 20,000 turns": f"{talks}/2/transcript",
        "a message of 50 MB": f"{talks}/3/transcript",
        "2,000 images": f"{talks}/4/transcript",
        "the outline of 20,000 turns": f"{talks}/2/outline?from=900",
        "changes of a request after 450 turns": f"{talks}/1/changes?turn=450",
        "a search in 20,000 turns": f"{talks}/2/find?q=nowhere",
        "a search in 50 MB": f"{talks}/3/find?q=nowhere",
    }


def time_search(served: dict[str, str]) -> Row:
    """Search all transcripts for a text that is nowhere."""
    begun = time.perf_counter()
    fetch(served, "/search/hits?text=nothing+like+it")
    return at_most("a search of all runs, to its end", time.perf_counter() - begun, SEARCH, "s")


def time_page(served: dict[str, str], title: str, path: str) -> Row:
    first = 1000 * fetch(served, path)[0]  # compiles the template, and reads the segment of a transcript
    say(f"{title}: {first:.0f} ms at first")
    taken = sorted(fetch(served, path)[0] for _ in range(REPEATS))
    say(f"{title}: {1000 * statistics.median(taken):.0f} ms at the median")
    return at_most(
        f"{title}: first byte, 95th percentile", 1000 * taken[int(0.95 * REPEATS) - 1], FIRST_BYTE, "ms"
    )


if __name__ == "__main__":
    main()
