"""How well this process runs: how late its event loop is, how long it was suspended, how many files it opens.

A suspension (`SIGSTOP`, `docker pause`, a batch system) counts neither against the limits of attempts nor as
silence of workers. A pause of the run (`PausableClock`) counts against no limit of attempts and of the run.
"""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

MOST_FILES = 65536  # open at once, connections of clients included
TICK = 0.05  # seconds between two readings: a stall may be measured too short by this much
LOOK_SECONDS = 0.5
LONGEST_LOOK = 3.0  # seconds: a longer gap between two readings is a suspension ...
BUSY = 0.5  # ... unless the process worked for this share of the gap: then C code held the interpreter
LONGEST_TICK = 3.0  # seconds: during a longer pause between two ticks this process did not run


def allow_files() -> None:
    """Raise the limit on open files as far as permitted: each connection is one, attempts open many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def count_work() -> float:
    """Return the seconds in which threads of this process ran, or waited for a processor."""
    waited = 0
    try:
        with os.scandir("/proc/self/task") as threads:
            for thread in threads:
                waited += int(Path(thread.path, "schedstat").read_bytes().split()[1])
    except (OSError, IndexError):
        pass  # a thread that ended, or a kernel that does not count this
    return time.process_time() + waited / 1e9


class LoopLag:
    """Measures how late and how busy the running loop is inside of `with`, with a timer that reads the clock.

    Each tick calls `each` with the busy share of its time. The longest lag is kept until `take` is called:
    heartbeats carry it to the conductor, which writes the timeline.
    """

    def __init__(self, each: Callable[[float], None] = lambda busy: None) -> None:
        self._loop = asyncio.get_running_loop()
        self._each = each
        self._longest = 0.0

    def __enter__(self) -> Self:
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def take(self) -> float:
        """Return the longest lag since the last call, in seconds, including one that still lasts."""
        longest, self._longest = max(self._longest, time.monotonic() - self._due), 0.0
        return longest

    def _arm(self) -> None:
        # Reads the clock, not the loop's own time, which stands still while a callback runs.
        self._armed, self._worked = time.monotonic(), time.thread_time()
        self._due = self._armed + TICK
        self._timer = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._due)
        busy = (time.thread_time() - self._worked) / max(now - self._armed, TICK)
        self._arm()
        self._each(busy)  # after arming the timer: the time that this takes is lag as well


class PausableClock:
    """Seconds in which the run was not paused. Any thread may read it; one thread pauses it."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._pauses: tuple[float, float | None] = 0.0, None  # seconds of ended pauses, start of this one

    @property
    def paused(self) -> bool:
        return self._pauses[1] is not None

    def turn(self, *, paused: bool) -> None:
        """Begin or end a pause."""
        if paused != self.paused:
            self._pauses = self.count_paused(), self._now() if paused else None

    def time(self) -> float:
        return self._now() - self.count_paused()

    def count_paused(self) -> float:
        """Return the seconds of all pauses so far."""
        seconds, since = self._pauses
        return seconds if since is None else seconds + self._now() - since


class SuspensionWatch:
    """Measures suspensions inside of `with`, and pauses of the run; a process that hosts attempts has one.

    A thread reads the clock. A long gap between two readings in which the process hardly worked is a
    suspension; a blocked event loop does not delay the thread.
    """

    def __init__(self) -> None:
        self.pauses = PausableClock()
        self._ended = threading.Event()
        self._seconds = 0.0
        self._looked = time.monotonic(), count_work()
        self._thread = threading.Thread(target=self._watch, name="holdwater-suspension", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def seconds(self) -> float:
        """Return the time of all suspensions and pauses so far."""
        return self._measure() + self.pauses.count_paused()

    def _measure(self) -> float:
        """Return the time of all suspensions, including one that the thread has not seen yet."""
        looked, worked = self._looked
        gap = time.monotonic() - looked
        return (
            self._seconds + gap
            if gap > LONGEST_LOOK and count_work() - worked < gap * BUSY
            else self._seconds
        )

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._seconds = self._measure()
            self._looked = time.monotonic(), count_work()


class RunningClock:
    """Seconds in which this process ran: a suspended conductor receives no heartbeats of its workers.

    Its owner ticks about once a second.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ticked = now()
        self._ran = 0.0

    def tick(self) -> None:
        self._ran, self._ticked = self.time(), self._now()

    def time(self) -> float:
        since = self._now() - self._ticked
        return self._ran + since if since <= LONGEST_TICK else self._ran
