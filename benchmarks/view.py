"""Measures the browser view on large runs: time to the first byte of each page, and memory of the process.

    python benchmarks/view.py [--quick] [--json]

The ledger itself writes the runs: 100,000 instances, transcripts of 500 and of 20,000 turns, a message of
50 MB, and 2,000 images. It measures; it asserts nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec
import psutil
import table
from table import Row, at_most, say

from holdwater.core.config import RunConfig
from holdwater.core.exchange import Exchange
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
from holdwater.gateway import media
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog
from holdwater.ledger.ledger import Ledger, PlannedInstance

INSTANCES, TURNS, LONG, MESSAGE, IMAGES = 100_000, 500, 20_000, 50 << 20, 2000
BATCH = 2000  # settled at once, as the writer commits them together
REPEATS = 20
FIRST_BYTE, MEMORY = 300.0, 80.0  # targets: ms at the 95th percentile, MiB


def main() -> None:
    options = table.options(__doc__ or "")
    share = 20 if options.quick else 1
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
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
                PlannedInstance(name=name, digest=b"d", payload=b"{}", place="suite") for name in names
            ]
            rows = await ledger.plan(planned)
            first = await ledger.next_attempt()
            await asyncio.gather(
                *(settle(ledger, first + at, row, chance.random()) for at, row in enumerate(rows))
            )


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
            planned = PlannedInstance(name=name, digest=b"d", payload=b"{}", place="suite")
            [row] = await ledger.plan([planned])
            attempt = await ledger.next_attempt()
            await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
            write_turns(directory, attempt, turns, text, images)
            grade = Grade(passed=True, score=1.0)
            await ledger.settle(Verdict(attempt=attempt, token=ledger.token, grade=grade, exchanges=turns))
            outcome = Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0)
            await ledger.close_sample(outcome)


def write_turns(directory: RunDirectory, attempt: int, turns: int, text: int, images: int) -> None:
    log = AttemptLog(directory, attempt)
    encode = msgspec.json.encode
    for number in range(1, turns + 1):
        content: list[dict[str, object]] = [{"type": "text", "text": f"question {number} " + "x" * text}]
        for _ in range(images):
            data = random.Random(number).randbytes(2000).hex()
            content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
        asked = {"role": "user", "content": content}
        said = {"role": "assistant", "content": f"answer {number}"}
        before = [{"role": "assistant", "content": f"answer {number - 1}"}] if number > 1 else []
        messages = [encode(message) for message in (*before, asked)]
        reply = {"model": "m", "choices": [{"index": 0, "finish_reason": "stop", "message": said}]}
        log.append(
            Exchange(
                number=number,
                parent=number - 1 or None,
                keep=max(0, 2 * number - 3),
                append=tuple(msgspec.Raw(media.extract_media(message, log.blob)) for message in messages),
                head=msgspec.Raw(b'{"model":"m"}') if number == 1 else None,
                reply=msgspec.Raw(encode(reply)),
                status=200,
                usage=ModelUsage(requests=1, input_tokens=5, output_tokens=2),
                started=1e9 + number,
                seconds=1.0,
            )
        )
    log.close()


def new_run(path: Path) -> RunDirectory:
    directory = RunDirectory.create(path)
    Ledger.create(directory)
    directory.write_config(RunConfig(id=path.name, suite="made", agent="nop", created=1.0, version="0"))
    return directory


def measure(place: Path) -> list[Row]:
    words = [sys.executable, "-m", "holdwater", "view", str(place), "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        served = json.loads(process.stdout.readline())
        rows = [
            row for title, paths in list_pages(served).items() for row in [time_page(served, title, paths)]
        ]
        memory = psutil.Process(process.pid).memory_info().rss / (1 << 20)
        return [*rows, at_most("memory of the view after all pages", memory, MEMORY, "MiB")]
    finally:
        process.kill()
        process.wait()


def list_pages(served: dict[str, str]) -> dict[str, str]:
    page = fetch(served, "/")[1].decode()
    runs = {
        name: page[: page.index(f"/{name}</a>")].rpartition('href="/runs/')[2].partition('"')[0]
        for name in ("instances", "transcripts")
    }
    table_page, talks = f"/runs/{runs['instances']}/instances", f"/runs/{runs['transcripts']}/attempts"
    return {
        "runs": "/",
        "a run of 100,000 instances": f"/runs/{runs['instances']}",
        "its failures and extremes, loaded afterwards": f"/runs/{runs['instances']}/extremes",
        "instances": table_page,
        "instances by cost": f"{table_page}?sort=cost&order=down",
        "instances by name, found by failure": f"{table_page}?sort=name&text=no+reply",
        "instances, nothing found": f"{table_page}?name=nothing",
        "a transcript of 500 turns": f"{talks}/1/transcript?turn=450",
        "a transcript of 20,000 turns": f"{talks}/2/transcript",
        "a message of 50 MB": f"{talks}/3/transcript",
        "2,000 images": f"{talks}/4/transcript",
    }


def time_page(served: dict[str, str], title: str, path: str) -> Row:
    fetch(served, path)  # compiles the template, and fills the page cache of the machine
    taken = sorted(fetch(served, path)[0] for _ in range(REPEATS))
    say(f"{title}: {1000 * statistics.median(taken):.0f} ms at the median")
    return at_most(
        f"{title}: first byte, 95th percentile", 1000 * taken[int(0.95 * REPEATS) - 1], FIRST_BYTE, "ms"
    )


def fetch(served: dict[str, str], path: str) -> tuple[float, bytes]:
    request = urllib.request.Request(
        served["url"] + path, headers={"Authorization": f"Bearer {served['token']}"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request) as reply:
        first = time.perf_counter() - begun
        return first, reply.read()


if __name__ == "__main__":
    main()
