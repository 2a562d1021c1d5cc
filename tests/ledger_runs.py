"""Runs on disk for the tests of the ledger: made, planned, settled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

import holdwater.ledger
from holdwater.core.config import RunConfig
from holdwater.core.exchange import Exchange
from holdwater.core.records import Attempt, AttemptFailure, FailureOrigin, Grade, ModelUsage, Outcome, Verdict
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger, PlannedInstance

SOURCE = Path(holdwater.ledger.__file__).parents[2]  # where a child process finds the package


def new_run(path: Path, **asked: object) -> RunDirectory:
    """A created run, ready for its conductor."""
    directory = RunDirectory.create(path)
    Ledger.create(directory)
    config = RunConfig(id="run-1", suite="demo", agent="nop", created=1.0, version="0")
    directory.write_config(msgspec.structs.replace(config, **asked))
    return directory


def planned(name: str, payload: bytes = b"{}", place: str = "suite.jsonl:1") -> PlannedInstance:
    return PlannedInstance(name=name, digest=payload[:16], payload=payload, place=place)


def passed(attempt: int, token: int, exchanges: int = 0) -> Verdict:
    """A verdict over so many times `exchange`."""
    usage = ModelUsage(requests=exchanges, input_tokens=5 * exchanges, output_tokens=2 * exchanges)
    grade = Grade(passed=True, score=1.0)
    return Verdict(attempt=attempt, token=token, grade=grade, exchanges=exchanges, usage=usage)


def failed(attempt: int, token: int, where: FailureOrigin, kind: str = "error") -> Verdict:
    return Verdict(
        attempt=attempt, token=token, failure=AttemptFailure(where=where, kind=kind, message="it broke")
    )


def exchange(number: int, messages: Iterable[bytes] = (b'{"role":"user"}',), keep: int = 0) -> Exchange:
    return Exchange(
        number=number,
        parent=number - 1 if keep else None,
        keep=keep,
        append=tuple(msgspec.Raw(message) for message in messages),
        head=None if keep else msgspec.Raw(b'{"model":"m"}'),
        reply=msgspec.Raw(b'{"id":"r"}'),
        status=200,
        started=2.0,
        seconds=0.5,
        usage=ModelUsage(requests=1, input_tokens=5, output_tokens=2),
    )


async def settle_all(ledger: Ledger, names: Iterable[str]) -> None:
    """One passed attempt and its outcome for each name."""
    for name in names:
        [row] = await ledger.plan([planned(name)])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
        await ledger.settle(passed(attempt, ledger.token))
        await ledger.close_sample(Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0))
