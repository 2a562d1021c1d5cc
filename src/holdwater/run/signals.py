"""SIGINT and SIGTERM while a run is conducted. What they are answered with changes as the conductor goes on.

A third signal ends the process on the spot; the run can be resumed even then.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BOTH = (signal.SIGINT, signal.SIGTERM)
MOST = 2


class Signals:
    """Counts the signals; a signal that nobody answers yet waits for the next who does."""

    def __init__(self) -> None:
        self.count = 0
        self._answers: tuple[Callable[[], object], ...] = ()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """From here to the end of the process the signals are ours."""
        loop = asyncio.get_running_loop()
        for number in BOTH:
            loop.add_signal_handler(number, self._hear)
        try:
            yield
        finally:
            for number in BOTH:  # the summary is still to be written: a late signal must not cut it off
                loop.remove_signal_handler(number)
                signal.signal(number, lambda *_: self._hear())

    @contextmanager
    def answered(self, *answers: Callable[[], object]) -> Iterator[None]:
        """While this block runs the first signal is answered by the first, the second by the second."""
        self._answers = answers
        for answer in answers[: self.count]:
            answer()
        try:
            yield
        finally:
            self._answers = ()

    def _hear(self) -> None:
        self.count += 1
        if self.count > MOST:
            os._exit(3)
        if self.count <= len(self._answers):
            self._answers[self.count - 1]()
