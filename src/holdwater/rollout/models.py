"""Which model is behind an attempt's calls: the run's, an endpoint, a function here, or whoever ordered it.

It opens what an order asks for and closes it with the attempt. How calls are passed on is in `gateway/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from types import TracebackType
from typing import Any, Self

import msgspec

from ..core.authoring import ExchangeLog
from ..core.config import RunConfig
from ..core.errors import BadInput, ModelFailed, RunFailed
from ..core.records import NO_USAGE, Exchange
from ..core.serving import Source
from ..gateway.behind import Behind
from ..gateway.rate import Rate
from ..gateway.recorder import Delta
from ..gateway.terms import Terms
from ..gateway.upstreams import Upstream
from ..gateway.upstreams.endpoints import Endpoints
from ..gateway.upstreams.held import HeldUpstream, Question
from ..gateway.upstreams.http import Address, HttpUpstream
from ..gateway.upstreams.policy import Policy, PolicyUpstream
from ..gateway.upstreams.replay import Absent, Nothing
from ..ledger.blobs import Blobs
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import conversation, head_of
from ..ledger.media import resolve
from ..plugin import find
from .wire import Answered, Asked, Held, Offer, Progress, Steered, Take, ToConductor, Unheld, Welcome

Emit = Callable[[ToConductor], None]


class Models:
    """Those of one worker. `async with Models(...) as models`; `upstream` is what the run has."""

    def __init__(
        self, welcome: Welcome, directory: RunDirectory, emit: Emit, policy: Policy | None = None
    ) -> None:
        self._welcome = welcome
        self._directory = directory
        self._emit = emit
        serving = welcome.config.serving
        if policy is None and serving is not None and serving.policy is not None:
            policy = loaded(serving.policy)
        self._policy = None if policy is None else PolicyUpstream(policy, self._conversation)
        self._endpoints = Endpoints(welcome.config.stall)
        self._held: dict[int, HeldUpstream] = {}  # by attempt; bound: the run's concurrency
        self._stack = AsyncExitStack()
        self._steered: tuple[str, str | None] | None = None  # the endpoint that the run was last told

    @property
    def any(self) -> bool:
        """Whether calls can be answered at all."""
        config = self._welcome.config
        given = self._welcome.upstream is not None or self._policy is not None
        return given or config.replays is not None or config.serving is not None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._endpoints)
            self.upstream = await stack.enter_async_context(self._upstream())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _upstream(self) -> AbstractAsyncContextManager[Upstream]:
        """What the run was started with."""
        given, config = self._welcome.upstream, self._welcome.config
        if given is None and self._policy is not None:
            return nullcontext(self._policy)
        if config.replays is not None:
            return nullcontext(Nothing())
        if given is None:
            return nullcontext(Absent())
        if given.everywhere is not None:
            return HttpUpstream(given.everywhere.url, given.everywhere.key, stall=config.stall)
        addresses = {d: Address(p.url, p.key, p.bearer) for d, p in given.spoken.items()}
        return HttpUpstream(addresses, stall=config.stall)

    @asynccontextmanager
    async def behind(
        self, attempt: int, offer: Offer | None, executor: Executor
    ) -> AsyncIterator[Behind | None]:
        """What an order has for an attempt; None: it has what the run has."""
        if offer is None:
            yield None
            return
        choice = offer.model
        asked = Behind(None, choice.name, offer.sampling, choice.version)
        match choice.source:
            case Source.RUN:
                yield asked
            case Source.ENDPOINT:
                assert choice.url is not None
                async with self._endpoints.use(choice.url, offer.key) as upstream:
                    yield asked._replace(upstream=upstream)
            case Source.FUNCTION:
                yield asked._replace(upstream=self._function())
            case Source.TRAINER:
                with self._holding(attempt, executor) as held:
                    yield asked._replace(upstream=held, written=held.written)

    def _conversation(self, attempt: int, delta: Delta) -> list[Any]:
        """The messages of a request that names what it goes on with."""
        earlier = _Earlier(self._directory, attempt)
        before = earlier.request(delta.parent, delta.keep) if delta.parent is not None else []
        return [msgspec.json.decode(part) for part in (*before, *map(earlier.resolved, delta.append))]

    def _function(self) -> PolicyUpstream:
        if self._policy is None:
            hint = "start the server with `--policy path.py:name`"
            raise ModelFailed("the server has no policy", hint, kind="absent", again=False)
        return self._policy

    @contextmanager
    def _holding(self, attempt: int, executor: Executor) -> Iterator[HeldUpstream]:
        told, earlier = _Told(attempt, self._emit), _Earlier(self._directory, attempt)
        held = self._held[attempt] = HeldUpstream(told, earlier, executor)
        try:
            yield held
        finally:
            del self._held[attempt]

    def take(self, message: Take, emit: Emit) -> None:
        """Say what is asked in a held call."""
        held = self._held.get(message.attempt)
        if held is None:
            emit(Asked(attempt=message.attempt, call=message.call))
        else:
            held.take(message.call, whole=message.whole)

    def answer(self, message: Answered) -> None:
        """Answer a held call; nobody waits for one that is not held any more."""
        held = self._held.get(message.attempt)
        if held is not None:
            held.answer(message.call, message.answer)

    async def steer(self, message: Steered) -> Behind:
        """What is behind the run's calls from now on; the last one finishes those that it has."""
        to, before = message.to, self._steered
        upstream = await self._endpoints.take(to.url, message.key)
        self._steered = (to.url, message.key)
        if before is not None:
            await self._endpoints.give(*before)
        config = self._welcome.config
        return Behind(upstream, to.name or config.model, config.sampling, to.version)


class Followed:
    """An `ExchangeLog` that says how far its attempt has come."""

    def __init__(self, attempt: int, log: ExchangeLog, emit: Emit) -> None:
        self._attempt = attempt
        self._log = log
        self._emit = emit
        self._turns = 0
        self._usage = NO_USAGE
        self.blob, self.read = log.blob, log.read

    def append(self, exchange: Exchange) -> None:
        self._log.append(exchange)
        self._turns += 1
        self._usage = self._usage.plus(exchange.usage)
        self._emit(Progress(attempt=self._attempt, turns=self._turns, usage=self._usage))


class _Told:
    """Implements the gateway's `Listener`: the conductor is told."""

    def __init__(self, attempt: int, emit: Emit) -> None:
        self._attempt = attempt
        self._emit = emit

    def held(self, call: int) -> None:
        self._emit(Held(attempt=self._attempt, call=call))

    def unheld(self, call: int) -> None:
        self._emit(Unheld(attempt=self._attempt, call=call))

    def asked(self, call: int, question: Question | None) -> None:
        fields = question._asdict() if question is not None else {}
        self._emit(Asked(attempt=self._attempt, call=call, **fields))


class _Earlier:
    """Implements the gateway's `Earlier` over the attempt's own segment."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self._directory = directory
        self._attempt = attempt

    def resolved(self, part: bytes) -> bytes:
        return resolve(part, Blobs(self._directory.blobs))

    def request(self, number: int, keep: int) -> list[bytes]:
        return [bytes(raw) for raw in conversation(self._directory, self._attempt, number)[:keep]]

    def head(self, number: int) -> bytes:
        return head_of(self._directory, self._attempt, number)


def loaded(spec: str) -> Policy:
    """The function that a spec stands for."""
    found = find(spec)
    if not callable(found):
        raise BadInput(f"`{spec}` is no function: {type(found).__name__}", "a policy takes a request")
    return found


def terms_of(config: RunConfig) -> Terms:
    """What a worker's calls are subject to: of the run's rate, its share."""
    rate = None
    if config.rpm is not None or config.tpm is not None:
        rate = Rate(config.rpm, config.tpm, 1.0 / max(1, config.workers))
    return Terms(config.price, rate, config.replays is not None, config.sampling, config.serving is None)


def unpriced(model: str | None) -> RunFailed:
    return RunFailed(
        f"a limit on cost needs the model's price, which is not known: `{model}`",
        "`--prices FILE.toml` says it",
        kind="price",
    )
