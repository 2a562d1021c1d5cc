"""Hosts many attempts on one event loop: in a worker process, or in the conductor itself.

It gives each life its surroundings, writes the verdict to its journal and only then reports it. Who starts,
replaces and buries workers is in `run/`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..agent.load import load as load_agent
from ..agent.programs import find_program_files
from ..agent.python import takes_attempt
from ..core.authoring import (
    Agent,
    Critique,
    DriftedCall,
    Enclose,
    ExchangeLog,
    Model,
    Recording,
    Sandboxes,
    Session,
    Suite,
)
from ..core.errors import AttemptOver, DiskFull, HoldwaterError
from ..core.failures import daemon_died, disk_full, interrupted, worker_lost
from ..core.records import Exchange, Failure, Limits, Network, Verdict
from ..core.serving import Source
from ..docker.client import DockerClient
from ..docker.liveness import DaemonWatch
from ..gateway.client import ChatClient
from ..gateway.server import Gateway
from ..gateway.upstreams.policy import Policy
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import AttemptLog, read_exchanges
from ..ledger.recording import EarlierReplies
from ..ledger.reserve import Reserve
from ..sandbox.docker.sandbox import DockerSandboxes
from ..sandbox.marks import attempt_of
from ..sandbox.process import ProcessSandboxes
from ..sandbox.scratch import temporary_prefix
from ..sandbox.visibility import find_visible, search_path
from ..suite.load import load as load_suite
from .attempt import live
from .critic import own_critic
from .disks import DiskWatch
from .drift import describe_drift
from .group import Groups
from .life import Life
from .models import Followed, Models, terms_of, unpriced
from .paths import AttemptPaths
from .place import Log, Paths
from .suspension import SuspensionWatch
from .verdicts import VerdictJournal
from .wire import (
    Answered,
    Arrived,
    Broken,
    Done,
    Job,
    Living,
    Noted,
    Offer,
    Score,
    Steered,
    Take,
    ToConductor,
    Welcome,
)


def _nothing() -> None:
    """What the end of an attempt does by default."""


class Starter(Protocol):
    """Owns the tasks of attempts: a `TaskGroup`, or a fleet that can leave one behind."""

    def create_task(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]: ...


class Host:
    """The attempts of one process. Everything they share is opened here and closed with it."""

    def __init__(
        self,
        welcome: Welcome,
        emit: Callable[[ToConductor], None],
        suite: Suite | None,
        agent: Agent | None,
        enclose: Enclose | None = None,
        policy: Policy | None = None,
        critic: Critique | None = None,
    ) -> None:
        config = welcome.config
        self._welcome = welcome
        self._emit = emit
        self._directory = RunDirectory(Path(welcome.directory))
        self._models = Models(welcome, self._directory, emit, policy)
        self._recorded = self._directory if config.replays is None else RunDirectory(Path(config.replays))
        self._reserve = Reserve(self._directory.reserve)
        self._living: dict[int, Life] = {}  # bound: the run's concurrency
        self._tasks: dict[int, asyncio.Task[None]] = {}  # bound: the run's concurrency
        self._stopped: dict[int, Failure] = {}  # before their first step; bound: the same
        self.suite = suite or load_suite(config.suite)
        self.agent = agent or load_agent(config.agent)
        self.parental = takes_attempt(self.agent.act)
        self.groups = Groups(self.suite.group, lambda attempt: emit(Arrived(attempt=attempt)))
        self.critic = own_critic(critic or config.critic)
        self.limits: Limits = config.limits
        self.salvaging = config.salvaging
        self._closing = config.closing
        self.enclose: Enclose = enclose or (lambda name, manager: manager)
        self.token = welcome.token
        self.worker = welcome.worker
        self.on_end: Callable[[], None] = _nothing  # called when an attempt has ended
        self.gateway: Path | None = None
        self.variables: Mapping[str, str] = welcome.variables
        self._scratch = self._directory.sandboxes(config)
        self._disks = DiskWatch(self._reserve, {self._directory.path, self._scratch})
        self._daemon: DaemonWatch | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Host]:
        """The gateway listens and the journal is open while this block runs."""
        welcome = self._welcome
        async with AsyncExitStack() as stack:
            self._journal = stack.enter_context(
                VerdictJournal(self._directory, self._reserve, welcome.worker, welcome.token)
            )
            self._suspension = stack.enter_context(SuspensionWatch())
            self.sandboxes = await self._sandboxes(stack)
            if not self._models.any:
                yield self
                return
            # A unix socket's path has 108 bytes at most, so it cannot lie in the run directory.
            place = Path(tempfile.mkdtemp(prefix=temporary_prefix(welcome.config.id)))
            try:
                async with (
                    self._models as models,
                    Gateway(
                        models.upstream,
                        place / "gateway",
                        model=welcome.config.model,
                        body_cap=welcome.config.largest_request,
                        terms=terms_of(welcome.config),
                    ) as self._server,
                ):
                    self._server.on_failed_cleanup = self._left
                    self._server.on_refused = lambda what, attempt: self._emit(
                        Noted(kind="gateway.refused", message=what, attempt=attempt)
                    )
                    self._server.attempt_of = partial(attempt_of, welcome.config.id)
                    self.gateway = self._server.socket
                    if welcome.containers is not None and welcome.containers.gateway:
                        await self._server.listen_on(welcome.containers.gateway)
                    yield self
            finally:
                shutil.rmtree(place, ignore_errors=True)

    async def _sandboxes(self, stack: AsyncExitStack) -> Sandboxes:
        config, containers = self._welcome.config, self._welcome.containers
        if containers is not None:
            client = await stack.enter_async_context(DockerClient(containers.host))
            self._daemon = await stack.enter_async_context(DaemonWatch(client))
            return DockerSandboxes(client, containers, config.network)
        path = os.pathsep.join([*search_path(config.mounts), self._welcome.path])
        needed = find_program_files((sys.executable, *self.agent.paths), self._welcome.path)
        found = ProcessSandboxes(
            scratch=self._scratch,
            run=config.id,
            network=config.network,
            hide=(self._directory.path, self._scratch.parent, *map(Path, self.suite.hidden)),
            path=path,
            visible=find_visible(config.sandbox_root, config.mounts, needed.trees, needed.links),
        )
        stack.callback(found.close)
        return found

    def _left(self, what: str) -> None:
        self._emit(Noted(kind="gateway.left", message=what))

    def start(self, job: Job, group: Starter) -> None:
        """Begin to live an attempt; its verdict comes by `emit`."""
        self._tasks[job.attempt.id] = group.create_task(self._host(job))

    def interrupt(self, attempt: int, failure: Failure) -> None:
        """End an attempt with this failure."""
        if (life := self._living.get(attempt)) is not None:
            life.interrupt(failure)
        elif attempt in self._tasks:  # a task that is cancelled before its first step never says a word
            self._stopped[attempt] = failure

    def score(self, message: Score) -> None:
        """Nobody is left to wait for in a group."""
        self.groups.score(message.group, together=message.together)

    def look(self) -> None:
        """Each second: is a disk full? An attempt that was hurt by that ends now, however long it could."""
        self._disks.look()
        for life in self._living.values():
            if life.found_full:
                life.interrupt(interrupted("the run's disk was full"))

    def allow(self, attempt: int, memory: int) -> None:
        """The attempt may use more memory from now on."""
        life = self._living.get(attempt)
        if life is not None and life.sandbox is not None:
            life.sandbox.allow(memory)

    def take(self, message: Take, emit: Callable[[ToConductor], None]) -> None:
        """Say what is asked in a held call: `Asked` follows, by `emit`."""
        self._models.take(message, emit)

    def answer(self, message: Answered) -> None:
        """Answer a held call; one that is not held any more needs no answer."""
        self._models.answer(message)

    async def steer(self, message: Steered) -> None:
        """The run's model is another one from now on, for running attempts too."""
        if self.gateway is not None:
            self._server.steer(await self._models.steer(message))

    def give_up(self, attempt: int) -> asyncio.Task[None]:
        """Count an attempt as gone, whatever it still does; its task."""
        self._living.pop(attempt).interrupt(interrupted("it overran all its limits"))
        return self._tasks.pop(attempt)

    @property
    def memory(self) -> int:
        """Bytes that the sandboxes use together."""
        return sum(life.sandbox.memory for life in self._living.values() if life.sandbox)

    def living(self) -> tuple[Living, ...]:
        """Every attempt that is being lived, and where in its life it is."""
        now = asyncio.get_running_loop().time()
        lives = self._living.items()
        return tuple(
            Living(
                attempt=a,
                phase=life.phase,
                seconds=now - life.since,
                usage=life.usage,
                memory=life.sandbox.memory if life.sandbox else 0,
                throttled=life.session.throttled if life.session else False,
                disk=life.sandbox.disk if life.sandbox else 0,
                cpu=life.sandbox.cpu_seconds if life.sandbox else 0.0,
            )
            for a, life in lives
        )

    def traffic(self) -> tuple[int, int]:
        """The model calls that came so far, and those that are being served."""
        return (self._server.calls, self._server.serving) if self.gateway is not None else (0, 0)

    async def _host(self, job: Job) -> None:
        attempt = job.attempt
        tainted = False
        try:
            try:
                if (stopped := self._stopped.pop(attempt.id, None)) is None:
                    life = self._living[attempt.id] = Life(
                        job, self._noter(attempt.id), self._closing, self._suspension.seconds
                    )
                    verdict = await live(life, self)
                    tainted = life.tainted
                else:
                    verdict = Verdict(attempt=attempt.id, token=self.token, failure=stopped)
            except asyncio.CancelledError:
                failure = interrupted("the attempt was stopped before it had begun")
                verdict = Verdict(attempt=attempt.id, token=self.token, failure=failure)
            except Exception as error:  # boundary: our own bug must not cost a verdict  # noqa: BLE001
                self._noter(attempt.id)("attempt.crashed", traceback.format_exc(limit=-8))
                reason = f"internal error: {type(error).__name__}: {error}"
                failure = worker_lost(attempt, reason, own=True)
                verdict = Verdict(attempt=attempt.id, token=self.token, failure=failure)
            self._living.pop(attempt.id, None)  # first: what has its verdict cannot be interrupted any more
            if attempt.id in self._tasks:  # else it was given up, and has its verdict
                await self._report(verdict, tainted)
        finally:
            self._living.pop(attempt.id, None)
            self._stopped.pop(attempt.id, None)
            self._tasks.pop(attempt.id, None)
            self.on_end()

    async def _report(self, verdict: Verdict, tainted: bool) -> None:
        """Without room for the journal, the conductor waits for room and commits the verdict itself."""
        try:
            await self._journal.write(verdict)
        except DiskFull as error:
            self._noter(verdict.attempt)("journal.full", error.message)
        except HoldwaterError as error:
            self._emit(Broken(message=error.message))
            return
        self._emit(Done(verdict=verdict, tainted=tainted))

    def _noter(self, attempt: int) -> Callable[[str, str], None]:
        return lambda kind, message: self._emit(Noted(kind=kind, message=message, attempt=attempt))

    # The surroundings of an attempt (`place.Place`).

    def paths(self, attempt: int, name: str) -> Paths:
        return AttemptPaths(self._directory, attempt, name)

    def exchanges(self, attempt: int) -> Log:
        return AttemptLog(self._directory, attempt)

    def trajectory(self, attempt: int) -> Iterator[Exchange]:
        return read_exchanges(self._directory, attempt)

    def recording(self, earlier: tuple[int, ...]) -> Recording | None:
        return EarlierReplies(self._recorded, earlier) if self.gateway is not None else None

    def describe_drift(self, attempt: int, drifts: Sequence[DriftedCall]) -> str:
        return describe_drift(self._directory, self._recorded, attempt, drifts)

    def session(
        self, attempt: int, log: Log, limits: Limits, recording: Recording | None
    ) -> AbstractAsyncContextManager[Session | None]:
        if self.gateway is None:
            return _no_session()
        offer = self._living[attempt].job.offer
        own = offer is None or offer.model.source is Source.RUN
        if limits.cost is not None and (self._welcome.config.price is None or not own):
            raise unpriced(self._welcome.config.model if offer is None or own else offer.model.name)
        if offer is None:
            return self._server.session(attempt, log, limits, recording)
        return self._ordered(offer, attempt, log, limits, recording)

    @asynccontextmanager
    async def _ordered(
        self, offer: Offer, attempt: int, log: Log, limits: Limits, recording: Recording | None
    ) -> AsyncIterator[Session]:
        kept: ExchangeLog = Followed(attempt, log, self._emit) if offer.followed else log
        async with (
            self._models.behind(attempt, offer, self._server.executor) as behind,
            self._server.session(attempt, kept, limits, recording, behind) as session,
        ):
            yield session

    def lend(self, session: Session, by: str) -> AbstractAsyncContextManager[Session]:
        """A session for a borrower of that name, which writes to the same record and is closed first."""
        if (lender := self._server.sessions.get(session.key)) is None:
            raise AttemptOver("the attempt is over")
        return self._server.lend(lender, by)

    def model(self, session: Session | None, network: Network | None) -> Model | None:
        if session is None:
            return None
        url = self._server.url
        config = self._welcome.config
        nameless = "" if config.serving is None else "policy"
        name = self._server.model_of(session.key) or config.model or nameless
        inside = self._server.outside_url or self.sandboxes.gateway_url(url, network)
        return ChatClient(self._server.ask, url, inside, session.key, name)

    def watch_surroundings(self) -> Callable[[], Failure | None]:
        full = self._disks.since()
        died = self._daemon.since() if self._daemon else None

        def befallen() -> Failure | None:
            if full():
                return disk_full()
            return daemon_died() if died and died() else None

        return befallen


@asynccontextmanager
async def _no_session() -> AsyncIterator[None]:
    yield None
