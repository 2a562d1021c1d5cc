"""Hosts many attempts on one event loop: in a worker process, or in the conductor itself.

It provides the services that attempts use, writes each verdict to its journal and only then reports it.
`run/fleet/` starts, replaces and ends workers.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..agent.loader import find_agent, takes_attempt
from ..conversation.earlier_replies import EarlierReplies, describe_drift
from ..conversation.forked_replies import IMPOSED_KEYS, ForkedReplies
from ..conversation.nodes import read_nodes
from ..core.authoring import (
    Agent,
    CriticFunction,
    Model,
    Policy,
    ResourceWrapper,
    SessionStatus,
    Suite,
)
from ..core.errors import DiskFull, HoldwaterError
from ..core.exchange import SCORING_BORROWERS, DriftedCall, Exchange, ReplyRecording
from ..core.failures import make_disk_failure, make_interrupt_failure, make_loss_failure
from ..core.records import AttemptFailure, Limits, Network, Verdict
from ..core.sandbox_kind import SandboxSite
from ..core.serving_protocol import MessageNode, TrajectoryReference
from ..governor.disks import DiskWatch
from ..ledger.directory import RunDirectory
from ..ledger.disk_reserve import DiskReserve
from ..ledger.exchanges import AttemptLog, read_exchanges
from ..sandbox.scratch import temporary_prefix
from ..suite.loader import load as load_suite
from .attempt import run_attempt
from .attempt_services import AttemptPaths, SegmentLog
from .attempt_state import AttemptState
from .critic import load_critic
from .group import WaitingGroups
from .process_health import SuspensionWatch
from .sandbox_kinds import find_kind
from .work_files import VerdictJournal
from .worker_protocol import (
    AnswerHeldCall,
    AttemptDone,
    AttemptJob,
    AttemptStatus,
    ChangeWorker,
    EndpointsUsed,
    EventNoted,
    FetchHeldCall,
    MemberWaiting,
    PauseWorker,
    ScoreMembers,
    StandingMessage,
    ToConductor,
    WorkerBroken,
    WorkerSetup,
)

if TYPE_CHECKING:
    from .worker_gateway import WorkerGateway


class TaskStarter(Protocol):
    """Owns the tasks of attempts: a `TaskGroup`, or a fleet that can abandon a task."""

    def create_task(self, work: Coroutine[Any, Any, None], /) -> asyncio.Task[None]: ...


class AttemptHost:
    """The attempts of one process. It opens and closes everything that they share."""

    def __init__(
        self,
        welcome: WorkerSetup,
        emit: Callable[[ToConductor], None],
        suite: Suite | None,
        agent: Agent | None,
        enclose: ResourceWrapper | None = None,
        policy: Policy | None = None,
        critic: CriticFunction | None = None,
    ) -> None:
        config = welcome.config
        self._welcome = welcome
        self._emit = emit
        self._directory = RunDirectory(Path(welcome.directory))
        self._calls: WorkerGateway | None = None  # None: attempts call no model
        if welcome.answers_calls or policy is not None:
            from .worker_gateway import WorkerGateway

            self._calls = WorkerGateway(welcome, self._directory, emit, policy)
        self.fork = config.fork
        self._recorded = self._directory if config.replays is None else RunDirectory(Path(config.replays))
        self._reserve = DiskReserve(self._directory.reserve)
        self._living: dict[int, AttemptState] = {}  # bound: the run's concurrency
        self._tasks: dict[int, asyncio.Task[None]] = {}  # bound: the run's concurrency
        self._stopped: dict[int, AttemptFailure] = {}  # interrupted before their first step; bound: the same
        self.suite = suite or load_suite(config.suite)
        self.agent = agent or find_agent(config.agent, config.agent_options)
        self.spawns_children = takes_attempt(self.agent.act)
        self.groups = WaitingGroups(self.suite.group, lambda attempt: emit(MemberWaiting(attempt=attempt)))
        self.critic = load_critic(critic or config.critic)
        self.limits: Limits = config.limits
        self.salvage_seconds = config.salvaging
        self._close_seconds = config.closing
        self.enclose: ResourceWrapper = enclose or (lambda name, manager: manager)
        self.token = welcome.token
        self.worker = welcome.worker
        self.on_end: Callable[[], None] = lambda: None  # called when an attempt has ended
        self.gateway: Path | None = None
        self.variables: Mapping[str, str] = welcome.variables
        self.agent_env: Mapping[str, str] = welcome.agent_env
        self._scratch = self._directory.sandbox_root(config)
        self._disks = DiskWatch(self._reserve, {self._directory.path, self._scratch})
        self._watch_loss: Callable[[int], Callable[[], AttemptFailure | None]] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AttemptHost]:
        """Open the journal, the sandboxes and the gateway until the block ends."""
        welcome = self._welcome
        async with AsyncExitStack() as stack:
            if self.agent.prepare is not None:
                self.agent.prepare(stack.enter_context(self._make_temporary()))
            self._journal = stack.enter_context(
                VerdictJournal(self._directory, self._reserve, welcome.worker, welcome.token)
            )
            self._suspension = stack.enter_context(SuspensionWatch())
            opened = await stack.enter_async_context(find_kind(welcome.config.sandbox).open(self._site()))
            self.sandboxes = opened.provider
            self._watch_loss = opened.watch_loss
            if self._calls is None:
                yield self
                return
            # The path of a unix socket has at most 108 bytes, so it cannot be in the run directory.
            with self._make_temporary() as directory:
                async with self._calls.open(directory, opened.gateway_address) as self.gateway:
                    if opened.use_service is not None:
                        opened.use_service(self._calls.serve_listener)
                    yield self

    @contextmanager
    def _make_temporary(self) -> Iterator[Path]:
        """Create a directory for temporary files; a later conductor sweeps it if this process is killed."""
        directory = Path(tempfile.mkdtemp(prefix=temporary_prefix(self._welcome.config.id)))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _site(self) -> SandboxSite:
        return SandboxSite(
            config=self._welcome.config,
            directory=self._directory.path,
            scratch=self._scratch,
            path=self._welcome.path,
            programs=tuple(self.agent.paths),
            hidden=tuple(self.suite.hidden),
            provided=self._welcome.provided,
        )

    def start(self, job: AttemptJob, group: TaskStarter) -> None:
        """Start an attempt; `emit` receives its verdict."""
        self._tasks[job.attempt.id] = group.create_task(self._run_job(job))

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        """End an attempt with this failure."""
        if (state := self._living.get(attempt)) is not None:
            state.interrupt(failure)
        elif attempt in self._tasks:  # a task cancelled before its first step would never report
            self._stopped[attempt] = failure

    def score(self, message: ScoreMembers) -> None:
        """Score a group: no other member will come."""
        self.groups.score(message.group, together=message.together)

    def check_disks(self) -> None:
        """Check for a full disk, and interrupt the attempts whose writes failed on it. Called each second."""
        self._disks.look()
        for state in self._living.values():
            if state.found_full:
                state.interrupt(make_interrupt_failure("the run's disk was full"))

    def sample_memory(self) -> None:
        """Record the memory of all sandboxes as it is now."""
        for state in self._living.values():
            state.sample_memory()

    def allow(self, attempt: int, memory: int) -> None:
        """Raise the memory limit of an attempt's sandbox."""
        state = self._living.get(attempt)
        if state is not None and state.sandbox is not None:
            state.sandbox.allow_memory(memory)

    def take(self, message: FetchHeldCall, emit: Callable[[ToConductor], None]) -> None:
        """Send the content of a held call: `emit` receives a `HeldCallContent`."""
        if self._calls is not None:
            self._calls.take(message, emit)

    def answer(self, message: AnswerHeldCall) -> None:
        """Answer a held call; ignore the answer to a call that is no longer held."""
        if self._calls is not None:
            self._calls.answer(message)

    async def follow(self, message: StandingMessage) -> None:
        """Change the run's model, its pause or its settings from now on, for running attempts too."""
        if isinstance(message, PauseWorker):
            self._suspension.pauses.turn(paused=message.paused)
        elif isinstance(message, ChangeWorker):
            self.limits = message.config.limits
        if self._calls is not None:
            await self._calls.follow(message)

    def give_up(self, attempt: int) -> asyncio.Task[None]:
        """Abandon an attempt, even if its code still runs; return its task."""
        self._living.pop(attempt).interrupt(make_interrupt_failure("the attempt exceeded all its limits"))
        return self._tasks.pop(attempt)

    @property
    def memory(self) -> int:
        """Bytes that all sandboxes use together."""
        return sum(state.sandbox.memory for state in self._living.values() if state.sandbox)

    def list_living(self) -> tuple[AttemptStatus, ...]:
        """Return the status of every running attempt."""
        now = asyncio.get_running_loop().time()
        lives = self._living.items()
        return tuple(
            AttemptStatus(
                attempt=a,
                phase=state.phase,
                seconds=now - state.since,
                usage=state.usage,
                memory=state.sandbox.memory if state.sandbox else 0,
                throttled=state.session.throttled if state.session else False,
                disk=state.sandbox.disk if state.sandbox else 0,
                cpu=state.sandbox.cpu_seconds if state.sandbox else 0.0,
            )
            for a, state in lives
        )

    def traffic(self) -> tuple[int, int]:
        """Return the number of model calls received so far, and of calls in progress."""
        return (0, 0) if self._calls is None else self._calls.traffic()

    async def _run_job(self, job: AttemptJob) -> None:
        attempt = job.attempt
        tainted = False
        try:
            try:
                if (stopped := self._stopped.pop(attempt.id, None)) is None:
                    state = self._living[attempt.id] = AttemptState(
                        job, self._make_noter(attempt.id), self._close_seconds, self._suspension.seconds
                    )
                    verdict = await run_attempt(state, self)
                    tainted = state.tainted
                else:
                    verdict = Verdict(attempt=attempt.id, token=self.token, failure=stopped)
            except asyncio.CancelledError:
                failure = make_interrupt_failure("the attempt was stopped before it had begun")
                verdict = Verdict(attempt=attempt.id, token=self.token, failure=failure)
            except Exception as error:  # boundary: a bug of ours must not lose a verdict  # noqa: BLE001
                self._make_noter(attempt.id)("attempt.crashed", traceback.format_exc(limit=-8))
                reason = f"internal error: {type(error).__name__}: {error}"
                failure = make_loss_failure(attempt, reason, own=True)
                verdict = Verdict(attempt=attempt.id, token=self.token, failure=failure)
            self._living.pop(
                attempt.id, None
            )  # first: an attempt with a verdict cannot be interrupted any more
            if attempt.id in self._tasks:  # else it was abandoned, and has its verdict
                await self._report(verdict, tainted)
        finally:
            self._living.pop(attempt.id, None)
            self._stopped.pop(attempt.id, None)
            self._tasks.pop(attempt.id, None)
            self.on_end()

    async def _report(self, verdict: Verdict, tainted: bool) -> None:
        """Write a verdict to the journal and report it.

        If the disk has no space for the journal, the conductor waits for space and commits the verdict.
        """
        try:
            await self._journal.write(verdict)
        except DiskFull as error:
            self._make_noter(verdict.attempt)("journal.full", error.message)
        except HoldwaterError as error:
            self._emit(WorkerBroken(message=error.message))
            return
        self.report_endpoints()
        self._emit(AttemptDone(verdict=verdict, tainted=tainted))

    def report_endpoints(self) -> None:
        """Report the calls of the model's servers, if there are several."""
        if self._calls is not None and (uses := self._calls.report_uses()):
            self._emit(EndpointsUsed(uses=uses))

    def _make_noter(self, attempt: int) -> Callable[[str, str], None]:
        return lambda kind, message: self._emit(EventNoted(kind=kind, message=message, attempt=attempt))

    # The services of an attempt (`attempt_services.AttemptServices`).

    def paths(self, attempt: int, name: str) -> AttemptPaths:
        return AttemptPaths(self._directory, attempt, name)

    def open_log(self, attempt: int) -> SegmentLog:
        return AttemptLog(self._directory, attempt)

    def trajectory(self, attempt: int) -> Iterator[Exchange]:
        return read_exchanges(self._directory, attempt)

    def locate_record(self, attempt: int) -> TrajectoryReference:
        return TrajectoryReference(directory=str(self._directory.path), attempt=attempt)

    def read_nodes(self, attempt: int) -> list[MessageNode]:
        nodes = read_nodes(self._directory, attempt, "inline")
        return [node for node in nodes if node.by not in SCORING_BORROWERS]

    def recording(self, job: AttemptJob) -> ReplyRecording | None:
        if self.gateway is None:
            return None
        replies = EarlierReplies(self._recorded, job.earlier) if job.earlier else None
        sampling = self._welcome.config.sampling
        return replies if self.fork is None else ForkedReplies(self.fork, sampling, job.attempt, replies)

    def describe_drift(self, attempt: int, drifts: Sequence[DriftedCall]) -> str:
        origin = self._recorded if self.fork is None else RunDirectory(self.fork.directory)
        ignored = () if self.fork is None else (*IMPOSED_KEYS, *self._welcome.config.sampling)
        return describe_drift(self._directory, origin, attempt, drifts, ignored)

    def open_session(
        self, attempt: int, log: SegmentLog, limits: Limits, recording: ReplyRecording | None
    ) -> AbstractAsyncContextManager[SessionStatus | None]:
        if self._calls is None:
            return nullcontext(None)
        offer = self._living[attempt].job.offer
        return self._calls.open_session(offer, attempt, log, limits, recording)

    def lend(
        self, session: SessionStatus, by: str, *, limited: bool = True
    ) -> AbstractAsyncContextManager[SessionStatus]:
        """Open a session for the borrower `by`; it writes to the same log and is closed before its lender."""
        assert self._calls is not None
        return self._calls.lend(session, by, limited=limited)

    def model(self, session: SessionStatus | None, network: Network | None) -> Model | None:
        if session is None or self._calls is None:
            return None
        return self._calls.make_model(session, self.sandboxes, network)

    def watch_surroundings(self, attempt: int) -> Callable[[], AttemptFailure | None]:
        full = self._disks.since()
        find_loss = self._watch_loss(attempt) if self._watch_loss is not None else lambda: None
        return lambda: make_disk_failure() if full() else find_loss()
