"""A worker's models and its gateway without the worker, and a trainer that answers what it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from tests.gateway_harness import connect
from tests.wait_bounds import stretch

from holdwater.conversation.earlier_replies import EarlierReplies
from holdwater.core.config import RunConfig, ServingConfig
from holdwater.core.exchange import Exchange
from holdwater.core.records import Limits
from holdwater.core.serving_protocol import CallAnswer, ModelChoice, ModelSource
from holdwater.dialect import DIALECTS
from holdwater.gateway.server import Gateway
from holdwater.gateway.sessions import Session
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog, read_exchanges
from holdwater.rollout.models import ProgressLog, WorkerModels, terms_of
from holdwater.rollout.worker_protocol import (
    AnswerHeldCall,
    CallHeld,
    CallReleased,
    FetchHeldCall,
    HeldCallContent,
    ModelProvider,
    OrderTerms,
    UpstreamConfig,
    WorkerSetup,
)

NO_LIMITS = Limits()
HELD = OrderTerms(model=ModelChoice(source=ModelSource.TRAINER))


class Worker:
    """Its sessions write to a real run directory; what it says is in `heard`."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.heard: list[Any] = []
        self.models: WorkerModels
        self.gateway: Gateway
        self.http: aiohttp.ClientSession
        self.on: Callable[[Any], None] = lambda message: None

    def emit(self, message: Any) -> None:
        self.heard.append(message)
        self.on(message)

    async def until(self, condition: Callable[[list[Any]], Any]) -> Any:
        """Wait until what was heard fulfils `condition`."""
        async with asyncio.timeout(stretch(10)):
            while not (found := condition(self.heard)):
                await asyncio.sleep(0.002)
        return found

    def of(self, kind: type, attempt: int | None = None) -> list[Any]:
        return [m for m in self.heard if isinstance(m, kind) and attempt in (None, m.attempt)]

    async def asked(self, attempt: int, call: int, *, whole: bool = False) -> HeldCallContent:
        """Take a call, and what is asked in it."""
        before = len(self.of(HeldCallContent, attempt))
        self.models.take(FetchHeldCall(attempt=attempt, call=call, whole=whole), self.emit)
        await self.until(lambda _: len(self.of(HeldCallContent, attempt)) > before)
        found: HeldCallContent = self.of(HeldCallContent, attempt)[-1]
        return found

    def answer(self, attempt: int, call: int, **said: Any) -> None:
        self.models.answer(
            AnswerHeldCall(attempt=attempt, call=call, answer=CallAnswer(call=str(call), **said))
        )

    @asynccontextmanager
    async def session(
        self,
        attempt: int,
        offer: OrderTerms = HELD,
        limits: Limits = NO_LIMITS,
        earlier: tuple[int, ...] = (),
    ) -> AsyncIterator[Session]:
        log = AttemptLog(self.directory, attempt)
        try:
            async with (
                self.models.open_route(attempt, offer, self.gateway.executor) as behind,
                self.gateway.open_session(
                    attempt,
                    ProgressLog(attempt, log, self.emit) if offer.followed else log,
                    limits,
                    EarlierReplies(self.directory, earlier) if earlier else None,
                    behind,
                ) as session,
            ):
                yield session
        finally:
            log.close()

    def exchanges(self, attempt: int) -> list[Exchange]:
        return list(read_exchanges(self.directory, attempt))

    @property
    def root(self) -> str:
        return self.gateway.url.removesuffix("/v1")


@asynccontextmanager
async def worker(
    place: Path, url: str | None = None, keep_alive: float = 15.0, **options: Any
) -> AsyncIterator[Worker]:
    place.mkdir(exist_ok=True)
    directory = RunDirectory.create(place / "run")
    options = {"serving": ServingConfig(), **options}
    config = RunConfig(id="run", suite="s", agent="a", created=0.0, version="0", **options)
    upstream = (
        UpstreamConfig(everywhere=(ModelProvider(url=url, key="sk-of-the-run"),)) if url is not None else None
    )
    welcome = WorkerSetup(config=config, directory=str(directory.path), worker=0, token=1, upstream=upstream)
    made = Worker(directory)
    async with AsyncExitStack() as stack:
        made.models = await stack.enter_async_context(WorkerModels(welcome, directory, made.emit))
        made.gateway = await stack.enter_async_context(
            Gateway(
                made.models.upstream,
                place / "s",
                model=config.model,
                keep_alive=keep_alive,
                terms=terms_of(config),
            )
        )
        made.http = await stack.enter_async_context(connect(made.gateway.socket))
        yield made
        assert made.models._held == {}
        assert made.gateway.sessions == {}
        assert made.gateway.relay.admission.used == 0
        assert made.gateway.relay.retention.used == 0


class Trainer:
    """Takes every held call, keeps the conversations and answers with what `say` makes of the request."""

    def __init__(self, worker: Worker, say: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
        self._worker = worker
        self._say = say
        self._messages: dict[tuple[int, int], list[Any]] = {}
        self._heads: dict[tuple[int, int], dict[str, Any]] = {}
        self.requests: list[dict[str, Any]] = []
        worker.on = self._hear

    def _hear(self, message: Any) -> None:
        if isinstance(message, CallHeld):
            take = FetchHeldCall(attempt=message.attempt, call=message.call)
            asyncio.get_running_loop().call_soon(self._worker.models.take, take, self._worker.emit)
        elif isinstance(message, HeldCallContent) and message.dialect:
            request = self.request(message)
            self.requests.append(request)
            said = self._say(message.dialect, request)
            self._worker.answer(message.attempt, message.call, **said)

    def request(self, asked: HeldCallContent) -> dict[str, Any]:
        """The whole request, put together from what was asked before."""
        own = (asked.attempt, asked.call)
        before: list[Any] = []
        if asked.parent is not None:
            before = self._messages[asked.attempt, asked.parent][: asked.keep]
        self._messages[own] = [*before, *map(json.loads, asked.append)]
        if asked.head is None:
            assert asked.parent is not None
            self._heads[own] = self._heads[asked.attempt, asked.parent]
        else:
            self._heads[own] = json.loads(asked.head)
        return {**self._heads[own], DIALECTS[asked.dialect].key: self._messages[own]}


__all__ = ["HELD", "CallHeld", "CallReleased", "Trainer", "Worker", "worker"]
