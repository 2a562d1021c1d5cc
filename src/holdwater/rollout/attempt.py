"""Runs one attempt: set-up, acting, salvage, grading, closing, and exactly one verdict in any case.

`attempt_phases.AttemptRunner` has the phases, `attempt_state.AttemptState` the state, and
`attempt_services.AttemptServices` the services that they use. A member of a group waits for the others before
it closes: see `group.py`.
"""

from __future__ import annotations

from ..core.errors import RunFailed, SandboxFailed, as_failure
from ..core.failures import make_disk_failure
from ..core.policy import grade_counts
from ..core.records import AttemptPhase, Verdict
from ..ledger.durable_files import is_disk_full
from .attempt_phases import AttemptRunner
from .attempt_rules import apply_lease, in_doubt, make_write_error
from .attempt_services import AttemptServices
from .attempt_state import AttemptState
from .logs import open_attempt_log


async def run_attempt(life: AttemptState, place: AttemptServices) -> Verdict:
    """Run the attempt and return its verdict. Every exchange is on disk when this returns."""
    attempt, instance = life.job.attempt, life.instance
    limits = place.limits.with_overrides(instance.limits)
    if life.job.offer is not None:
        limits = limits.with_overrides(life.job.offer.limits)
    limits = apply_lease(limits.scale_by(attempt.scale), life.job)
    paths = place.paths(attempt.id, instance.id)
    log = place.open_log(attempt.id)
    befallen = place.watch_surroundings()
    work = AttemptRunner(life, place, limits, paths, log)
    try:
        with open_attempt_log(paths.log) as sink:
            async with life.scope:
                life.failure = await life.run_phase(
                    AttemptPhase.SETUP, lambda: limits.setup, SandboxFailed, work.set_up
                )
                if life.failure is None:
                    await work.act()
                if life.ready:
                    await work.ask_critic(before=True)
                    await work.judge()
                    await work.ask_critic(before=False)
                if attempt.group is not None and grade_counts(life.failure, life.grade):
                    await work.score()
                work.end()
                cause = befallen()  # checked before the sandbox frees its disk space
                life.phase = AttemptPhase.CLOSING
        for left in work.sandbox.leftovers if work.sandbox else ():
            life.note("sandbox.leftover", left)
        if work.session is not None and work.session.drifted:
            drift = await life.calls.call(place.describe_drift, attempt.id, work.session.drifts)
            life.note(
                "replay.drifted", f"{work.session.drifted} requests differ from the recorded ones: {drift}"
            )
        if life.child_tracker.dropped:
            life.note("children.dropped", f"the verdict does not list {life.child_tracker.dropped} children")
        await work.sync()
        cause = cause or befallen()
        if life.found_full or is_disk_full(sink.error):
            life.failure = make_disk_failure()
        elif cause is not None and in_doubt(life.failure, life.grade):
            life.failure = cause
        elif sink.error is not None:
            life.failure = as_failure(make_write_error(sink.error), RunFailed, life.phase)
    finally:
        log.close()
    return life.make_verdict(place.token, work.session, log.count, work.peak)
