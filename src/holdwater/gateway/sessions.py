"""One attempt's state in the gateway: its key, its calls in flight, its usage and budget, its record.

A session lives as long as its attempt: closing it answers every call that is still held. `relay.py` forwards
the calls.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, structs

from ..core.errors import AttemptError, AttemptOver, HoldwaterError, LimitReached
from ..core.exchange import (
    NO_CHANGES,
    DriftedCall,
    ExchangeLog,
    HeadChanges,
    RecordedReply,
    ReplyRecording,
)
from ..core.fork_origin import make_drift_failure
from ..core.masking import KEY_PREFIX, unmask_bytes
from ..core.prices import find_used_up
from ..core.records import NO_USAGE, AttemptFailure, FailureOrigin, Limits, ModelUsage
from ..dialect.interface import Dialect
from . import media
from .body import ByteAdmission
from .call_terms import CallTerms, JudgeRoute, ModelRoute, SharedResources
from .json_checks import LARGE, LargeRequest
from .recorder import (
    CallEnding,
    ConversationRecorder,
    RequestDelta,
    identify_request,
    make_repeated_request,
)
from .request_parser import ParsedRequest
from .session_calls import ActiveCall, CallThreads, ThreadCall, UnrecordedTurn
from .upstreams.retry import BreakerTripped

T = TypeVar("T")
RawMembers = Mapping[str, Raw]

LARGE_MEDIA = 256 * 1024  # characters of media from which decoding and writing would block the event loop
MOST_DRIFTS = 32  # drifted calls of a replay that are kept
CLOSING = 5.0  # seconds for held calls to end


class RecordFailed(HoldwaterError):
    """An exchange cannot be written, so its reply is not delivered."""


class Session:
    """Implements `core.authoring.Session`."""

    def __init__(
        self,
        attempt: int,
        log: ExchangeLog,
        shared: SharedResources,
        limits: Limits = Limits(),  # noqa: B008 (a frozen record)
        terms: CallTerms = CallTerms(),  # noqa: B008 (a frozen record)
        recording: ReplyRecording | None = None,
        behind: ModelRoute | None = None,
    ) -> None:
        self.attempt = attempt
        self.model_route = behind  # None: the gateway's default route
        self.key = f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"
        self.usage = NO_USAGE
        self.replayed_usage = NO_USAGE
        self.drifted = 0
        self.drifts: list[DriftedCall] = []  # bound: MOST_DRIFTS
        self.exchanges = 0  # including those of its borrowers
        self.version = ""  # of the policy that answered its own last call
        self.closed = False
        self.threads = CallThreads()
        self.count_threads = CallThreads()  # of token counts, which do not decide how the conversation ended
        self.uncounted: set[str] = set()  # dialects whose tokens the upstream cannot count
        self._lender: Session | None = None
        self._by = ""
        self._limited = True  # whether the budget binds its calls
        self._borrowers: set[Session] = set()  # bound: the open borrowers
        self._recorders: dict[str, ConversationRecorder] = {}  # bound: one for each dialect
        self._log = log
        self._shared = shared
        self.admission = ByteAdmission(shared.admission.most_each, shared.admission)
        self._limits = limits
        self.terms = terms
        self._recording = recording
        self._limit_failure: AttemptFailure | None = None
        self._broken: AttemptFailure | None = None
        self._limited_usage = NO_USAGE  # counts against the limits
        self._calls: set[asyncio.Timeout] = set()  # one for each call in flight
        self._unrecorded: set[asyncio.Task[Any] | None] = set()  # one for each unrecorded turn
        self._idle = asyncio.Event()
        self._idle.set()
        self._waits = 0  # calls waiting for a rate limit now
        self._waited = 0.0
        self._waiting_since = 0.0

    @contextmanager
    def lend(self, by: str, *, limited: bool = True, judge: JudgeRoute | None = None) -> Iterator[Session]:
        """Open a session for the borrower `by`, with the same record and, if `limited`, the same budget.

        Its usage counts here too. The caller or `close` closes it before this session.
        """
        terms, route = self.terms, self.model_route
        if judge is not None:
            terms, route = judge.derive_terms(terms), judge.derive_route(route)
        borrower = Session(self.attempt, self._log, self._shared, self._limits, terms, self._recording, route)
        borrower._lender, borrower._by, borrower._limited = self, by, limited and self._limited
        borrower.admission = self.admission
        borrower._recorders, borrower._unrecorded = self._recorders, self._unrecorded
        borrower.closed = self.closed
        self._borrowers.add(borrower)
        try:
            yield borrower
        finally:
            self._borrowers.discard(borrower)

    @property
    def _owner(self) -> Session:
        """The session at the end of the chain of lenders: it has the budget, and counts all usage."""
        return self if self._lender is None else self._lender._owner

    @property
    def failure(self) -> AttemptFailure | None:
        """The failure of the last call of the conversation's main thread, if it failed.

        A record that cannot be written stays the reason, and so does a budget that refused a call.
        """
        return self._broken or self._limit_failure or self._blame(self.threads.failure)

    @property
    def unanswered(self) -> AttemptFailure | None:
        """The failure of the last failed call of any thread, if no later call succeeded."""
        return self._blame(self.threads.unanswered)

    def _blame(self, failure: AttemptFailure | None) -> AttemptFailure | None:
        """Return the failure; a run-level failure of a model other than the run's fails only this attempt."""
        if failure is not None and failure.where is FailureOrigin.RUN and not self.terms.shared:
            return structs.replace(
                failure, where=FailureOrigin.MODEL, again=failure.kind == BreakerTripped.kind
            )
        return failure

    @property
    def throttled(self) -> bool:
        """Whether a call is waiting for a rate limit now."""
        return self._waits > 0

    @property
    def waited(self) -> float:
        """Seconds during which at least one call waited for a rate limit, until now."""
        return self._waited + (time.monotonic() - self._waiting_since if self._waits else 0.0)

    @contextmanager
    def track_waiting(self) -> Iterator[None]:
        """Count the time of a call that waits for a rate limit."""
        if not self._waits:
            self._waiting_since = time.monotonic()
        self._waits += 1
        try:
            with self._lender.track_waiting() if self._lender is not None else nullcontext():
                yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._waited += time.monotonic() - self._waiting_since

    def call(self) -> ActiveCall:
        """Return the context of a call in flight; closing the session raises `AttemptOver` inside it."""
        return ActiveCall(self._calls, self._idle, closed=self.closed)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Return the context of a turn; raise `LimitReached` if the budget does not allow it."""
        self._check_budget()
        # A call that the record answers is not paced: see `pace`.
        waits = self._recording is None and self.terms.rate is not None
        return self._pace_turn() if waits else UnrecordedTurn(self._unrecorded)

    @asynccontextmanager
    async def _pace_turn(self) -> AsyncIterator[None]:
        async with UnrecordedTurn(self._unrecorded), self.pace():
            yield

    @asynccontextmanager
    async def pace(self) -> AsyncIterator[None]:
        """Run a call to the upstream when the run's rate allows it."""
        if self.terms.rate is None:
            yield
            return
        async with self.terms.rate.turn(self.track_waiting):
            self._check_budget(but=1)  # other calls may have used it up meanwhile
            yield

    def find_recorded(
        self, delta: RequestDelta, head: RawMembers
    ) -> tuple[RecordedReply | None, HeadChanges]:
        """Return the recorded reply to a request with the keys `head`, if any, and the keys to change."""
        if self._recording is None:
            return None, NO_CHANGES
        request = make_repeated_request(delta, head)
        found = self._recording.take(request)
        if found is None and self.terms.replays:
            found = self._recording.nearest(request.dialect, request.messages)
        if found is None:
            return None, self._recording.change_live(request)
        if found.drifted:
            owner = self._owner
            owner.drifted += 1
            if len(owner.drifts) < MOST_DRIFTS:
                owner.drifts.append(DriftedCall(request.identity, found.attempt, found.number))
        if found.refused:
            self._mark_broken(make_drift_failure(found.refused))
        chunks = None if found.chunks is None else unmask_bytes(found.chunks, self.key)
        original = None if found.original is None else unmask_bytes(found.original, self.key)
        reply = unmask_bytes(found.reply, self.key)
        return found._replace(reply=reply, chunks=chunks, original=original), found.changes

    @property
    def unrepeated(self) -> str:
        """Why an attempt that ends now has not repeated what it had to; empty: it has."""
        return "" if self._recording is None else self._recording.unrepeated

    @property
    def replays(self) -> bool:
        """Whether replies may come from a recording."""
        return self._recording is not None

    def _check_budget(self, but: int = 0) -> None:
        if not self._limited:
            return
        owner = self._owner
        over = find_used_up(owner._limits, owner._limited_usage, len(self._unrecorded) - but)
        if over is not None:
            self._limit_failure = owner._limit_failure = over
            raise LimitReached(over.message, kind=over.kind)

    async def close(self) -> bool:
        """End the calls in flight, those of borrowers first; return False if that takes too long."""
        self._end()
        try:
            async with asyncio.timeout(CLOSING):
                await self._wait_ended()
        except TimeoutError:
            return False
        return True

    def _end(self) -> None:
        self.closed = True
        for borrower in self._borrowers:
            borrower._end()
        now = asyncio.get_running_loop().time()
        for scope in self._calls:
            scope.reschedule(now)

    async def _wait_ended(self) -> None:
        for borrower in tuple(self._borrowers):
            await borrower._wait_ended()
        await self._idle.wait()

    def recorder(self, dialect: Dialect) -> ConversationRecorder:
        """Return the recorder of this attempt's conversations in a dialect."""
        if dialect.name not in self._recorders:
            self._recorders[dialect.name] = ConversationRecorder(dialect)
        return self._recorders[dialect.name]

    async def read(self, dialect: Dialect, content: bytearray) -> ParsedRequest:
        """Return the parsed request."""
        recorder = self.recorder(dialect)
        if (known := recorder.find(content)) is not None:
            rest = await self._read(partial(recorder.read_rest, content, known), known.count_new(content))
            if rest is not None:
                return rest
        return await self._read(partial(recorder.read_whole, content), len(content))

    async def _read(self, read: Callable[..., T], size: int) -> T:
        """Return the result of `read`; a large request is parsed in a thread, so the loop stays free."""
        if size <= LARGE:
            try:
                return read(large=False)
            except LargeRequest:
                pass  # few bytes, but many messages
        return await self._run_in_thread(partial(read, large=True))

    async def find_delta(
        self, dialect: Dialect, reading: ParsedRequest, head: RawMembers, named: RawMembers
    ) -> RequestDelta:
        """Return the new part of a request with this `head`; its identity depends on the keys `named`."""
        large = reading.is_large
        compute = partial(self._compute_delta, dialect, reading, head, named)
        delta = await self._run_in_thread(compute) if large else compute()
        del reading, compute
        if (
            large
            or len(delta.head or b"") >= LARGE_MEDIA
            or any(media.has_large(m, LARGE_MEDIA) for m in delta.append)
        ):
            return await self._run_in_thread(partial(self._extract_media, delta))
        return self._extract_media(delta)

    def _compute_delta(
        self, dialect: Dialect, reading: ParsedRequest, head: RawMembers, named: RawMembers
    ) -> RequestDelta:
        delta = self.recorder(dialect).find_delta(reading, msgspec.json.encode(head))
        return delta._replace(identity=identify_request(dialect.name, named, delta.names))

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, so that the event loop stays free."""
        working = asyncio.get_running_loop().run_in_executor(self._shared.executor, work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])  # a thread cannot be stopped, and must not outlive the log
            raise

    def _extract_media(self, delta: RequestDelta) -> RequestDelta:
        try:
            keep = self._log.blob
            head = media.extract_constants(delta.head, keep) if delta.head is not None else None
            recorder = self._recorders[delta.dialect]
            append = [
                recorder.resolve(media.extract_media(message, keep), self._log.read)
                for message in delta.append
            ]
            if delta.linked and delta.parent is not None:
                before = self._log.read(delta.parent)
                append = [*recorder.read_reply_messages(before), *append]
            return delta._replace(append=append, head=head)
        except Exception as error:  # boundary: any error of the log ends the attempt
            raise self._fail_record(error) from error

    def find_threads(self, dialect: Dialect) -> CallThreads:
        """Return the threads that the calls of a dialect belong to."""
        return self.count_threads if dialect.counted_dialect else self.threads

    def write(self, delta: RequestDelta, ending: CallEnding, started: float, call: ThreadCall) -> None:
        """Write the exchange to the record. Only after that may the end of its reply be sent."""
        number = self._owner.exchanges + 1
        reply, chunks, original = map(self._extract_reply, (ending.reply, ending.chunks, ending.original))
        ending = ending._replace(reply=reply, chunks=chunks, original=original)
        price = self.terms.mapped_prices.get(ending.model or "", self.terms.price)
        exchange = ending.make_exchange(number, delta, price, started, self._by)
        try:
            self._log.append(exchange)
        except AttemptOver:
            raise
        except Exception as error:  # boundary: any error of the log ends the attempt
            raise self._fail_record(error) from error
        self._count(exchange.usage, exchange.saved, limited=not ending.unlimited)
        self.version = exchange.version or self.version
        self._unrecorded.discard(asyncio.current_task())
        if self.terms.rate is not None and ending.saved is None:
            self.terms.rate.spend(exchange.usage.tokens)
        answered = ending.status == 200 and not ending.error
        self._recorders[delta.dialect].on_written(delta, number, ending.reply if answered else None)
        self.threads.on_written(call, number)
        if self.model_route is not None and self.model_route.on_written is not None:
            self.model_route.on_written(delta, number)

    def _count(self, usage: ModelUsage, saved: ModelUsage, *, limited: bool) -> None:
        self.exchanges += 1
        self.usage = self.usage.plus(usage)
        if saved is not NO_USAGE:
            self.replayed_usage = self.replayed_usage.plus(saved)
        if limited:
            self._limited_usage = self._limited_usage.plus(usage.plus(saved))
        if self._lender is not None:
            self._lender._count(usage, saved, limited=limited)

    def _extract_reply(self, reply: bytes | None) -> bytes | None:
        try:
            return media.extract_media(reply, self._log.blob) if reply is not None else None
        except Exception as error:  # boundary: any error of the log ends the attempt
            raise self._fail_record(error) from error

    def _fail_record(self, error: Exception) -> RecordFailed:
        message = f"an exchange could not be written: {error}"
        hint = error.hint if isinstance(error, HoldwaterError) else ""
        kind = error.kind if isinstance(error, AttemptError) else "record"
        where = FailureOrigin.RUN
        self._mark_broken(AttemptFailure(where=where, kind=kind, message=message, hint=hint, again=False))
        return RecordFailed(message, hint)

    def _mark_broken(self, failure: AttemptFailure) -> None:
        """Set the failure here and in the lenders, which share the record."""
        self._broken = failure
        if self._lender is not None:
            self._lender._mark_broken(failure)
