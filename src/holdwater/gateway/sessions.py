"""One attempt's place in the gateway: its key, its calls in flight, its usage and budget, its record.

A session is made for an attempt and dead with it: closing it answers every call that is still held. How a
call is passed on is in `relay.py`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, structs

from ..core.authoring import DriftedCall, ExchangeLog, Recorded, Recording
from ..core.budget import reached
from ..core.errors import AttemptError, AttemptOver, HoldwaterError, LimitReached
from ..core.masking import KEY_PREFIX, unmask_bytes
from ..core.prices import priced
from ..core.records import NO_USAGE, Exchange, Failure, Limits, Usage, Where
from . import media
from .behind import Behind
from .body import Admission
from .call_threads import CallThreads, ThreadCall
from .identity import identity
from .in_flight import InFlight, Unrecorded
from .recorder import Delta, Form, Reading, Recorder
from .terms import SharedMeans, Terms
from .upstreams.breaker import Tripped
from .value_count import LARGE, LargeRequest

T = TypeVar("T")
Members = Mapping[str, Raw]

ASIDE = 256 * 1024  # characters of media from which decoding and writing them would hold up the loop
MOST_DRIFTS = 32  # calls of a replay that are compared with the recorded ones
CLOSING = 5.0  # seconds for held calls to be answered
BILLED = frozenset({"error", "garbage", "cut", "stall"})  # failures of calls that were answered, if badly


class RecordFailed(HoldwaterError):
    """An exchange could not be written, so its reply is not delivered."""


class Ending(NamedTuple):
    """How a call ended."""

    status: int  # what the client got; 499 if it got nothing
    reply: bytes | None = None  # JSON
    usage: Usage = Usage(requests=1)
    error: str = ""
    streamed: bool = False
    saved: Usage | None = None  # in the place of `usage`: the reply was in the record
    version: str = ""  # of the policy that answered
    chunks: bytes | None = None  # as in `Exchange`
    billed: bool = True  # False: the upstream refused it or was not reached, so that it costs nothing


class Session:
    """Implements `core.authoring.Session`."""

    def __init__(
        self,
        attempt: int,
        log: ExchangeLog,
        shared: SharedMeans,
        limits: Limits = Limits(),  # noqa: B008 (a frozen record)
        terms: Terms = Terms(),  # noqa: B008 (a frozen record)
        recording: Recording | None = None,
        behind: Behind | None = None,
    ) -> None:
        self.attempt = attempt
        self.behind = behind  # None: the gateway's own
        self.key = f"{KEY_PREFIX}{secrets.token_urlsafe(32)}"
        self.usage = NO_USAGE
        self.saved = NO_USAGE
        self.drifted = 0
        self.drifts: list[DriftedCall] = []  # bound: MOST_DRIFTS
        self.exchanges = 0  # its own, those of its borrowers included
        self.closed = False
        self.threads = CallThreads()
        self.counts = CallThreads()  # token counts, which say nothing of how the conversation went
        self.uncounted: set[str] = set()  # dialects whose tokens the upstream cannot count
        self._lender: Session | None = None
        self._by = ""
        self._lent: set[Session] = set()  # bound: the borrowers that are open
        self._recorders: dict[str, Recorder] = {}  # bound: one for each dialect
        self._log = log
        self._shared = shared
        self.admission = Admission(shared.admission.most_each, shared.admission)
        self._limits = limits
        self._terms = terms
        self._recording = recording
        self._over: Failure | None = None
        self._broken: Failure | None = None
        self._calls: set[asyncio.Timeout] = set()  # one for each call in flight
        self._unrecorded: set[asyncio.Task[Any] | None] = set()  # one for each turn that is not in the record
        self._idle = asyncio.Event()
        self._idle.set()
        self._waits = 0  # calls that wait for a rate limit now
        self._waited = 0.0
        self._waiting_since = 0.0

    @contextmanager
    def lent(self, by: str) -> Iterator[Session]:
        """A session of its own for a borrower of that name: the same record and the same budget.

        What it uses counts here too. It is closed before this one, by whoever opened it or by `close`.
        """
        borrower = Session(
            self.attempt,
            self._log,
            self._shared,
            self._limits,
            self._terms,
            self._recording,
            self.behind,
        )
        borrower._lender, borrower._by = self, by
        borrower.admission = self.admission
        borrower._recorders, borrower._unrecorded = self._recorders, self._unrecorded
        borrower.closed = self.closed
        self._lent.add(borrower)
        try:
            yield borrower
        finally:
            self._lent.discard(borrower)

    @property
    def _owner(self) -> Session:
        """The one that is nobody's borrower: it has the budget, and counts all."""
        return self if self._lender is None else self._lender._owner

    @property
    def failure(self) -> Failure | None:
        """Why the last call of the conversation's main thread failed, if it did.

        A record that cannot be written stays the reason, and so does a budget that refused a call.
        """
        return self._broken or self._over or self._blame(self.threads.failure)

    @property
    def unanswered(self) -> Failure | None:
        """Why the last failed call of any thread failed, where no later call succeeded."""
        return self._blame(self.threads.unanswered)

    def _blame(self, failure: Failure | None) -> Failure | None:
        """The same failure; where the model is not the run's own, it ails this attempt alone."""
        if failure is not None and failure.where is Where.RUN and not self._terms.shared:
            return structs.replace(failure, where=Where.MODEL, again=failure.kind == Tripped.kind)
        return failure

    @property
    def throttled(self) -> bool:
        """Whether a call waits for a rate limit now."""
        return self._waits > 0

    @property
    def waited(self) -> float:
        """Seconds during which at least one call waited for a rate limit, up to now."""
        return self._waited + (time.monotonic() - self._waiting_since if self._waits else 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A call waits for a rate limit."""
        if not self._waits:
            self._waiting_since = time.monotonic()
        self._waits += 1
        try:
            with self._lender.waiting() if self._lender is not None else nullcontext():
                yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._waited += time.monotonic() - self._waiting_since

    def call(self) -> InFlight:
        """A call in flight; raises `AttemptOver` inside it, wherever it waits, when the session closes."""
        return InFlight(self._calls, self._idle, closed=self.closed)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """A call that is a turn; `LimitReached` if the budget does not allow it."""
        self._check()
        # What the record answers needs no turn: see `paced`.
        waits = self._recording is None and self._terms.rate is not None
        return self._paced_turn() if waits else Unrecorded(self._unrecorded)

    @asynccontextmanager
    async def _paced_turn(self) -> AsyncIterator[None]:
        async with Unrecorded(self._unrecorded), self.paced():
            yield

    @asynccontextmanager
    async def paced(self) -> AsyncIterator[None]:
        """A call to the upstream, when the run's rate allows it."""
        if self._terms.rate is None:
            yield
            return
        async with self._terms.rate.turn(self.waiting):
            self._check(but=1)  # others may have used it up meanwhile
            yield

    def recorded(self, delta: Delta) -> Recorded | None:
        """An earlier attempt's reply to the same request; in a replay, failing that, to the same turn."""
        if self._recording is None:
            return None
        found = self._recording.take(delta.identity)
        if found is None and self._terms.replays:
            found = self._recording.nearest(delta.dialect, delta.keep + len(delta.append))
            if found is not None:
                self._owner._drift(DriftedCall(delta.identity, found.attempt, found.number))
        if found is None:
            return None
        chunks = None if found.chunks is None else unmask_bytes(found.chunks, self.key)
        return found._replace(reply=unmask_bytes(found.reply, self.key), chunks=chunks)

    def _drift(self, call: DriftedCall) -> None:
        self.drifted += 1
        if len(self.drifts) < MOST_DRIFTS:
            self.drifts.append(call)

    @property
    def replays(self) -> bool:
        """Whether replies may come from the record."""
        return self._recording is not None

    def _check(self, but: int = 0) -> None:
        owner = self._owner
        over = reached(owner._limits, owner.usage.plus(owner.saved), len(self._unrecorded) - but)
        if over is not None:
            self._over = owner._over = over
            raise LimitReached(over.message, kind=over.kind)

    async def close(self) -> bool:
        """Answer what is held, first what its borrowers hold; False if that took too long."""
        self._end()
        try:
            async with asyncio.timeout(CLOSING):
                await self._ended()
        except TimeoutError:
            return False
        return True

    def _end(self) -> None:
        self.closed = True
        for borrower in self._lent:
            borrower._end()
        now = asyncio.get_running_loop().time()
        for scope in self._calls:
            scope.reschedule(now)

    async def _ended(self) -> None:
        for borrower in tuple(self._lent):
            await borrower._ended()
        await self._idle.wait()

    def recorder(self, form: Form) -> Recorder:
        """What is known of this attempt's conversations in a dialect."""
        if form.dialect not in self._recorders:
            self._recorders[form.dialect] = Recorder(form)
        return self._recorders[form.dialect]

    async def read(self, form: Form, content: bytearray) -> Reading:
        """A request taken apart."""
        recorder = self.recorder(form)
        if (known := recorder.find(content)) is not None:
            rest = await self._read(partial(recorder.read_rest, content, known), known.count_new(content))
            if rest is not None:
                return rest
        return await self._read(partial(recorder.read_whole, content), len(content))

    async def _read(self, read: Callable[..., T], size: int) -> T:
        """What `read` gives, in a thread if it is large: the loop goes on."""
        if size <= LARGE:
            try:
                return read(large=False)
            except LargeRequest:
                pass  # small, but of many messages
        return await self._aside(partial(read, large=True))

    async def delta(self, form: Form, reading: Reading, head: Members, named: Members) -> Delta:
        """What is new in a request with this `head`, of which its identity depends on `named`."""
        large = reading.is_large
        compute = partial(self._delta, form, reading, head, named)
        delta = await self._aside(compute) if large else compute()
        del reading, compute
        if large or len(delta.head or b"") >= ASIDE or any(media.has_large(m, ASIDE) for m in delta.append):
            return await self._aside(partial(self._extracted, delta))
        return self._extracted(delta)

    def _delta(self, form: Form, reading: Reading, head: Members, named: Members) -> Delta:
        delta = self.recorder(form).delta(reading, msgspec.json.encode(head))
        return delta._replace(identity=identity(form.dialect, named, delta.names))

    async def _aside(self, work: Callable[[], T]) -> T:
        """Do it in a thread, so that the loop goes on."""
        working = asyncio.get_running_loop().run_in_executor(self._shared.executor, work)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])  # a thread cannot be stopped, and must not outlive the log
            raise

    def _extracted(self, delta: Delta) -> Delta:
        try:
            keep = self._log.blob
            head = media.constants(delta.head, keep) if delta.head is not None else None
            recorder = self._recorders[delta.dialect]
            append = [
                recorder.resolve(media.extracted(message, keep), self._log.read) for message in delta.append
            ]
            if delta.linked and delta.parent is not None:
                before = self._log.read(delta.parent)
                append = [*recorder.said_in(before), *append]
            return delta._replace(append=append, head=head)
        except Exception as error:  # boundary: whatever a log raises ends the attempt
            raise self._break(error) from error

    def threads_of(self, form: Form) -> CallThreads:
        """Where the calls of a dialect have their place."""
        return self.counts if form.of else self.threads

    def write(self, delta: Delta, ending: Ending, started: float, call: ThreadCall) -> None:
        """Put the exchange into the record. Only then may the end of its reply leave."""
        number = self._owner.exchanges + 1
        reply, chunks = self._kept(ending.reply), self._kept(ending.chunks)
        usage, saved = NO_USAGE, ending.saved or NO_USAGE
        if ending.saved is None:
            # The price is that of the run's model, and another one makes the embeddings.
            price = None if delta.dialect == "embeddings" else self._terms.price
            usage = priced(ending.usage, price, billed=ending.billed)
        exchange = Exchange(
            number=number,
            parent=delta.parent,
            keep=delta.keep,
            append=tuple(Raw(message) for message in delta.append),
            head=Raw(delta.head) if delta.head is not None else None,
            reply=Raw(reply) if reply is not None else None,
            status=ending.status,
            dialect=delta.dialect,
            streamed=ending.streamed,
            usage=usage,
            error=ending.error,
            started=started,
            seconds=max(0.0, time.time() - started),
            identity=delta.identity,
            saved=saved,
            version=ending.version,
            by=self._by,
            chunks=Raw(chunks) if chunks is not None else None,
        )
        try:
            self._log.append(exchange)
        except AttemptOver:
            raise
        except Exception as error:  # boundary: whatever a log raises ends the attempt
            raise self._break(error) from error
        self._count(usage, saved)
        self._unrecorded.discard(asyncio.current_task())
        if self._terms.rate is not None and ending.saved is None:
            self._terms.rate.spend(usage.tokens)
        answered = ending.status == 200 and not ending.error
        self._recorders[delta.dialect].written(delta, number, reply if answered else None)
        self.threads.write(call, number)
        if self.behind is not None and self.behind.written is not None:
            self.behind.written(delta, number)

    def _count(self, usage: Usage, saved: Usage) -> None:
        self.exchanges += 1
        self.usage = self.usage.plus(usage)
        if saved is not NO_USAGE:
            self.saved = self.saved.plus(saved)
        if self._lender is not None:
            self._lender._count(usage, saved)

    def _kept(self, reply: bytes | None) -> bytes | None:
        try:
            return media.extracted(reply, self._log.blob) if reply is not None else None
        except Exception as error:  # boundary: whatever a log raises ends the attempt
            raise self._break(error) from error

    def _break(self, error: Exception) -> RecordFailed:
        message = f"an exchange could not be written: {error}"
        hint = error.hint if isinstance(error, HoldwaterError) else ""
        kind = error.kind if isinstance(error, AttemptError) else "record"
        self._spoil(Failure(where=Where.RUN, kind=kind, message=message, hint=hint, again=False))
        return RecordFailed(message, hint)

    def _spoil(self, failure: Failure) -> None:
        """The record is everybody's who writes to it."""
        self._broken = failure
        if self._lender is not None:
            self._lender._spoil(failure)
