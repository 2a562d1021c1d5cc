"""Runs for the benchmarks of the view, written by the ledger itself, and requests to a view of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import holdwater as hw
from holdwater.core.config import RunConfig
from holdwater.core.exchange import Exchange
from holdwater.core.records import Attempt, Grade, ModelUsage, Outcome, Verdict
from holdwater.gateway import media
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog
from holdwater.ledger.ledger import Ledger, PlannedInstance

BRIEF = 3  # turns


async def talk_briefly(instance: hw.Instance, sandbox: object, model: Any) -> None:
    """The agent of the run that is played beside a view."""
    messages: list[dict[str, Any]] = []
    for turn in range(BRIEF):
        messages.append({"role": "user", "content": f"question {turn}"})
        reply = await model.chat(messages)
        messages.append(reply["choices"][0]["message"])


def write_talks(path: Path, count: int, turns: int, size: int) -> None:
    asyncio.run(_write_talks(path, count, turns, size))


async def _write_talks(path: Path, count: int, turns: int, size: int) -> None:
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        for number in range(count):
            await write_talk(ledger, directory, f"{path.name}-{number:04d}", turns, size)


async def write_talk(
    ledger: Ledger, directory: RunDirectory, name: str, turns: int, size: int, images: int = 0
) -> None:
    """Write an instance that passed after a conversation."""
    [row] = await ledger.plan([PlannedInstance(name=name, digest=b"d", payload=b"{}", place="suite")])
    attempt = await ledger.next_attempt()
    await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
    write_turns(directory, attempt, turns, size, images)
    grade = Grade(passed=True, score=1.0)
    await ledger.settle(Verdict(attempt=attempt, token=ledger.token, grade=grade, exchanges=turns))
    await ledger.close_sample(Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0))


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


@contextmanager
def serve(*places: Path) -> Iterator[tuple[dict[str, str], int]]:
    """Serve the runs below some directories; yield address and token, and the process id."""
    words = [sys.executable, "-m", "holdwater", "view", *map(str, places), "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.wait()


def find_runs(served: dict[str, str]) -> dict[str, str]:
    """Return the name of each run's directory, and its id in addresses."""
    page = fetch(served, "/")[1].decode()
    return {path.rpartition("/")[2]: run for run, path in re.findall(r'href="/runs/(\w+)">([^<]*)<', page)}


def fetch(served: dict[str, str], path: str) -> tuple[float, bytes]:
    request = urllib.request.Request(
        served["url"] + path, headers={"Authorization": f"Bearer {served['token']}"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request) as reply:
        first = time.perf_counter() - begun
        return first, reply.read()
