"""Tracks a session's calls: those in flight, and the failed call that ended the attempt.

The main thread of calls decides, by the order of requests. The call that ends last is no evidence when calls
overlap: a title or a sub-agent may end long after the agent's own call. This module keeps a few values per
thread and no message; `sessions.py` reads the failure.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Any, NamedTuple

from ..core.errors import AttemptOver
from ..core.records import AttemptFailure
from .recorder import RequestDelta

MOST_THREADS = 256  # threads kept for one attempt
MOST_EXCHANGES = 4096  # exchanges that later calls can continue


class ActiveCall:
    """Registers a call that closing its session ends. A class, because a generator costs more per call."""

    def __init__(self, calls: set[asyncio.Timeout], idle: asyncio.Event, *, closed: bool) -> None:
        self._calls = calls
        self._idle = idle
        self._closed = closed
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        if self._closed:
            raise AttemptOver("the attempt is over")
        await self._scope.__aenter__()
        self._calls.add(self._scope)
        self._idle.clear()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise AttemptOver("the attempt is over") from None
        finally:
            self._calls.discard(self._scope)
            if not self._calls:
                self._idle.set()


class UnrecordedTurn:
    """Registers a turn that is not in the record yet."""

    def __init__(self, unrecorded: set[asyncio.Task[Any] | None]) -> None:
        self._unrecorded = unrecorded
        self._task = asyncio.current_task()

    async def __aenter__(self) -> None:
        self._unrecorded.add(self._task)

    async def __aexit__(self, *error: object) -> None:
        self._unrecorded.discard(self._task)


class CallThread:
    """Calls that each continue the previous one. Times are ticks of the attempt's own clock."""

    def __init__(self, first: int) -> None:
        self.first = first  # tick of the request of its first call
        self.last = first  # tick of the request of its last call
        self.ended: float = math.inf  # tick at which its last call ended
        self.turns = 0  # calls that added messages
        self.messages = -1  # messages in its longest request
        self.has_tools = False
        self.size = 0  # bytes of its longest request
        self.decided = 0  # tick of the request of the call whose end counts
        self.failure: AttemptFailure | None = None  # of the call whose end counts

    @property
    def is_conversation(self) -> bool:
        """Whether this is a conversation: a single call without tools is a side call."""
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
    """A failed call that no later successful call has made good."""

    call: ThreadCall
    ended: int
    failure: AttemptFailure


class CallThreads:
    """The threads of one session's calls, and how the last call of each ended."""

    def __init__(self) -> None:
        self._clock = 0
        self._threads: list[CallThread] = []  # in the order of their first calls; bound: MOST_THREADS
        self._written: dict[int, ThreadCall] = {}  # by exchange; bound: MOST_EXCHANGES
        self._lost: list[LostCall] = []  # bound: MOST_THREADS

    def tick(self) -> int:
        """Return the tick of an event that happens now."""
        self._clock += 1
        return self._clock

    def begin(self, requested: int, delta: RequestDelta, size: int, has_tools: bool) -> ThreadCall:
        """Return a new call, requested at the tick `requested`, in its thread."""
        messages = delta.keep + len(delta.append)
        before = self._written.get(delta.parent) if delta.parent is not None else None
        # `conversation/trajectory.py` uses the same rule.
        continues = before is not None and 2 * delta.keep > before.messages
        thread = before.thread if before is not None and continues else self._open(requested)
        thread.last, thread.ended = requested, math.inf
        if messages > thread.messages:
            thread.turns, thread.messages = thread.turns + 1, messages
        thread.size = max(thread.size, size)
        thread.has_tools |= has_tools
        return ThreadCall(thread, requested, messages)

    def end(self, call: ThreadCall, failure: AttemptFailure | None) -> None:
        """Record that the call was answered, or failed."""
        now, thread = self.tick(), call.thread
        self._close(call, now)
        if call.requested >= thread.decided:
            thread.decided, thread.failure = call.requested, failure
        if failure is not None:
            self._lost = [*self._lost, LostCall(call, now, failure)][-MOST_THREADS:]
        else:
            self._lost = [lost for lost in self._lost if not _is_made_good(lost, call)]

    def abandon(self, call: ThreadCall) -> None:
        """Record that the client disconnected: the previous call still decides the state of the thread."""
        self._close(call, self.tick())

    def on_written(self, call: ThreadCall, number: int) -> None:
        """Record that the call is exchange `number`: later calls may continue it."""
        self._written[number] = call
        if len(self._written) > MOST_EXCHANGES:
            del self._written[next(iter(self._written))]

    def refuse(self, failure: AttemptFailure) -> None:
        """Record a call that failed before its request was parsed."""
        requested = self.tick()
        self.end(ThreadCall(self._open(requested), requested), failure)

    @property
    def failure(self) -> AttemptFailure | None:
        """The failure of the main thread's last call, if it failed."""
        main = self._main
        return main.failure if main is not None else None

    @property
    def unanswered(self) -> AttemptFailure | None:
        """The failure of the last failed call of any thread that no later call made good."""
        latest = max(self._lost, key=lambda lost: lost.call.requested, default=None)
        return latest.failure if latest is not None else None

    @property
    def _main(self) -> CallThread | None:
        """The thread of the agent's last turns.

        A conversation that begins after another one ended replaces it: after a compaction, or in the next
        step. A conversation that begins while another one continues runs beside it. If first calls overlap,
        the larger thread wins.
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
        self._threads.sort(key=lambda thread: thread.first)  # a body may arrive late
        if len(self._threads) > MOST_THREADS:
            main = self._main
            self._threads.remove(next(old for old in self._threads if old is not main))
        return thread

    def _close(self, call: ThreadCall, now: int) -> None:
        if call.requested == call.thread.last:
            call.thread.ended = now


def _is_made_good(lost: LostCall, by: ThreadCall) -> bool:
    """Whether the success was requested after the failure was known, or later in the same thread."""
    same = lost.call.thread is by.thread and lost.call.requested < by.requested
    return same or lost.ended < by.requested
