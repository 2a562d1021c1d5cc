"""Which failed model call ended an attempt: the main thread decides, by the order of requests.

A call that ends last says little when calls overlap: a title or a sub-agent may end long after the agent's
own call. This module keeps a few words for each thread and no message. `sessions.py` asks it for the failure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..core.records import Failure
from .recorder import Delta

MOST_THREADS = 256  # threads of an attempt that are remembered
MOST_EXCHANGES = 4096  # exchanges that a later call can continue


class CallThread:
    """Calls of which each continues the one before. Times are ticks of the attempt's own clock."""

    def __init__(self, first: int) -> None:
        self.first = first  # when its first call was requested
        self.last = first  # when its last call was requested
        self.ended: float = math.inf  # when that call ended
        self.turns = 0  # calls that added messages
        self.messages = -1  # in its longest request
        self.has_tools = False
        self.size = 0  # bytes of its longest request
        self.decided = 0  # when the call was requested whose end counts
        self.failure: Failure | None = None  # of that call

    @property
    def is_conversation(self) -> bool:
        """A single call without tools is a side call beside any conversation."""
        return self.turns > 1 or self.has_tools

    @property
    def rank(self) -> tuple[int, bool, int]:
        return self.turns, self.has_tools, self.size


class ThreadCall(NamedTuple):
    """One call in its thread."""

    thread: CallThread
    requested: int
    messages: int = 0


class LostCall(NamedTuple):
    """A call that failed, while no call that was requested later has succeeded."""

    call: ThreadCall
    ended: int
    failure: Failure


class CallThreads:
    """The threads of one session's calls, and how the last call of each ended."""

    def __init__(self) -> None:
        self._clock = 0
        self._threads: list[CallThread] = []  # in the order of their first calls; bound: MOST_THREADS
        self._written: dict[int, ThreadCall] = {}  # by exchange; bound: MOST_EXCHANGES
        self._lost: list[LostCall] = []  # bound: MOST_THREADS

    def tick(self) -> int:
        """The time of something that happens now."""
        self._clock += 1
        return self._clock

    def begin(self, requested: int, delta: Delta, size: int, has_tools: bool) -> ThreadCall:
        """A call that was `requested` at that tick."""
        messages = delta.keep + len(delta.append)
        before = self._written.get(delta.parent) if delta.parent is not None else None
        # The trajectory in the ledger (`trajectory.py`) goes by the same rule.
        continues = before is not None and 2 * delta.keep > before.messages
        thread = before.thread if before is not None and continues else self._open(requested)
        thread.last, thread.ended = requested, math.inf
        if messages > thread.messages:
            thread.turns, thread.messages = thread.turns + 1, messages
        thread.size = max(thread.size, size)
        thread.has_tools |= has_tools
        return ThreadCall(thread, requested, messages)

    def end(self, call: ThreadCall, failure: Failure | None) -> None:
        """The call was answered, or failed."""
        now, thread = self.tick(), call.thread
        self._close(call, now)
        if call.requested >= thread.decided:
            thread.decided, thread.failure = call.requested, failure
        if failure is not None:
            self._lost = [*self._lost, LostCall(call, now, failure)][-MOST_THREADS:]
        else:
            self._lost = [lost for lost in self._lost if not _is_made_good(lost, call)]

    def abandon(self, call: ThreadCall) -> None:
        """The client went away: the call before it still says how its thread stands."""
        self._close(call, self.tick())

    def write(self, call: ThreadCall, number: int) -> None:
        """The call is in the record as this exchange: later calls may continue it."""
        self._written[number] = call
        if len(self._written) > MOST_EXCHANGES:
            del self._written[next(iter(self._written))]

    def refuse(self, failure: Failure) -> None:
        """A call failed before anything was known of it."""
        requested = self.tick()
        self.end(ThreadCall(self._open(requested), requested), failure)

    @property
    def failure(self) -> Failure | None:
        """Why the last call of the main thread failed, if it did."""
        main = self._main
        return main.failure if main is not None else None

    @property
    def unanswered(self) -> Failure | None:
        """Why the last call failed, of all threads, that no later call made good."""
        latest = max(self._lost, key=lambda lost: lost.call.requested, default=None)
        return latest.failure if latest is not None else None

    @property
    def _main(self) -> CallThread | None:
        """The thread that the agent's last turns belong to.

        A conversation that begins when another is over takes its place: after a compaction, or in the next
        step. One that begins while another goes on is beside it. Of overlapping first calls the larger wins.
        """
        conversations = [thread for thread in self._threads if thread.is_conversation]
        main: CallThread | None = None
        for thread in conversations or self._threads:
            overlaps = main is not None and main.last < thread.first < main.ended
            if main is None or thread.first > main.ended or (overlaps and thread.rank > main.rank):
                main = thread
        return main

    def _open(self, requested: int) -> CallThread:
        thread = CallThread(requested)
        self._threads.append(thread)
        self._threads.sort(key=lambda thread: thread.first)  # a body may come late
        if len(self._threads) > MOST_THREADS:
            main = self._main
            self._threads.remove(next(old for old in self._threads if old is not main))
        return thread

    def _close(self, call: ThreadCall, now: int) -> None:
        if call.requested == call.thread.last:
            call.thread.ended = now


def _is_made_good(lost: LostCall, by: ThreadCall) -> bool:
    """A success counts if it was requested when the failure was known, or later in the same thread."""
    same = lost.call.thread is by.thread and lost.call.requested < by.requested
    return same or lost.ended < by.requested
