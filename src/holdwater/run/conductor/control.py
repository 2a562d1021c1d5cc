"""Acts on the requests of users to a running run: pause, stop, settings, single instances, notes.

Each request that changes something is an event in the ledger that names its sender. `control_socket.py`
receives the requests, `core/control.py` defines them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from ...core.config import RunConfig
from ...core.control import (
    EVENT_PREFIX,
    LONGEST_NOTE,
    UNPAUSE_EVENT,
    AddNote,
    CancelInstance,
    ChangeRun,
    ControlReply,
    PauseRun,
    RetryInstance,
    StopConductor,
    UnpauseRun,
)
from ...core.errors import BadInput
from ...core.events import (
    GroupMembership,
    PauseEnded,
    PauseRequested,
    SampleRetried,
    SamplesExpected,
    SampleWithdrawn,
)
from ...core.groups import make_cancel_failure
from ...core.policy import ClosedSample
from ...core.records import AttemptFailure, FailureOrigin
from ...ledger.ledger import Ledger
from ...rollout.process_health import PausableClock
from ...rollout.worker_protocol import PauseWorker
from ..fleet.interface import GovernedFleet
from ..setup.options import parse_changes, replace_settings
from ..setup.resumption import change_settings
from .admission import AttemptAdmission
from .feed import make_opened_event
from .scheduler import AttemptScheduler
from .signals import MOST_SIGNALS, CommandSignals

ChangeRequest = PauseRun | UnpauseRun | StopConductor | ChangeRun | CancelInstance | RetryInstance | AddNote


class ControlledParts(NamedTuple):
    """The parts of a run that requests act on, while it schedules attempts."""

    scheduler: AttemptScheduler
    admission: AttemptAdmission
    fleet: GovernedFleet
    grouped: bool  # the samples of an instance are scored together
    changes: Sequence[Callable[[RunConfig], None]]  # each applies a changed configuration to one part
    note: Callable[[str, str], None]  # records an event, given its kind and message


class ChosenSamples(NamedTuple):
    """The samples that a request names, by their state."""

    instance: int
    name: str
    closed: list[ClosedSample]
    open: list[int]


class RunControl:
    """The requests to one run, one at a time."""

    def __init__(
        self, config: RunConfig, ledger: Ledger, clock: PausableClock, signals: CommandSignals
    ) -> None:
        self._config = config
        self._ledger = ledger
        self.clock = clock
        self.signals = signals
        self._parts: ControlledParts | None = None
        self._over = False  # no attempt will be scheduled any more
        self._turn = asyncio.Lock()

    @contextmanager
    def attach(self, parts: ControlledParts) -> Iterator[None]:
        """Act on these parts in this block; a pause that was requested before begins for them now."""
        self._parts = parts
        if self.clock.paused:
            self._hold(parts)
        try:
            yield
        finally:
            self._parts, self._over = None, True

    async def tell_earlier_pause(self, say: Callable[[str], None]) -> None:
        """Report a pause that an earlier conductor did not end: the run continues unpaused."""
        if await self._ledger.was_paused():
            why = "the run was paused when its last conductor ended: it continues unpaused"
            await self._ledger.note(UNPAUSE_EVENT, why)
            say(f"note: {why}\n")

    def drain(self) -> None:
        """Handle the first signal. A pause ends: the running attempts could not finish otherwise."""
        assert self._parts is not None
        scheduler = self._parts.scheduler
        if self.clock.paused:
            self._release()
            self._parts.note(UNPAUSE_EVENT, "the run is stopping")
        scheduler.drain()

    async def answer(self, request: ChangeRequest, by: str) -> ControlReply:
        """Carry out a request of the sender `by`; raise `BadInput` if that is not possible."""
        async with self._turn:
            match request:
                case PauseRun():
                    return await self._pause(by)
                case UnpauseRun():
                    return await self._unpause(by)
                case StopConductor(now=now):
                    return await self._stop(by, now=now)
                case ChangeRun(settings=settings):
                    return await self._change(settings, by)
                case CancelInstance():
                    return await self._cancel(request, by)
                case RetryInstance():
                    return await self._retry(request, by)
                case AddNote(text=text):
                    return await self._add_note(text, by)

    # The whole run.

    async def _pause(self, by: str) -> ControlReply:
        self._refuse_stopping()
        if self.clock.paused:
            return ControlReply(done="the run is paused already", changed=False)
        self.clock.turn(paused=True)
        if self._parts is not None:
            self._hold(self._parts)
        await self._note("pause", by)
        return ControlReply(done="the run is paused: no attempt starts, and new model calls are held")

    async def _unpause(self, by: str) -> ControlReply:
        if not self.clock.paused:
            return ControlReply(done="the run is not paused", changed=False)
        self._release()
        await self._note("unpause", by)
        return ControlReply(done="the run continues")

    def _hold(self, parts: ControlledParts) -> None:
        parts.admission.pause()
        parts.fleet.announce(PauseWorker(paused=True))
        parts.scheduler.handle(PauseRequested())

    def _release(self) -> None:
        self.clock.turn(paused=False)
        if self._parts is not None:
            self._parts.admission.unpause()
            self._parts.fleet.announce(PauseWorker(paused=False))
            self._parts.scheduler.handle(PauseEnded())

    async def _stop(self, by: str, *, now: bool) -> ControlReply:
        if self.signals.count >= MOST_SIGNALS:
            return ControlReply(done="the run is ending already", changed=False)
        at_once = now or self.signals.count > 0
        await self._note("stop", f"{by}: at once" if at_once else by)
        running = self._parts.scheduler.running if self._parts is not None else 0
        self.signals.request_stop(now=at_once)
        if at_once:
            return ControlReply(done="the run ends at once")
        grace = f"{running} running attempts get {self._config.grace:g} s"
        return ControlReply(done=f"the run is stopping: {grace}; the second time it ends at once")

    async def _change(self, settings: dict[str, str], by: str) -> ControlReply:
        parts = self._require_parts()
        if self._config.recipe is not None:
            raise BadInput("the settings of a running image build cannot be changed")
        if not settings:
            raise BadInput("no setting was given", "for example `concurrency=40` or `memory=16GiB`")
        options = parse_changes(settings)
        changed = replace_settings(self._config, options)
        record = replace_settings(self._ledger.directory.read_config(), options)
        sentences = await change_settings(self._ledger, record, f"{EVENT_PREFIX}set", f"{by}: ")
        self._config = changed
        for apply in parts.changes:
            apply(changed)
        if not sentences:
            return ControlReply(done="the run has these settings already", changed=False)
        return ControlReply(done="; ".join(sentences))

    async def _add_note(self, text: str, by: str) -> ControlReply:
        if not text.strip():
            raise BadInput("the note is empty")
        if len(text) > LONGEST_NOTE:
            raise BadInput(f"the note has {len(text)} characters: at most {LONGEST_NOTE} are allowed")
        await self._note("note", f"{by}: {text}")
        return ControlReply(done="the note is in the ledger")

    # Single instances.

    async def _cancel(self, request: CancelInstance, by: str) -> ControlReply:
        scheduler, chosen = self._require_parts().scheduler, await self._choose(request)
        if not chosen.open:
            kinds = ", ".join(sorted({closed.kind for closed in chosen.closed}))
            hint = f"`holdwater retry {self._ledger.directory.path} {chosen.name}` gives it another round"
            raise BadInput(f"`{chosen.name}` has ended already: {kinds}", hint)
        attempt = find_attempt(scheduler, chosen)
        failure = make_cancel_failure("asked", f"cancelled {by}")
        for sample in chosen.open:
            event = SampleWithdrawn(instance=chosen.instance, sample=sample, failure=failure)
            scheduler.handle(event)
        await self._note("cancel", f"{by}: {self._name_samples(chosen.name, chosen.open)}", attempt)
        return ControlReply(done=f"cancelled: {self._name_samples(chosen.name, chosen.open)}")

    async def _retry(self, request: RetryInstance, by: str) -> ControlReply:
        self._refuse_stopping()
        parts = self._require_parts()
        parts.scheduler.handle(SamplesExpected(count=1))  # the run does not end meanwhile
        try:
            chosen = await self._choose(request)
            attempt = find_attempt(parts.scheduler, chosen)
            again = await self._reopen(parts, chosen) + await self._begin_rounds(parts, chosen, by)
        finally:
            parts.scheduler.handle(SamplesExpected(count=-1))
        if not again:
            waits = f"{self._name_samples(chosen.name, chosen.open)} waits for its turn"
            return ControlReply(done=waits, changed=False)
        await self._note("retry", f"{by}: {self._name_samples(chosen.name, again)}", attempt)
        return ControlReply(done=f"tried again in another round: {self._name_samples(chosen.name, again)}")

    async def _reopen(self, parts: ControlledParts, chosen: ChosenSamples) -> list[int]:
        """Open the chosen closed samples again; return them."""
        plan, samples = parts.scheduler.plan, range(self._config.samples)
        if parts.grouped and chosen.closed and any(plan.find_sample(chosen.instance, s) for s in samples):
            raise BadInput(
                f"the other samples of `{chosen.name}` are still running, and all are scored together",
                "try it again when they have ended",
            )
        await self._ledger.reopen_samples(chosen.closed)
        for closed in chosen.closed:
            await self._open_early(parts, chosen.instance, closed.sample, len(chosen.closed))
        return [closed.sample for closed in chosen.closed]

    async def _begin_rounds(self, parts: ControlledParts, chosen: ChosenSamples, by: str) -> list[int]:
        """Give the chosen open samples with a running attempt another round; return them."""
        failure = AttemptFailure(
            where=FailureOrigin.INTERRUPTED, kind="retried", message=f"tried again in another round {by}"
        )
        again: list[int] = []
        for sample in chosen.open:
            standing = parts.scheduler.plan.find_sample(chosen.instance, sample)
            if standing is not None and standing.withdrawn is not None:
                raise BadInput(f"`{chosen.name}` is being cancelled", "try it again when it has ended")
            attempt = standing.running if standing is not None else None
            waits = attempt is not None and parts.admission.is_waiting(attempt.id)
            if standing is None or standing.anew or waits:
                continue
            event = SampleRetried(instance=chosen.instance, sample=sample, failure=failure)
            parts.scheduler.handle(event)
            if attempt is not None:
                key, following = (chosen.instance, sample), standing.spent.round + 1
                await self._ledger.mark_round(key, attempt.number, following, time.time())
                again.append(sample)
        return again

    async def _choose(self, request: CancelInstance | RetryInstance) -> ChosenSamples:
        """Find the samples of a request. Open ones that the feed has not yielded yet are opened now."""
        parts, config = self._require_parts(), self._config
        if config.serving is not None:
            hint = "its client cancels an order and sends another one: see `holdwater help serving`"
            raise BadInput("the rollouts of a server belong to its clients", hint)
        if config.recipe is not None or self._ledger.regrade is not None:
            what = "an image build" if config.recipe is not None else "a regrade"
            raise BadInput(f"single instances of {what} cannot be cancelled or retried")
        known = await self._ledger.find_known(request.instance)
        if known is None:
            hint = "the suite may not have yielded it yet"
            raise BadInput(f"no such instance in the run so far: `{request.instance[:200]}`", hint)
        if request.sample is not None and not 0 <= request.sample < config.samples:
            raise BadInput(f"`--sample` must be from 0 to {config.samples - 1}: {request.sample}")
        samples = range(config.samples) if request.sample is None else (request.sample,)
        plan = parts.scheduler.plan
        unopened = {sample for sample in samples if plan.find_sample(known.id, sample) is None}
        # After this step of the loop, every sample that is being closed is in the queue of the ledger.
        await asyncio.sleep(0)
        closed = {found.sample: found for found in await self._ledger.list_closed(known.id)}
        left = config.samples - len(closed)
        for sample in unopened - closed.keys():
            await self._open_early(parts, known.id, sample, left)
        chosen = [found for sample, found in closed.items() if sample in samples]
        return ChosenSamples(known.id, known.name, chosen, [s for s in samples if s not in closed])

    async def _open_early(self, parts: ControlledParts, instance: int, sample: int, members: int) -> None:
        """Open a sample that the feed has not yielded; its group has so many open members."""
        standing = await self._ledger.read_sample(instance, sample)
        event = make_opened_event(standing)
        if parts.grouped:
            group = GroupMembership(group=instance, size=members, scored=standing.scored)
            event = msgspec.structs.replace(event, group=group)
        parts.scheduler.open_samples([event], early=True)

    # What all requests need.

    def _refuse_stopping(self) -> None:
        scheduler = self._parts.scheduler if self._parts is not None else None
        ending = self._over or (scheduler is not None and (scheduler.draining or scheduler.plan.finished))
        if self.signals.count or ending:
            again = f"`holdwater resume {self._ledger.directory.path}`"
            again = "the same `holdwater serve`" if self._config.serving is not None else again
            raise BadInput(
                "the run is stopping: it starts no further attempt", f"{again} continues it afterwards"
            )

    def _require_parts(self) -> ControlledParts:
        if self._parts is None or not self._parts.scheduler.started.is_set():
            raise BadInput(
                "the run does not schedule attempts now: it is starting or ending",
                "try again in a moment; `pause`, `stop` and `note` work at any time",
            )
        return self._parts

    def _name_samples(self, name: str, samples: Sequence[int]) -> str:
        if self._config.samples == 1:
            return f"`{name}`"
        return f"`{name}`, sample{'s' * (len(samples) > 1)} {', '.join(map(str, samples))}"

    async def _note(self, verb: str, message: str, attempt: int | None = None) -> None:
        await self._ledger.note(f"{EVENT_PREFIX}{verb}", message, attempt)


def find_attempt(scheduler: AttemptScheduler, chosen: ChosenSamples) -> int | None:
    """Return the running attempt of the first chosen sample that has one."""
    found = (scheduler.plan.find_sample(chosen.instance, sample) for sample in chosen.open)
    return next((sample.running.id for sample in found if sample and sample.running), None)
