"""The planner: events in, commands out. It decides what runs next and when a sample is closed.

Pure and O(open samples): nothing here waits, reads a clock or holds a finished instance. It can be rebuilt
from its own bounded log (`Plan.replayed`). `policy.py` says what follows from a verdict; `run/scheduler.py`
carries the commands out.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from .events import (
    Abort,
    AnyCommand,
    AnyEvent,
    Close,
    Disband,
    Drain,
    End,
    Exhausted,
    Finish,
    Interrupt,
    Joined,
    Opened,
    Preempt,
    Pull,
    Rally,
    Refuse,
    Replace,
    Settled,
    Start,
    Wake,
    Withdrawn,
    Woke,
)
from .failures import CRASHED, DAEMON, DISK, POISON
from .groups import THERE, Group, Standing, cut, straggled
from .policy import Next, Policy, Result, Spent, decide, rank
from .records import Attempt, Failure, Outcome, Where
from .state import CUT, WHOLE, Key, Sample, State, outcome_of

LOG_BOUND = 4096
EARLY = 0.05  # seconds before its time that a timer may fire; earlier, it belongs to another `Wake`


class Plan:
    """One run's planner."""

    def __init__(self, policy: Policy, next_attempt: int = 1) -> None:
        self._restore(State(policy=policy, next_attempt=next_attempt))
        self._checkpoint = self._snapshot()

    def handle(self, event: AnyEvent, at: float) -> list[AnyCommand]:
        """Take in one event; the commands that follow from it, in order."""
        if len(self._log) >= LOG_BOUND:
            self._checkpoint = self._snapshot()
            self._log.clear()
        self._log.append((at, event))
        commands = self._react(event, at)
        self._advance(at, commands)
        return commands

    def replayed(self) -> Plan:
        """The same planner, rebuilt from its last checkpoint and the events since."""
        twin = Plan.__new__(Plan)
        twin._restore(msgspec.msgpack.decode(self._checkpoint, type=State))
        twin._checkpoint = self._checkpoint
        for at, event in self._log:
            twin.handle(event, at)
        return twin

    @property
    def running(self) -> int:
        return len(self._state.running)

    @property
    def waiting(self) -> dict[str, int]:
        """Why the samples that do not run are waiting."""
        counts = {
            "slot": sum(map(self._state.places, self._ready)),
            "a worker of its own": sum(map(self._state.places, self._alone)),
            "back-off": sum(1 for _, key in self._state.delayed if key[1] != CUT),
        }
        return {why: count for why, count in counts.items() if count}

    @property
    def open(self) -> int:
        return len(self._state.open)

    @property
    def draining(self) -> bool:
        return self._state.draining

    @property
    def complete(self) -> bool:
        """Whether every sample there is has been closed."""
        return self._state.exhausted and not self._state.open

    # What each event does to the sample that it names.

    def _react(self, event: AnyEvent, at: float) -> list[AnyCommand]:
        state = self._state
        match event:
            case Opened():
                return self._opened(event, at)
            case Exhausted():
                state.exhausted, state.pulling = True, 0
            case Settled(result=result):
                return self._settled(result, at)
            case Withdrawn():
                return self._withdraw((event.instance, event.sample), event.failure)
            case Joined(attempt=attempt):
                return self._joined(attempt, at)
            case Preempt(attempt=attempt):
                return self._preempt(attempt)
            case Woke():
                if state.wake_at is not None and at >= state.wake_at - EARLY:
                    state.wake_at = None
            case Drain():
                state.draining = True
            case Abort():
                state.draining = state.aborted = True
                return [Interrupt(attempt=attempt) for attempt in state.running]
        return []

    def _opened(self, event: Opened, at: float) -> list[AnyCommand]:
        state = self._state
        state.pulling = max(0, state.pulling - 1)
        key = (event.instance, event.sample)
        if key in state.open:
            return []
        sample = state.open[key] = Sample(
            instance=event.instance,
            sample=event.sample,
            number=event.number,
            spent=Spent(event.round, event.retries, event.scale, event.first),
            losses=event.losses,
            crashes=event.crashes,
            best=event.best,
            regrades=event.regrades,
        )
        if event.group is not None:
            sample.group = event.group.group
            group = state.groups.get(sample.group) or event.group.opened(event.instance)
            state.groups[group.id] = group
            group.enlist(event.sample)
        if event.last is not None:
            return self._judged(key, sample, event.last, at)
        self._queue(key, first=False)
        return []

    def _settled(self, result: Result, at: float) -> list[AnyCommand]:
        key = self._state.running.pop(result.attempt, None)
        if key is None:
            return []
        sample = self._state.open[key]
        sample.running = None
        if result.where is Where.RUN:
            return self._react(Abort(), at)
        lost = result.where is Where.WORKER and result.kind != POISON
        sample.losses += lost
        sample.crashes += lost and result.kind == CRASHED
        spared = sample.losses < self._state.policy.most_losses if lost else result.where is Where.INTERRUPTED
        if not spared:
            return self._judged(key, sample, result, at)
        if (unwanted := self._state.unwanted(sample)) is not None:
            return self._refuse(key, unwanted)
        sample.preemptions += not lost and result.kind not in (DISK, DAEMON)  # neither is a preemption
        sample.regrades = result.work or sample.regrades
        self._queue(key, first=True)
        return []

    def _judged(self, key: Key, sample: Sample, result: Result, at: float) -> list[AnyCommand]:
        """A verdict with blame: another try, or the end of the sample."""
        last = self._state.unwanted(sample) is not None
        following = None if last else decide(result, sample.spent, self._state.policy_for(sample))
        if sample.best is None or rank(result) >= rank(sample.best):
            sample.best = result
        if following is not None:
            if not self._state.policy.regrading:
                sample.regrades = result.work if following.round == sample.spent.round else None
            self._again(key, sample, following, at)
            return []
        del self._state.open[key]
        spent = sample.spent.retries >= self._state.policy.retries or self._state.policy.regrading
        outcome = outcome_of(sample, sample.best, spent=spent)
        return [Close(outcome=outcome), *self._parted(sample, outcome)]

    def _again(self, key: Key, sample: Sample, following: Next, at: float) -> None:
        sample.spent = Spent(following.round, following.retries, following.scale, sample.spent.first)
        if sample.group is not None:
            self._state.groups[sample.group].wait(sample.sample)
        if following.delay:
            heapq.heappush(self._state.delayed, (at + following.delay, key))
        else:
            self._queue(key, first=False)

    def _preempt(self, attempt: int) -> list[AnyCommand]:
        key = self._state.running.get(attempt)
        if key is None or self._state.open[key].preemptions >= self._state.policy.preemptions:
            return []
        group = self._state.group_of(key)
        if group is not None and group.members[key[1]] in THERE:
            return []  # nearly done, and others wait with it
        return [Interrupt(attempt=attempt)]

    # Groups, and what is not wanted any more.

    def _withdraw(self, key: Key, failure: Failure) -> list[AnyCommand]:
        sample = self._state.open.get(key)
        if sample is None or sample.withdrawn is not None:
            return []
        sample.withdrawn = failure
        if sample.running is not None:
            return [End(attempt=sample.running.id, failure=failure)]
        self._unqueue(key)
        group = self._state.group_of(key)
        if group is not None and not group.started:
            sample.group = None
            if not group.dismiss(key[1]):
                self._unqueue((group.id, WHOLE))
                del self._state.groups[group.id]
        return self._refuse(key, failure)

    def _refuse(self, key: Key, failure: Failure) -> list[AnyCommand]:
        return [Refuse(attempt=self._attempt(key, alone=False), failure=failure)]

    def _joined(self, attempt: int, at: float) -> list[AnyCommand]:
        key = self._state.running.get(attempt)
        group = self._state.group_of(key) if key is not None else None
        if key is None or group is None:
            return []
        group.members[key[1]] = Standing.ARRIVED
        if group.reaches_quorum:
            group.cut_at = at + group.terms.patience
            heapq.heappush(self._state.delayed, (group.cut_at, (group.id, CUT)))
        return self._rallied(group)

    def _parted(self, sample: Sample, outcome: Outcome) -> list[AnyCommand]:
        """A member is closed: it is replaced, or its group goes on without it."""
        group = self._state.groups.get(sample.group) if sample.group is not None else None
        if group is None:
            return []
        failed = outcome.kind not in ("passed", "failed") and sample.withdrawn is None
        replaced = failed and group.take_replacement()
        group.close(sample.sample, together=sample.best is not None and sample.best.together)
        if replaced:
            return [Replace(group=group.id, instance=group.instance)]
        if group.over:
            del self._state.groups[group.id]
            return [Disband(group=group.id)]
        self._muster(group)
        return self._rallied(group)

    def _rallied(self, group: Group) -> list[AnyCommand]:
        return [Rally(group=group.id, together=group.rally())] if group.due else []

    def _cut(self, group: Group) -> list[AnyCommand]:
        """Who acts is graded on what it left; who waits for another try is not tried again."""
        group.was_cut = True
        commands: list[AnyCommand] = []
        for sample, standing in list(group.members.items()):
            member = self._state.open.get((group.instance, sample))
            if standing is Standing.RUNNING and member is not None and member.running is not None:
                commands.append(End(attempt=member.running.id, failure=straggled(group.terms)))
            elif standing is Standing.WAITING:
                commands += self._withdraw((group.instance, sample), cut(group.terms))
        return commands

    def _muster(self, group: Group) -> None:
        """A group whose members are all there waits for slots for them all."""
        if group.complete and not group.started and not group.queued and group.places:
            group.queued = True
            (self._alone if self._state.is_suspect(group) else self._ready).append((group.id, WHOLE))

    # What can be started, pulled or finished now.

    def _advance(self, at: float, commands: list[AnyCommand]) -> None:
        state = self._state
        while state.delayed and state.delayed[0][0] <= at:
            when, key = heapq.heappop(state.delayed)
            if key[1] != CUT:
                self._queue(key, first=False)
            elif key[0] in state.groups and state.groups[key[0]].cut_at == when:
                commands += self._cut(state.groups[key[0]])
        if not state.aborted:
            self._start_members(commands)
        if not state.draining:
            self._start(commands)
            self._pull(commands)
        if not state.draining or self._state.unfinished_groups:
            self._wake(commands)
        over = (state.draining and not self._state.unfinished_groups) or (state.exhausted and not state.open)
        if over and not state.running and not state.finished:
            state.finished = True
            commands.append(Finish())

    def _start_members(self, commands: list[AnyCommand]) -> None:
        """Their group has slots for them."""
        while self._members:
            key = self._members.popleft()
            group = self._state.group_of(key)
            alone = group is not None and self._state.is_suspect(group)
            commands.append(Start(attempt=self._attempt(key, alone)))

    def _start(self, commands: list[AnyCommand]) -> None:
        while (queue := self._next_queue()) is not None:
            key, alone = queue.popleft(), queue is self._alone
            if key[1] != WHOLE:
                commands.append(Start(attempt=self._attempt(key, alone)))
                continue
            group = self._state.groups[key[0]]
            group.started = True
            for sample in [s for s, standing in group.members.items() if standing is Standing.WAITING]:
                commands.append(Start(attempt=self._attempt((group.instance, sample), alone)))

    def _next_queue(self) -> deque[Key] | None:
        """Whose first can be started now; nobody passes a group that waits for enough slots."""
        policy = self._state.policy
        free = self._state.free
        suspect = self._alone and self._state.running_alone < policy.alone_at_once
        if suspect and self._state.places(self._alone[0]) <= free:
            return self._alone
        return self._ready if self._ready and self._state.places(self._ready[0]) <= free else None

    def _attempt(self, key: Key, alone: bool) -> Attempt:
        state = self._state
        sample = state.open[key]
        sample.number += 1
        attempt = Attempt(
            id=state.next_attempt,
            instance=sample.instance,
            sample=sample.sample,
            number=sample.number,
            round=sample.spent.round,
            scale=sample.spent.scale,
            alone=alone,
            regrades=sample.regrades,
            group=sample.group,
            crashes=sample.crashes,
        )
        if sample.group is not None:
            state.groups[sample.group].members[sample.sample] = Standing.RUNNING
        state.next_attempt += 1
        state.running[attempt.id] = key
        sample.running = attempt
        return attempt

    def _pull(self, commands: list[AnyCommand]) -> None:
        state = self._state
        if state.exhausted or state.policy.ordered:
            return
        missing = self._state.window - len(state.open) - state.pulling
        starved = not self._ready and not state.pulling
        if missing >= max(1, self._state.window // 8) or (missing > 0 and starved):
            state.pulling += missing
            commands.append(Pull(count=missing))

    def _wake(self, commands: list[AnyCommand]) -> None:
        state = self._state
        if state.delayed and (state.wake_at is None or state.delayed[0][0] < state.wake_at):
            state.wake_at = state.delayed[0][0]
            commands.append(Wake(at=state.wake_at))

    def _queue(self, key: Key, *, first: bool) -> None:
        sample = self._state.open[key]
        if (group := self._state.group_of(key)) is not None:
            group.wait(sample.sample)
            if group.started:
                self._members.append(key)
            else:
                self._muster(group)
            return
        queue = self._alone if sample.losses >= self._state.policy.losses_before_alone else self._ready
        if first:
            queue.appendleft(key)
        else:
            queue.append(key)

    def _unqueue(self, key: Key) -> None:
        for queue in (self._ready, self._alone, self._members):
            if key in queue:
                queue.remove(key)
        self._state.delayed = [entry for entry in self._state.delayed if entry[1] != key]
        heapq.heapify(self._state.delayed)

    # The log.

    def _snapshot(self) -> bytes:
        self._state.ready, self._state.alone = list(self._ready), list(self._alone)
        self._state.members = list(self._members)
        return msgspec.msgpack.encode(self._state)

    def _restore(self, state: State) -> None:
        self._state = state
        self._ready = deque(state.ready)  # bound: as `State.open`
        self._alone = deque(state.alone)  # bound: as `State.open`
        self._members = deque(state.members)  # bound: as `State.open`
        self._log: deque[tuple[float, AnyEvent]] = deque(maxlen=LOG_BOUND)
