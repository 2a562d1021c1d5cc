"""What is known of an attempt while it lives, and the verdict that it comes to. `attempt.py` lives it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import msgspec

from ..core.authoring import Born, KeptSandbox, Session
from ..core.errors import AttemptError, as_failure, let_go
from ..core.failures import DISK, RULES, Scored
from ..core.kept_work import kept_work
from ..core.records import (
    NO_USAGE,
    Child,
    Failure,
    Grade,
    Instance,
    KeptWork,
    Phase,
    Salvage,
    Times,
    Usage,
    Verdict,
    Where,
)
from .calls import Calls
from .disks import Hurt
from .limit import PhaseLimit
from .scope import Note, Scope
from .wire import Job

MOST_KEPT = 256  # children that a verdict tells of


class Brood:
    """The children of an attempt, those of its children included."""

    def __init__(self) -> None:
        self.living = 0
        self.born = 0
        self.ended: deque[Child] = deque(maxlen=MOST_KEPT)

    def begin(self) -> int:
        """A child is born; 1, 2, 3, ..."""
        self.living += 1
        self.born += 1
        return self.born

    def end(self, name: str, born: Born, exchanges: int, seconds: float) -> None:
        self.living -= 1
        failure, usage = born.failure, born.usage
        child = Child(name=name, failure=failure, usage=usage, exchanges=exchanges, seconds=seconds)
        self.ended.append(child)

    @property
    def dropped(self) -> int:
        """How many are not told of."""
        return self.born - self.living - len(self.ended)


class Life:
    """What is known of an attempt while it lives."""

    def __init__(
        self, job: Job, note: Note, closing: float, suspended: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.job = job
        self.instance = msgspec.msgpack.decode(job.payload, type=Instance)
        self.phase = Phase.SETUP
        self.since = asyncio.get_running_loop().time()
        self.calls = Calls(f"attempt-{job.attempt.id}")
        self.scope = Scope(note, closing)
        self.note = note
        self._suspended = suspended  # seconds in which the process did not run
        self.ready = False  # set-up is over: there is something to grade
        self.failure: Failure | None = None
        self.grade: Grade | None = None
        self.answer: Any = None
        work = job.work  # an attempt that grades kept work tells of that work as if it were its own
        self.answer_json: str | None = work.answer if work else None
        self.salvage: Salvage | None = work.salvage if work else None
        self.patch: int | None = work.patch if work else None  # bytes
        self.kept: KeptWork | None = kept_work(work) if work else None
        self.enough: bool | None = None
        self.session: Session | None = None
        self.sandbox: KeptSandbox | None = None
        self.seconds: dict[Phase, float] = {}
        self.hurt = Hurt()
        self.brood = Brood()
        self.together = False  # its grade comes from scoring its group
        self.shared: Calls | None = None  # those of its group's scoring, where it was the last to leave it
        self._task: asyncio.Task[Any] | None = asyncio.current_task()
        self._ending: Failure | None = None

    @property
    def tainted(self) -> bool:
        """Whether something of the attempt still runs in this process."""
        alive = self.calls.alive + (self.shared.alive if self.shared is not None else 0)
        return alive > 0 or self.scope.stuck > 0

    @property
    def usage(self) -> Usage:
        """What its model calls have used so far."""
        return self.session.usage if self.session else Usage()

    @property
    def used_by_agent(self) -> Usage:
        """The same of the agent, also where an earlier attempt's agent did the work."""
        return self.usage if self.job.work is None else self.job.work.usage

    @property
    def acted(self) -> int:
        """The attempt in which the agent acted."""
        return self.job.attempt.regrades or self.job.attempt.id

    @property
    def found_full(self) -> bool:
        """Whether a write of its own failed on a full disk of the run's: it cannot come to a verdict."""
        failures = (self.failure, self.session.failure if self.session else None)
        told = any(f is not None and f.where is Where.RUN and f.kind == DISK for f in failures)
        return told or self.hurt.by_disk

    def interrupt(self, failure: Failure) -> None:
        """End it soon with this failure. One that is scored ends its acting alone: it is graded then."""
        acting = self.job.work is None and self.phase in (Phase.SETUP, Phase.ACTING)
        if RULES[failure.where].scored is Scored.YES and not acting:
            return
        if self._ending is None and self._task is not None and self.phase is not Phase.CLOSING:
            self._ending = failure
            self._task.cancel()

    async def stage(
        self,
        phase: Phase,
        allowed: Callable[[], float] | None,
        otherwise: type[AttemptError],
        work: Callable[[], Awaitable[None]],
    ) -> Failure | None:
        """Do `work` as `phase`, for as long as is `allowed` (None: as long as it takes); how it failed."""
        loop = asyncio.get_running_loop()
        self.phase, self.since = phase, loop.time()
        try:
            async with PhaseLimit(allowed, phase, self._suspended) if allowed is not None else nullcontext():
                await work()
        except asyncio.CancelledError as error:
            if self._ending is None:
                raise
            if self._task is not None:
                self._task.uncancel()
            let_go(error)
            ending = self._ending
            if RULES[ending.where].scored is Scored.YES:
                self._ending = None  # it goes on, to be graded, and may be ended once more
            return ending
        except Exception as error:  # boundary: a bad attempt is data  # noqa: BLE001
            failure = as_failure(error, otherwise, phase)
            let_go(error)
            # Only acting has a limit that is the agent's to keep: elsewhere one must never become a zero.
            late = failure.where is Where.LIMIT and phase is not Phase.ACTING
            return msgspec.structs.replace(failure, where=otherwise.where) if late else failure
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + loop.time() - self.since
        return None

    def verdict(self, token: int, session: Session | None, exchanges: int, peak: int) -> Verdict:
        return Verdict(
            attempt=self.job.attempt.id,
            token=token,
            failure=self.failure,
            grade=self.grade,
            answer=self.answer_json,
            usage=session.usage if session else Usage(),
            times=Times(
                setup=self.seconds.get(Phase.SETUP, 0.0),
                acting=self.seconds.get(Phase.ACTING, 0.0),
                grading=self.seconds.get(Phase.GRADING, 0.0),
                waited=session.waited if session else 0.0,
            ),
            salvage=self.salvage,
            exchanges=exchanges,
            peak_memory=peak,
            saved=session.saved if session else NO_USAGE,
            patch=self.patch,
            enough=self.enough,
            children=tuple(self.brood.ended),
            together=self.together,
            kept=self.kept,
        )
