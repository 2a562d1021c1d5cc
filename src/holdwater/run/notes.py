"""Notes of what works beside a run, kept until there is a ledger to write them to."""

from __future__ import annotations

from collections import deque

from ..ledger.ledger import Ledger
from ..rollout.duty import Duty

MOST = 1000  # that wait to be written down
SECONDS = 1.0


class Notes:
    """Takes a note at any time: call it with a kind and a message."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = ledger
        self._waiting: deque[tuple[str, str]] = deque(maxlen=MOST)

    def __call__(self, kind: str, message: str) -> None:
        self._waiting.append((kind, message))

    async def write(self) -> None:
        while self.ledger is not None and self._waiting:
            await self.ledger.note(*self._waiting.popleft())

    def duty(self) -> Duty:
        return Duty("notes", SECONDS, self.write)
