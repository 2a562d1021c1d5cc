"""A run in a thread of this process whose agents act until a test lets them finish."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.command_runner import until
from tests.in_process_run import QUICK

import holdwater as hw
from holdwater.core.summary import RunSummary
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.rows import AttemptRow, EventRow, OutcomeRow


class ControlledRun:
    """`with ControlledRun(path) as run`: `i0`, `i1`, ... call the model until they may finish."""

    def __init__(self, out: Path, count: int = 4, *, resumes: bool = False, **options: Any) -> None:
        self.out = out
        self.resumes = resumes
        self.count = count
        self.started: list[str] = []  # instances, in the order in which attempts began to act
        self.asked = 0  # model calls that agents have begun
        self.calls: list[float] = []  # when each reached the model
        self.answered = 0
        self.replies = threading.Event()  # not set: the model keeps its calls in flight
        self.replies.set()
        self.fails: set[str] = set()  # instances whose grade is a zero
        self.group: Any = None  # how the suite scores the samples of an instance together
        self.summary: RunSummary | None = None
        self._finishing: set[str] = set()
        self._all_finish = threading.Event()
        self._options = {**QUICK, "concurrency": 2, "timeout": 600.0, "grace": 20.0, **options}
        self._thread = threading.Thread(target=self._conduct, name="controlled")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.replies.set()
        self._all_finish.set()
        if self._thread.is_alive():
            try:
                hw.stop(self.out, now=True)
            except hw.HoldwaterError:
                pass  # it has ended meanwhile
        self._thread.join()

    def finish(self, *names: str) -> None:
        """Let these instances finish; without names, all."""
        self._finishing.update(names)
        if not names:
            self._all_finish.set()

    def join(self) -> RunSummary:
        """Let all finish; return the summary of the run."""
        self.finish()
        until("the run ends", lambda: not self._thread.is_alive(), 60)
        assert self.summary is not None
        return self.summary

    def wait_started(self, count: int) -> None:
        until(f"{count} attempts act", lambda: len(self.started) >= count, 60)

    def wait_called(self, since: int = 0) -> None:
        until("the model is called", lambda: len(self.calls) > since, 60)

    def outcome(self, name: str, sample: int = 0) -> OutcomeRow | None:
        with LedgerReader(self.out) as reader:
            rows = (row for row in reader.outcomes() if (row.instance, row.sample) == (name, sample))
            return next(rows, None)

    def wait_outcome(self, name: str) -> OutcomeRow:
        until(f"`{name}` is settled", lambda: self.outcome(name), 60)
        found = self.outcome(name)
        assert found is not None
        return found

    def attempts(self, name: str) -> list[AttemptRow]:
        with LedgerReader(self.out) as reader:
            return [row for row in reader.attempts() if row.instance == name]

    def events(self, kind: str) -> list[EventRow]:
        with LedgerReader(self.out) as reader:
            return [row for row in reader.events(10_000) if row.kind == kind]

    def verbs(self) -> Counter[str]:
        """The requests that are events in the ledger."""
        with LedgerReader(self.out) as reader:
            kinds = (row.kind.partition(".") for row in reader.events(10_000))
            return Counter(verb for room, _, verb in kinds if room == "control")

    # The run.

    def _conduct(self) -> None:
        suite = hw.Suite(
            name="controlled", instances=self._list_instances, grade=self._grade, group=self.group
        )
        agent = hw.Agent(name="acts", act=self._act)
        if self.resumes:
            slots = self._options["concurrency"]
            work = hw.aresume(self.out, suite=suite, agent=agent, policy=self._answer, concurrency=slots)
        else:
            work = hw.arun(suite, agent, out=self.out, policy=self._answer, **self._options)
        self.summary = asyncio.run(work)

    def _list_instances(self) -> Iterator[hw.Instance]:
        for number in range(self.count):
            yield hw.Instance(id=f"i{number}")

    async def _act(self, instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
        await sandbox.write("made.txt", instance.id)
        self.started.append(instance.id)
        while not (self._all_finish.is_set() or instance.id in self._finishing):
            self.asked += 1
            await model.chat([{"role": "user", "content": instance.id}])
            await asyncio.sleep(0.02)
        return instance.id

    async def _answer(self, request: Any) -> str:
        self.calls.append(time.monotonic())
        while not self.replies.is_set():
            await asyncio.sleep(0.01)
        self.answered += 1
        return "on"

    async def _grade(self, instance: hw.Instance, sandbox: hw.Sandbox, answer: str | None) -> bool:
        return instance.id not in self.fails
