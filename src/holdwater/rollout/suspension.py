"""Measures how long this process has been suspended: the limits of attempts do not count this time.

A thread reads the clock. A long gap between two readings in which the process used no CPU is a suspension
(`SIGSTOP`, `docker pause`, a batch system); a blocked event loop does not delay the thread.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

LOOK_SECONDS = 0.5
LONGEST_LOOK = 3.0  # seconds: a longer gap between two readings is a suspension ...
BUSY = 0.5  # ... unless the process used this share of the gap: then C code held the interpreter


class SuspensionWatch:
    """Measures suspensions inside of `with`; a process that hosts attempts has one."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._seconds = 0.0
        self._looked = time.monotonic(), time.process_time()
        self._thread = threading.Thread(target=self._watch, name="holdwater-suspension", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def seconds(self) -> float:
        """Return the time of all suspensions so far, including one that the thread has not seen yet."""
        looked, worked = self._looked
        gap = time.monotonic() - looked
        idle = time.process_time() - worked < gap * BUSY
        return self._seconds + gap if gap > LONGEST_LOOK and idle else self._seconds

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._seconds = self.seconds()
            self._looked = time.monotonic(), time.process_time()
