"""The upstream for trainers: it holds each call until a client of the server answers it.

It frees the request's body at once and holds only the data that the record needs anyway. A call ends with its
answer, its client or its session, whichever comes first. `complete_reply.py` converts the answer.
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
from ...core.records import AttemptFailure, MiB
from ...core.serving_protocol import CallAnswer
from ...dialect import DIALECTS, list_conversations
from ...dialect.conversion import ReplyContext
from ...dialect.interface import Dialect, ReplyFormat
from ..recorder import RequestDelta
from . import UpstreamCall
from .complete_reply import CompleteReply, content_type, read_context, render_answer

LARGEST_QUESTION = 128 * MiB  # bytes of one question
_REFERENCE = b'"holdwater-'  # a reference that replaces a medium in a message


class HeldQuestion(NamedTuple):
    """The request of a held call: the first `keep` messages of the call `parent`, then `append`."""

    dialect: str
    append: tuple[bytes, ...]  # messages, each as JSON
    parent: int | None
    keep: int
    head: bytes | None  # all other keys, as JSON; None: the same as the parent's
    streamed: bool


class HeldCallListener(Protocol):
    """Gets notified of held calls, each by its number within the attempt."""

    def on_held(self, call: int) -> None: ...

    def on_released(self, call: int) -> None:
        """The call ended without an answer: no client waits for one any more."""

    def on_question(self, call: int, question: HeldQuestion | None) -> None:
        """Receive the request of a call; None: the call is no longer held."""


class EarlierExchanges(Protocol):
    """Reads the attempt's record. It reads files: do not call it on the event loop."""

    def resolve_media(self, part: bytes) -> bytes:
        """Return JSON with references replaced by their media."""

    def read_messages(self, number: int, keep: int) -> list[bytes]:
        """Return the first `keep` messages of an exchange's request, with their media."""

    def read_head(self, number: int) -> bytes:
        """Return the other keys of an exchange's request."""


class HeldUpstream:
    """Implements `Upstream`, for one attempt."""

    counting: frozenset[str] = frozenset()

    def __init__(self, listener: HeldCallListener, earlier: EarlierExchanges, executor: Executor) -> None:
        self._listener = listener
        self._earlier = earlier
        self._executor = executor
        self._count = 0
        self._calls: dict[int, _HeldCall] = {}  # bound: the attempt's calls in flight
        # Calls handed out, by the id of their delta, until they are recorded; bound: the calls in flight.
        self._unwritten: dict[int, _HeldCall] = {}
        self._handed: dict[int, int] = {}  # exchange -> its call; bound: the attempt's exchanges

    @property
    def dialects(self) -> frozenset[str]:
        return list_conversations()

    @asynccontextmanager
    async def send(self, call: UpstreamCall) -> AsyncIterator[HeldAnswer]:
        assert call.delta is not None, "a held call is a turn"
        wanted = read_context(call)
        call.body.free()
        self._count += 1
        held = self._calls[self._count] = _HeldCall(self._count, call.delta, call.reply_format)
        self._listener.on_held(held.number)
        try:
            yield HeldAnswer(
                partial(self._wait_answer, held), wanted, DIALECTS[call.dialect], call.reply_format
            )
        finally:
            del self._calls[held.number]
            for _ in held.taking:
                self._listener.on_question(held.number, None)
            if held.answer is None:
                self._listener.on_released(held.number)

    def take(self, number: int, *, whole: bool) -> None:
        """Send the listener the request of a call: all of it, or only its new part."""
        held = self._calls.get(number)
        if held is None or held.answer is not None:
            return self._listener.on_question(number, None)
        held.taking.append(whole)
        return held.news.set()

    def answer(self, number: int, answer: CallAnswer) -> None:
        """Answer a call; do nothing if the call is no longer held."""
        held = self._calls.get(number)
        if held is not None and held.answer is None:
            held.answer = answer
            held.news.set()

    def on_written(self, delta: RequestDelta, number: int) -> None:
        """Record the number of an exchange: later calls may continue it."""
        held = self._unwritten.pop(id(delta), None)
        if held is not None:
            self._handed[number] = held.number

    async def _wait_answer(self, held: _HeldCall) -> CallAnswer:
        while held.answer is None:
            await held.news.wait()
            held.news.clear()
            while held.taking and held.answer is None:
                await self._hand_out(held)
        return held.answer

    async def _hand_out(self, held: _HeldCall) -> None:
        """Send the request to the listener and keep none of it: the answer may take long."""
        question = await self._make_question(held, whole=held.taking[0])
        held.taking.popleft()
        self._unwritten[id(held.delta)] = held
        self._listener.on_question(held.number, question)

    async def _make_question(self, held: _HeldCall, *, whole: bool) -> HeldQuestion:
        delta = held.delta
        parent = None if whole or delta.parent is None else self._handed.get(delta.parent)
        missing = parent is None and delta.parent is not None
        parts = (*delta.append, delta.head or b"")
        if not missing and not any(_REFERENCE in part for part in parts):
            return _build_question(held, tuple(delta.append), parent, delta.head)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, self._read_question, held, parent)
        except LedgerCorrupt as error:
            raise ModelFailed(f"the call cannot be handed out: {error.message}", kind="held") from error

    def _read_question(self, held: _HeldCall, parent: int | None) -> HeldQuestion:
        delta, earlier = held.delta, self._earlier
        before: list[bytes] = []
        head = earlier.resolve_media(delta.head) if delta.head is not None else None
        if parent is None and delta.parent is not None:
            before = earlier.read_messages(delta.parent, delta.keep)
            head = earlier.read_head(delta.parent) if head is None else head
        return _build_question(held, (*before, *map(earlier.resolve_media, delta.append)), parent, head)


class HeldAnswer:
    """Implements `UpstreamAnswer`: available at once, except for its content."""

    status = 200
    failure: AttemptFailure | None = None
    waits = True
    original: bytes | None = None

    def __init__(
        self,
        waiting: Callable[[], Awaitable[CallAnswer]],
        wanted: ReplyContext,
        dialect: Dialect,
        manner: ReplyFormat,
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
        reply = render_answer(answer, self._dialect, self._wanted)
        async for piece in CompleteReply(reply, self._dialect, self._manner).pieces():
            yield piece


class _HeldCall:
    """A call that waits for its answer."""

    def __init__(self, number: int, delta: RequestDelta, manner: ReplyFormat) -> None:
        self.number = number
        self.delta = delta
        self.manner = manner
        self.news = asyncio.Event()
        self.taking: deque[bool] = deque()  # bound: the conductor's concurrent requests for a call: one
        self.answer: CallAnswer | None = None


def _build_question(
    held: _HeldCall, append: tuple[bytes, ...], parent: int | None, head: bytes | None
) -> HeldQuestion:
    if (size := sum(map(len, append)) + len(head or b"")) > LARGEST_QUESTION:
        raise ModelFailed(
            f"the request is too large to be handed out: {size} bytes", kind="held", again=False
        )
    keep = held.delta.keep if parent is not None else 0
    return HeldQuestion(held.delta.dialect, append, parent, keep, head, held.manner is not ReplyFormat.WHOLE)
