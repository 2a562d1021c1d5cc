"""SIGINT and SIGTERM of a command, from its first line to its exit.

One handler stays in place all that time, so that no signal ever meets its default action. Only the answer
changes: before a run is conducted a signal raises `KeyboardInterrupt`, then the conductor answers it, and
after that it is only counted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

BOTH = (signal.SIGINT, signal.SIGTERM)
# Python itself ignores these, and `subprocess` resets them.
OWN = {signal.SIGPIPE, signal.SIGXFSZ}
MOST = 2  # a third signal ends the process on the spot; the run resumes even then
INTERRUPTED = 3  # the exit status


class Signals:
    """Counts the signals of this process. A signal without an answer waits for the next `answered` block."""

    current: ClassVar[Signals | None] = None  # the one that has the process's handlers

    def __init__(self) -> None:
        self.count = 0
        self._raises = True
        self._loop: AbstractEventLoop | None = None
        self._answers: tuple[Callable[[], object], ...] = ()
        self._answered = 0

    def __enter__(self) -> Signals:
        """Take the handlers of this process."""
        # A shell without job control starts its background jobs with SIGINT ignored, `nohup` with SIGHUP. The
        # command goes on ignoring them, and its sandboxes do not inherit that.
        for number in signal.valid_signals() - OWN:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, disregard)
        for number in BOTH:
            if signal.getsignal(number) is not disregard:
                signal.signal(number, self._hear)
        Signals.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """From here on a signal is only counted: the command has its exit status."""
        self._raises = False

    @staticmethod
    def ignore() -> None:
        """Ignore the signals to the end: an interpreter that exits resets every handler before it is gone."""
        for number in BOTH:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def heard(self, loop: AbstractEventLoop) -> Iterator[None]:
        """Answer the signals on `loop`. Afterwards they are only counted: the summary is still due."""
        self._loop, self._raises = loop, False
        try:
            yield
        finally:
            self._loop = None

    @contextmanager
    def answered(self, *answers: Callable[[], object]) -> Iterator[None]:
        """While this block runs the first signal is answered by the first, the second by the second."""
        self._answers, self._answered = answers, 0
        self._answer()
        try:
            yield
        finally:
            self._answers = ()

    def _answer(self) -> None:
        while self._answered < min(self.count, len(self._answers)):
            self._answered += 1
            self._answers[self._answered - 1]()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two steps of the main thread."""
        self.count += 1
        if self.count > MOST:
            os._exit(INTERRUPTED)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._answer)
        elif self._raises and self.count == 1:  # once: the clean-up that it leads to is not interrupted again
            raise KeyboardInterrupt


def disregard(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike `SIG_IGN`, a handler is not passed on to the programs that a process starts."""
