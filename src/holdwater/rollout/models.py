"""Chooses the model for an attempt's calls: the run's, an endpoint, a function in the worker, or the trainer.

It opens the model that an order names and closes it with the attempt. `gateway/` forwards the calls.
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
from itertools import islice
from types import TracebackType
from typing import Any, Self

import msgspec

from ..conversation.trajectory import ExchangeTree
from ..core.authoring import Policy
from ..core.config import AUTO_DIALECT, SAME_DIALECT, RunConfig
from ..core.endpoints import EndpointUse
from ..core.errors import BadInput, ModelFailed
from ..core.exchange import Exchange, ExchangeLog
from ..core.records import NO_USAGE
from ..core.serving_protocol import ModelSource
from ..core.token_sequences import TokenServer
from ..dialect import DIALECTS
from ..gateway.call_terms import CallTerms, JudgeRoute, ModelRoute, RateLimiter
from ..gateway.recorder import RequestDelta
from ..gateway.upstreams import NoModel, ReplayOnly, Upstream
from ..gateway.upstreams.dialect_choice import AdaptiveUpstream
from ..gateway.upstreams.endpoints import EndpointPool
from ..gateway.upstreams.held_calls import HeldQuestion, HeldUpstream
from ..gateway.upstreams.http import HttpUpstream
from ..gateway.upstreams.http_endpoint import EndpointTerms, ProviderAddress
from ..gateway.upstreams.policy import PolicyUpstream
from ..gateway.upstreams.token_requests import TokenUpstream
from ..gateway.upstreams.translation import TranslatedUpstream, TranslationTerms
from ..ledger.blobs import BlobStore, resolve_references
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import read_exchanges
from ..plugin import find_object
from .worker_protocol import (
    AnswerHeldCall,
    AttemptProgress,
    CallHeld,
    CallReleased,
    EventNoted,
    FetchHeldCall,
    HeldCallContent,
    OrderTerms,
    SteerWorker,
    ToConductor,
    UpstreamConfig,
    WorkerSetup,
)

Emit = Callable[[ToConductor], None]


class WorkerModels:
    """The models of one worker, open inside of `async with`; `upstream` is the run's own model."""

    def __init__(
        self, welcome: WorkerSetup, directory: RunDirectory, emit: Emit, policy: Policy | None = None
    ) -> None:
        self._welcome = welcome
        self._directory = directory
        self._emit = emit
        serving = welcome.config.serving
        if policy is None and serving is not None and serving.policy is not None:
            policy = load_policy(serving.policy)
        self._policy = None if policy is None else PolicyUpstream(policy, self._read_conversation)
        self._endpoints = EndpointPool(welcome.config.stall, self._adapt_server)
        self.judge: JudgeRoute | None = None  # None: judges call the model of their attempt
        self._held: dict[int, HeldUpstream] = {}  # by attempt; bound: the run's concurrency
        self._servers: HttpUpstream | None = None  # of the run
        self._stack = AsyncExitStack()
        self._steered: tuple[str, str | None] | None = None  # the endpoint of the last `SteerWorker`

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._endpoints)
            self.upstream = await stack.enter_async_context(self._open_upstream())
            if self._welcome.config.judge.given:
                upstream = await stack.enter_async_context(self._open_judge())
                self.judge = JudgeRoute(upstream, self._welcome.config.judge)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _open_upstream(self) -> AbstractAsyncContextManager[Upstream]:
        """Open the upstream that the run was started with."""
        given, config = self._welcome.upstream, self._welcome.config
        if given is not None and not (given.everywhere or given.spoken):
            given = None  # it is for judges alone
        if given is None and self._policy is not None:
            return nullcontext(self._policy)
        if config.replays is not None:
            return nullcontext(ReplayOnly())
        if given is None:
            return nullcontext(NoModel())
        servers = self._make_servers(given)
        return self._open_adapted(servers, config.upstream_dialect, config.token_ids)

    def _make_servers(self, given: UpstreamConfig) -> HttpUpstream:
        stall = self._welcome.config.stall
        self._servers = HttpUpstream(_list_servers(given), stall=stall, note=self._note_server)
        return self._servers

    def report_uses(self) -> tuple[EndpointUse, ...]:
        """Return the calls of each of the run's servers since the last report; nothing for one server."""
        return () if self._servers is None else self._servers.report_uses()

    def _note_server(self, kind: str, message: str) -> None:
        self._note(kind, f"worker {self._welcome.worker}: {message}")

    def _note(self, kind: str, message: str) -> None:
        self._emit(EventNoted(kind=kind, message=message))

    @asynccontextmanager
    async def _open_adapted(
        self, server: HttpUpstream, dialect: str, tokens: TokenServer = TokenServer.NONE
    ) -> AsyncIterator[Upstream]:
        async with server:
            asking = server if tokens is TokenServer.NONE else TokenUpstream(server, tokens)
            yield self._adapt_server(asking, dialect)

    def _adapt_server(self, server: Upstream, dialect: str = AUTO_DIALECT) -> Upstream:
        """Return an upstream that translates the calls which a server of `dialect` does not understand."""
        if dialect == SAME_DIALECT:
            return server
        terms = TranslationTerms(self._read_conversation, self._read_replies, self._note)
        if dialect == AUTO_DIALECT:
            return AdaptiveUpstream(server, terms)
        return TranslatedUpstream(server, DIALECTS[dialect], terms)

    def _open_judge(self) -> AbstractAsyncContextManager[Upstream | None]:
        """Open the judges' own server; None: their calls go where those of their attempt go."""
        given, config = self._welcome.upstream, self._welcome.config
        if config.judge.url is None:
            return nullcontext()
        if given is None or given.judge is None:  # a replay
            return nullcontext(ReplayOnly())
        address = ProviderAddress(given.judge.url, given.judge.key)
        server = HttpUpstream(dict.fromkeys(DIALECTS, address), stall=config.stall)
        return self._open_adapted(server, AUTO_DIALECT)

    @asynccontextmanager
    async def open_route(
        self, attempt: int, offer: OrderTerms | None, executor: Executor
    ) -> AsyncIterator[ModelRoute | None]:
        """Open the route that an order chooses for an attempt; None: the run's own."""
        if offer is None:
            yield None
            return
        choice = offer.model
        asked = ModelRoute(None, choice.name, offer.sampling, choice.version)
        match choice.source:
            case ModelSource.RUN:
                yield asked
            case ModelSource.ENDPOINT:
                assert choice.url is not None
                async with self._endpoints.use(choice.url, offer.key) as upstream:
                    yield asked._replace(upstream=upstream)
            case ModelSource.FUNCTION:
                yield asked._replace(upstream=self._require_policy())
            case ModelSource.TRAINER:
                with self._hold_calls(attempt, executor) as held:
                    yield asked._replace(upstream=held, on_written=held.on_written)

    def _read_conversation(self, attempt: int, delta: RequestDelta) -> list[Any]:
        """Return all messages of a request that is recorded as a difference to an earlier one."""
        earlier = _SegmentHistory(self._directory, attempt)
        before = earlier.read_messages(delta.parent, delta.keep) if delta.parent is not None else []
        return [msgspec.json.decode(part) for part in (*before, *map(earlier.resolve_media, delta.append))]

    def _read_replies(self, attempt: int) -> Iterator[bytes]:
        """Yield the replies of an attempt whose server has another dialect, as they came."""
        blobs = BlobStore(self._directory.blobs)
        for exchange in read_exchanges(self._directory, attempt):
            if exchange.original is not None:
                yield resolve_references(bytes(exchange.original), blobs)

    def _require_policy(self) -> PolicyUpstream:
        if self._policy is None:
            hint = "start the server with `--policy path.py:name`"
            raise ModelFailed("the server has no policy", hint, kind="absent", again=False)
        return self._policy

    @contextmanager
    def _hold_calls(self, attempt: int, executor: Executor) -> Iterator[HeldUpstream]:
        listener, earlier = _ConductorListener(attempt, self._emit), _SegmentHistory(self._directory, attempt)
        held = self._held[attempt] = HeldUpstream(listener, earlier, executor)
        try:
            yield held
        finally:
            del self._held[attempt]

    def take(self, message: FetchHeldCall, emit: Emit) -> None:
        """Emit the content of a held call."""
        held = self._held.get(message.attempt)
        if held is None:
            emit(HeldCallContent(attempt=message.attempt, call=message.call))
        else:
            held.take(message.call, whole=message.whole)

    def answer(self, message: AnswerHeldCall) -> None:
        """Answer a held call; ignore the answer to a call that is no longer held."""
        held = self._held.get(message.attempt)
        if held is not None:
            held.answer(message.call, message.answer)

    async def steer(self, message: SteerWorker) -> ModelRoute:
        """Return the route for the run's calls from now on; the previous endpoint finishes its open calls."""
        to, before = message.to, self._steered
        upstream = await self._endpoints.take(to.url, message.key)
        self._steered = (to.url, message.key)
        if before is not None:
            await self._endpoints.give(*before)
        config = self._welcome.config
        return ModelRoute(upstream, to.name or config.model, config.sampling, to.version)


class ProgressLog:
    """An `ExchangeLog` that reports the progress of its attempt."""

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
        self._emit(AttemptProgress(attempt=self._attempt, turns=self._turns, usage=self._usage))


class _ConductorListener:
    """Implements the gateway's `HeldCallListener`: forwards its events to the conductor."""

    def __init__(self, attempt: int, emit: Emit) -> None:
        self._attempt = attempt
        self._emit = emit

    def on_held(self, call: int) -> None:
        self._emit(CallHeld(attempt=self._attempt, call=call))

    def on_released(self, call: int) -> None:
        self._emit(CallReleased(attempt=self._attempt, call=call))

    def on_question(self, call: int, question: HeldQuestion | None) -> None:
        fields = question._asdict() if question is not None else {}
        self._emit(HeldCallContent(attempt=self._attempt, call=call, **fields))


class _SegmentHistory:
    """Implements the gateway's `EarlierExchanges`: reads the attempt's own segment."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self._directory = directory
        self._attempt = attempt

    def resolve_media(self, part: bytes) -> bytes:
        return resolve_references(part, BlobStore(self._directory.blobs))

    def read_messages(self, number: int, keep: int) -> list[bytes]:
        messages = islice(ExchangeTree(self._directory, self._attempt).request(number), keep)
        return [self.resolve_media(bytes(raw)) for _, raw in messages]

    def read_head(self, number: int) -> bytes:
        return ExchangeTree(self._directory, self._attempt).raw_head(number)


def _list_servers(given: UpstreamConfig) -> list[EndpointTerms]:
    """Return the servers that share the calls, with the address of each dialect."""
    if not given.everywhere:
        spoken = given.spoken.items()
        return [EndpointTerms({name: ProviderAddress(p.url, p.key, p.bearer) for name, p in spoken})]
    return [
        EndpointTerms(dict.fromkeys(DIALECTS, ProviderAddress(p.url, p.key)), p.weight, p.models)
        for p in given.everywhere
    ]


def load_policy(spec: str) -> Policy:
    """Load the policy function of a spec."""
    found = find_object(spec)
    if not callable(found):
        raise BadInput(
            f"not a function: `{spec}` is of type `{type(found).__name__}`", "a policy takes a request"
        )
    return found


def terms_of(config: RunConfig) -> CallTerms:
    """Return the terms for a worker's model calls, with its share of the run's rate limit."""
    rate = None
    if config.rpm is not None or config.tpm is not None:
        rate = RateLimiter(config.rpm, config.tpm, 1.0 / max(1, config.workers))
    return CallTerms(
        price=config.price,
        mapped_prices=config.mapped_prices,
        rate=rate,
        replays=config.replays is not None,
        sampling=config.sampling,
        names=config.model_map,
        shared=config.serving is None,
    )
