"""Runs one attempt: set-up, acting, salvage, grading, closing, and exactly one verdict in any case.

`attempt_phases.AttemptRunner` has the phases, `attempt_state.AttemptState` the state, and
`attempt_services.AttemptServices` the services that they use. A member of a group waits for the others before
it closes: see `group.py`.
"""

from __future__ import annotations

import msgspec

from ..core.authoring import SessionStatus
from ..core.errors import RunFailed, SandboxFailed, as_failure
from ..core.failures import make_disk_failure
from ..core.fork_origin import DRIFT
from ..core.policy import grade_counts
from ..core.records import AttemptPhase, Verdict
from ..ledger.durable_files import is_disk_full
from .attempt_phases import AttemptRunner
from .attempt_rules import apply_lease, in_doubt, make_write_error
from .attempt_services import AttemptServices
from .attempt_state import AttemptState
from .logs import open_attempt_log


async def run_attempt(state: AttemptState, services: AttemptServices) -> Verdict:
    """Run the attempt and return its verdict. Every exchange is on disk when this returns."""
    attempt, instance = state.job.attempt, state.instance
    limits = services.limits.with_overrides(instance.limits)
    if state.job.offer is not None:
        limits = limits.with_overrides(state.job.offer.limits)
    limits = apply_lease(limits.scale_by(attempt.scale), state.job)
    paths = services.paths(attempt.id, instance.id)
    log = services.open_log(attempt.id)
    find_cause = services.watch_surroundings(attempt.id)
    runner = AttemptRunner(state, services, limits, paths, log)
    try:
        with open_attempt_log(paths.log) as sink:
            async with state.scope:
                state.failure = await state.run_phase(
                    AttemptPhase.SETUP, lambda: limits.setup, SandboxFailed, runner.set_up
                )
                if state.failure is None:
                    await runner.act()
                if state.ready:
                    await runner.ask_critic(before=True)
                    await runner.judge()
                    await runner.ask_critic(before=False)
                if attempt.group is not None and grade_counts(state.failure, state.grade):
                    await runner.score()
                runner.end()
                cause = find_cause()  # checked before the sandbox frees its disk space
                state.phase = AttemptPhase.CLOSING
        for left in runner.sandbox.leftovers if runner.sandbox else ():
            state.note("sandbox.leftover", left)
        if runner.session is not None and runner.session.drifted:
            await _note_drift(state, services, runner.session)
        if state.child_tracker.dropped:
            state.note(
                "children.dropped", f"the verdict does not list {state.child_tracker.dropped} children"
            )
        await runner.sync()
        cause = cause or find_cause()
        if state.found_full or is_disk_full(sink.error):
            state.failure = make_disk_failure()
        elif cause is not None and in_doubt(state.failure, state.grade):
            state.failure = cause
        elif sink.error is not None:
            state.failure = as_failure(make_write_error(sink.error), RunFailed, state.phase)
    finally:
        log.close()
    return state.make_verdict(services.token, runner.session, log.count, runner.peak)


async def _note_drift(state: AttemptState, services: AttemptServices, session: SessionStatus) -> None:
    """Note where requests differ from the recorded ones; a fork that fails for it says so in its failure."""
    drift = await state.calls.call(services.describe_drift, state.job.attempt.id, session.drifts)
    state.note("replay.drifted", f"{session.drifted} requests differ from the recorded ones: {drift}")
    if state.failure is not None and state.failure.kind == DRIFT:
        message = f"{state.failure.message}: {drift}"
        state.failure = msgspec.structs.replace(state.failure, message=message)
