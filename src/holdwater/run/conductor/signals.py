"""Handles SIGINT and SIGTERM of a command, from its first line to its exit.

One handler stays in place all that time, so that a signal never meets its default action. Only the response
changes: before a run is conducted, a signal raises `KeyboardInterrupt`; then the conductor handles it; after
that it is only counted.
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

HANDLED = (signal.SIGINT, signal.SIGTERM)
# Python itself ignores these signals, and `subprocess` resets them.
PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}
MOST_SIGNALS = 2  # a third signal ends the process at once; the run can be resumed even then
INTERRUPTED = 3  # the exit status


class CommandSignals:
    """Counts the signals of this process. An unhandled signal waits for the next `answer_with` block."""

    current: ClassVar[CommandSignals | None] = None  # the instance that owns the process's handlers

    def __init__(self) -> None:
        self.count = 0
        self._raises = True
        self._loop: AbstractEventLoop | None = None
        self._answers: tuple[Callable[[], object], ...] = ()
        self._answered = 0

    def __enter__(self) -> CommandSignals:
        """Install the handlers of this process."""
        # A shell without job control starts its background jobs with SIGINT ignored, `nohup` with SIGHUP. The
        # command keeps ignoring them, and its sandboxes do not inherit that.
        for number in signal.valid_signals() - PYTHON_IGNORES:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, disregard)
        for number in HANDLED:
            if signal.getsignal(number) is not disregard:
                signal.signal(number, self._on_signal)
        CommandSignals.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Only count signals from here on: the command has its exit status."""
        self._raises = False

    @staticmethod
    def ignore() -> None:
        """Ignore the signals to the end: an exiting interpreter resets handlers before it is gone."""
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def attach_loop(self, loop: AbstractEventLoop) -> Iterator[None]:
        """Handle signals on `loop` in this block. Later ones are only counted: the summary is still due."""
        self._loop, self._raises = loop, False
        try:
            yield
        finally:
            self._loop = None

    @contextmanager
    def answer_with(self, *answers: Callable[[], object]) -> Iterator[None]:
        """In this block, call the first callable on the first signal and the second on the second."""
        self._answers, self._answered = answers, 0
        self._answer()
        try:
            yield
        finally:
            self._answers = ()

    def request_stop(self, *, now: bool) -> None:
        """Act as on a first signal, or as on a second one."""
        self.count = max(self.count, MOST_SIGNALS if now else 1)
        self._answer()

    def _answer(self) -> None:
        while self._answered < min(self.count, len(self._answers)):
            self._answered += 1
            self._answers[self._answered - 1]()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two steps of the main thread."""
        self.count += 1
        if self.count > MOST_SIGNALS:
            os._exit(INTERRUPTED)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._answer)
        elif self._raises and self.count == 1:  # once: the clean-up that follows is not interrupted again
            raise KeyboardInterrupt


def disregard(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike `SIG_IGN`, a handler is not inherited by the programs that a process starts."""
