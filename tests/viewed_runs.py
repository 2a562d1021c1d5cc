"""Runs for the tests of the view: hostile text in every field, and conversations that part at some turn."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tests.ledger_runs import failed, new_run, passed, planned
from tests.recorded_conversations import Recording, chat, says

from holdwater.core.records import Attempt, FailureOrigin, Grade, Outcome
from holdwater.ledger.ledger import Ledger

SCRIPT = "<script>document.title = 'owned'</script>"
HOSTILE = f"{SCRIPT}<img src=x onerror=\"document.title = 'owned'\">\u202edesrever \x1b[31m"
TURNS = 60

T = TypeVar("T")


async def make_hostile_run(path: Path) -> None:
    """Markup in every field that an agent, a suite or a provider controls, and a long conversation."""
    directory = new_run(path, model=HOSTILE, agent=HOSTILE)
    async with Ledger(directory) as ledger:
        await ledger.note("hostile", HOSTILE)
        for name in ("<b>bold</b> & co", "plain"):
            [row] = await ledger.plan([planned(name, place=HOSTILE)])
            attempt = await ledger.next_attempt()
            await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
            recording = Recording(directory, attempt)
            said: list[str] = []
            for number in range(TURNS):
                said.append(f"{HOSTILE} question {number}")
                recording.add(chat(*said), says(f"answer {number} {HOSTILE}", reasoning_content=HOSTILE))
                said.append(f"answer {number} {HOSTILE}")
            recording.log.close()
            if name == "plain":
                await ledger.settle(passed(attempt, ledger.token, TURNS))
                outcome = Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0)
            else:
                await ledger.settle(failed(attempt, ledger.token, FailureOrigin.AGENT, HOSTILE))
                outcome = Outcome(
                    instance=row,
                    sample=0,
                    attempt=attempt,
                    kind="agent",
                    score=None,
                    where=FailureOrigin.AGENT,
                )
            await ledger.close_sample(outcome)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a thread: the browser's driver keeps a loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


async def make_parted_run(path: Path, parts_at: int) -> None:
    """A run that says the same as others up to a turn, and then something of its own."""
    directory = new_run(path, agent=path.name)
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("same name", payload=msgspec.msgpack.encode({"data": {}}))])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
        recording, said = Recording(directory, attempt), list[str]()
        for number in range(6):
            said.append(f"question {number}" if number < parts_at else f"{path.name} asks {number}")
            recording.add(chat(*said), says(f"answer {number}"))
            said.append(f"answer {number}")
        recording.log.close()
        verdict = passed(attempt, ledger.token, 6)
        won = path.name == "after"
        kind, score = ("passed", 1.0) if won else ("failed", 0.0)
        grade = Grade(passed=won, score=score)
        await ledger.settle(msgspec.structs.replace(verdict, grade=grade))
        await ledger.close_sample(Outcome(instance=row, sample=0, attempt=attempt, kind=kind, score=score))
