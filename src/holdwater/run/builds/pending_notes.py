"""Holds notes of a run's helpers until there is a ledger to write them to."""

from __future__ import annotations

from collections import deque

from ...ledger.ledger import Ledger
from ...rollout.periodic_task import PeriodicTask

MOST = 1000  # notes waiting to be written; beyond it the oldest are dropped
SECONDS = 1.0


class PendingNotes:
    """Accepts a note at any time: call it with a kind and a message."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, str]] = deque(maxlen=MOST)

    def __call__(self, kind: str, message: str) -> None:
        self._waiting.append((kind, message))

    async def write(self, ledger: Ledger) -> None:
        while self._waiting:
            await ledger.note(*self._waiting.popleft())

    def periodic_task(self, ledger: Ledger) -> PeriodicTask:
        return PeriodicTask("notes", SECONDS, lambda: self.write(ledger))
