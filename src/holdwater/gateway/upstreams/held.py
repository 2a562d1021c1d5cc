"""The upstream that has no answer of its own: it holds each call until somebody outside answers it.

The request's body is let go of at once: what is held is what its record needs anyway. A call ends with its
answer, with its client or with its session, whichever comes first. What is said is read in `spoken.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, Protocol

from multidict import CIMultiDict

from ...core.errors import LedgerCorrupt, ModelFailed
from ...core.records import Failure, MiB
from ...core.serving import Answer
from ..dialects import Manner
from ..dialects.replying import Wanted
from ..recorder import Delta
from ..routes import DIALECTS
from . import Call
from .spoken import answered, wanted_by
from .whole import Whole, content_type

LARGEST = 128 * MiB  # of a question that is handed out
_REFERENCE = b'"holdwater-'  # what stands in a message in the place of a medium


class Question(NamedTuple):
    """What is asked in a held call: the first `keep` messages of the call `parent`, then `append`."""

    dialect: str
    append: tuple[bytes, ...]  # each a message, as JSON
    parent: int | None
    keep: int
    head: bytes | None  # every other key, as JSON; None: the same as the parent's
    streamed: bool


class Listener(Protocol):
    """Who is told of held calls, each by its number within the attempt."""

    def held(self, call: int) -> None: ...

    def unheld(self, call: int) -> None:
        """Nobody waits for its answer any more, and it has none."""

    def asked(self, call: int, question: Question | None) -> None:
        """What is asked in it; None: it is not held any more."""


class Earlier(Protocol):
    """What is in the attempt's record. It reads files: not for the event loop."""

    def resolved(self, part: bytes) -> bytes:
        """JSON with its media in their places."""

    def request(self, number: int, keep: int) -> list[bytes]:
        """The first `keep` messages of an exchange's request, media in their places."""

    def head(self, number: int) -> bytes:
        """Its other keys."""


class HeldUpstream:
    """Implements `Upstream`, for one attempt."""

    dialects = frozenset(DIALECTS)
    counts = False

    def __init__(self, listener: Listener, earlier: Earlier, executor: Executor) -> None:
        self._listener = listener
        self._earlier = earlier
        self._executor = executor
        self._count = 0
        self._calls: dict[int, _HeldCall] = {}  # bound: the attempt's calls in flight
        # Calls that were handed out, by what is to be written of them; bound: those in flight.
        self._unwritten: dict[int, _HeldCall] = {}
        self._handed: dict[int, int] = {}  # exchange -> its call; bound: the attempt's exchanges

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[HeldAnswer]:
        assert call.delta is not None, "a held call is a turn"
        wanted = wanted_by(call)
        call.body.free()
        self._count += 1
        held = self._calls[self._count] = _HeldCall(self._count, call.delta, call.manner)
        self._listener.held(held.number)
        try:
            yield HeldAnswer(partial(self._answered, held), wanted, call.dialect, call.manner)
        finally:
            del self._calls[held.number]
            for _ in held.taking:
                self._listener.asked(held.number, None)
            if held.answer is None:
                self._listener.unheld(held.number)

    def take(self, number: int, *, whole: bool) -> None:
        """Have the listener told what is asked in a call: all of it, or what is new since those before."""
        held = self._calls.get(number)
        if held is None or held.answer is not None:
            return self._listener.asked(number, None)
        held.taking.append(whole)
        return held.news.set()

    def answer(self, number: int, answer: Answer) -> None:
        """The answer to a call; one that is not held any more needs none."""
        held = self._calls.get(number)
        if held is not None and held.answer is None:
            held.answer = answer
            held.news.set()

    def written(self, delta: Delta, number: int) -> None:
        """An exchange is in the record: later calls may continue it."""
        held = self._unwritten.pop(id(delta), None)
        if held is not None:
            self._handed[number] = held.number

    async def _answered(self, held: _HeldCall) -> Answer:
        while held.answer is None:
            await held.news.wait()
            held.news.clear()
            while held.taking and held.answer is None:
                await self._hand_out(held)
        return held.answer

    async def _hand_out(self, held: _HeldCall) -> None:
        """Say what is asked, and keep nothing of it: the answer may take long."""
        question = await self._question(held, whole=held.taking[0])
        held.taking.popleft()
        self._unwritten[id(held.delta)] = held
        self._listener.asked(held.number, question)

    async def _question(self, held: _HeldCall, *, whole: bool) -> Question:
        delta = held.delta
        parent = None if whole or delta.parent is None else self._handed.get(delta.parent)
        missing = parent is None and delta.parent is not None
        parts = (*delta.append, delta.head or b"")
        if not missing and not any(_REFERENCE in part for part in parts):
            return _asked(held, tuple(delta.append), parent, delta.head)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, self._read, held, parent)
        except LedgerCorrupt as error:
            raise ModelFailed(f"the call cannot be handed out: {error.message}", kind="held") from error

    def _read(self, held: _HeldCall, parent: int | None) -> Question:
        delta, earlier = held.delta, self._earlier
        before: list[bytes] = []
        head = earlier.resolved(delta.head) if delta.head is not None else None
        if parent is None and delta.parent is not None:
            before = earlier.request(delta.parent, delta.keep)
            head = earlier.head(delta.parent) if head is None else head
        return _asked(held, (*before, *map(earlier.resolved, delta.append)), parent, head)


class HeldAnswer:
    """Implements `Answer`: there at once, but for what it says."""

    status = 200
    failure: Failure | None = None
    waits = True

    def __init__(
        self, waiting: Callable[[], Awaitable[Answer]], wanted: Wanted, dialect: str, manner: Manner
    ) -> None:
        self.headers = CIMultiDict({"Content-Type": content_type(manner)})
        self.version: str | None = None
        self._waiting = waiting
        self._wanted = wanted
        self._dialect = dialect
        self._manner = manner

    async def pieces(self) -> AsyncIterator[bytes]:
        answer = await self._waiting()
        self.version = answer.version
        reply = answered(answer, self._dialect, self._wanted)
        async for piece in Whole(reply, DIALECTS[self._dialect], self._manner).pieces():
            yield piece


class _HeldCall:
    """A call that waits."""

    def __init__(self, number: int, delta: Delta, manner: Manner) -> None:
        self.number = number
        self.delta = delta
        self.manner = manner
        self.news = asyncio.Event()
        self.taking: deque[bool] = deque()  # bound: what the conductor asks for at once, which is one
        self.answer: Answer | None = None


def _asked(held: _HeldCall, append: tuple[bytes, ...], parent: int | None, head: bytes | None) -> Question:
    if (size := sum(map(len, append)) + len(head or b"")) > LARGEST:
        raise ModelFailed(
            f"the request is too large to be handed out: {size} bytes", kind="held", again=False
        )
    keep = held.delta.keep if parent is not None else 0
    return Question(held.delta.dialect, append, parent, keep, head, held.manner is not Manner.WHOLE)
