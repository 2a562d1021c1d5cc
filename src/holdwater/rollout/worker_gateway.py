"""The gateway of a worker: the models behind it, and a session for each attempt that calls them.

`host.py` loads this module only where an attempt can call a model: the HTTP library is a third of a worker's
start. `models.py` chooses the model, `gateway/` forwards the calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from socket import socket

from ..core.authoring import Model, Policy, SandboxProvider, SessionStatus
from ..core.errors import AttemptOver
from ..core.exchange import SCORING_BORROWERS, ExchangeLog, ReplyRecording
from ..core.prices import make_price_error
from ..core.records import Limits, Network
from ..core.serving_protocol import ModelSource
from ..gateway.call_terms import SIDE_NAME
from ..gateway.in_process_calls import ChatClient
from ..gateway.server import Gateway
from ..ledger.directory import RunDirectory
from ..sandbox.process_marks import find_attempt
from .attempt_services import SegmentLog
from .models import ProgressLog, WorkerModels, terms_of
from .worker_protocol import (
    ChangeWorker,
    EventNoted,
    OrderTerms,
    PauseWorker,
    StandingMessage,
    SteerWorker,
    ToConductor,
    WorkerSetup,
)

Emit = Callable[[ToConductor], None]


class WorkerGateway:
    """The model calls of one worker; inside of `open`, its gateway listens on `socket`."""

    def __init__(
        self, welcome: WorkerSetup, directory: RunDirectory, emit: Emit, policy: Policy | None
    ) -> None:
        self._config = welcome.config
        self._emit = emit
        self._models = WorkerModels(welcome, directory, emit, policy)
        self.take = self._models.take
        self.answer = self._models.answer
        self.report_uses = self._models.report_uses

    @asynccontextmanager
    async def open(self, directory: Path, address: str) -> AsyncIterator[Path]:
        """Serve calls on a socket in `directory`, and at `address` if there is one; yield the socket."""
        config = self._config
        async with (
            self._models as models,
            Gateway(
                models.upstream,
                directory / "gateway",
                model=config.model,
                body_cap=config.largest_request,
                terms=terms_of(config),
            ) as self._server,
        ):
            self._server.on_failed_cleanup = lambda what: self._emit(
                EventNoted(kind="gateway.left", message=what)
            )
            self._server.on_refused = lambda what, attempt: self._emit(
                EventNoted(kind="gateway.refused", message=what, attempt=attempt)
            )
            self._server.attempt_of = partial(find_attempt, config.id)
            if address:
                await self._server.listen_on(address)
            yield self._server.socket

    async def serve_listener(self, listener: socket, attempt: int) -> Callable[[], None]:
        """Serve calls on a socket that listens in the network of one of this attempt's commands."""
        return await self._server.serve_listener(listener, attempt)

    async def follow(self, message: StandingMessage) -> None:
        """Change the run's model, or hold its calls or change their rate, for running attempts too."""
        match message:
            case SteerWorker():
                self._server.steer(await self._models.steer(message))
            case PauseWorker(paused=paused):
                self._server.hold_calls(held=paused)
            case ChangeWorker(config=config):
                self._server.change_rate(terms_of(config).rate)

    def traffic(self) -> tuple[int, int]:
        """Return the number of model calls received so far, and of calls in progress."""
        return self._server.calls, self._server.serving

    def open_session(
        self,
        offer: OrderTerms | None,
        attempt: int,
        log: SegmentLog,
        limits: Limits,
        recording: ReplyRecording | None,
    ) -> AbstractAsyncContextManager[SessionStatus]:
        """Open the session of an attempt; an order's `offer` can name a model of its own."""
        own = offer is None or offer.model.source is ModelSource.RUN
        if limits.cost is not None and (self._config.price is None or not own):
            raise make_price_error(self._config.model if offer is None or own else offer.model.name)
        if offer is None:
            return self._server.open_session(attempt, log, limits, recording)
        return self._open_order_session(offer, attempt, log, limits, recording)

    @asynccontextmanager
    async def _open_order_session(
        self,
        offer: OrderTerms,
        attempt: int,
        log: SegmentLog,
        limits: Limits,
        recording: ReplyRecording | None,
    ) -> AsyncIterator[SessionStatus]:
        kept: ExchangeLog = ProgressLog(attempt, log, self._emit) if offer.followed else log
        async with (
            self._models.open_route(attempt, offer, self._server.executor) as behind,
            self._server.open_session(attempt, kept, limits, recording, behind) as session,
        ):
            yield session

    def lend(
        self, session: SessionStatus, by: str, *, limited: bool
    ) -> AbstractAsyncContextManager[SessionStatus]:
        """Open a session for the borrower `by`; it writes to the same log and is closed before its lender."""
        if (lender := self._server.sessions.get(session.key)) is None:
            raise AttemptOver("the attempt is over")
        judge = self._models.judge if by in SCORING_BORROWERS else None
        return self._server.lend(lender, by, limited=limited, judge=judge)

    def make_model(
        self, session: SessionStatus, sandboxes: SandboxProvider, network: Network | None
    ) -> Model:
        """Return the model as a Python agent calls it, for a sandbox in `network`."""
        url = self._server.url
        nameless = "" if self._config.serving is None else "policy"
        name = self._server.route_of(session.key).model or self._config.model or nameless
        inside = self._server.outside_url or sandboxes.gateway_url(url, network)
        side_name = self._server.route_of(session.key).names.get(SIDE_NAME, "")
        return ChatClient(self._server.ask, url, inside, session.key, name, side_name)
