"""The failure table, row by row, and what `policy` decides by it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.config import CriticKind, RunConfig
from holdwater.core.errors import (
    AgentFailed,
    BadInput,
    LimitReached,
    ModelFailed,
    ResourceExhausted,
    RunFailed,
    RunInterrupted,
    RunStopped,
    SandboxFailed,
    as_failure,
)
from holdwater.core.events import (
    CloseSample,
    SampleOpened,
    SetTimer,
    StartAttempt,
    TimerFired,
    VerdictCommitted,
)
from holdwater.core.failures import (
    CRASHED,
    POISON,
    RULES,
    ScoreRule,
    make_interrupt_failure,
    make_loss_failure,
)
from holdwater.core.plan import RunPlanner
from holdwater.core.policy import (
    LONGEST_BACKOFF,
    NextTry,
    PlannerPolicy,
    TryCounts,
    VerdictSummary,
    backoff,
    decide,
    exit_status,
    outcome_kind,
    rank,
    satisfies_critic,
    verdict_kind,
)
from holdwater.core.records import (
    Attempt,
    AttemptFailure,
    AttemptPhase,
    FailureOrigin,
    Grade,
    Outcome,
    Salvage,
    Verdict,
)

PATIENT = PlannerPolicy(concurrency=1, attempts=2, retries=2, backoff=0.0)
ATTEMPTS = NextTry(round=2, retries=0, scale=1)
RETRY = NextTry(round=1, retries=1, scale=1)
GROWN = NextTry(round=1, retries=1, scale=2)

# where: the next try at first, and with retries spent; the kind of (a pass, a zero, a zero once spent); exit
TABLE = {
    FailureOrigin.AGENT: (ATTEMPTS, ATTEMPTS, ("passed", "failed", "failed"), 0),
    FailureOrigin.LIMIT: (ATTEMPTS, ATTEMPTS, ("passed", "failed", "failed"), 0),
    FailureOrigin.RESOURCE: (
        GROWN,
        NextTry(round=2, retries=0, scale=8),
        ("passed", "resource", "failed"),
        1,
    ),
    FailureOrigin.MODEL: (RETRY, ATTEMPTS, ("model", "model", "model"), 1),
    FailureOrigin.IMAGE: (RETRY, ATTEMPTS, ("passed", "image", "image"), 1),
    FailureOrigin.SANDBOX: (RETRY, ATTEMPTS, ("passed", "sandbox", "sandbox"), 1),
    FailureOrigin.GRADE: (RETRY, ATTEMPTS, ("passed", "grade", "grade"), 1),
    FailureOrigin.BUDGET: (None, None, ("budget", "budget", "budget"), 1),
    FailureOrigin.CANCELLED: (None, None, ("cancelled", "cancelled", "cancelled"), 0),
    FailureOrigin.RUN: (None, None, ("run", "run", "run"), 4),
}


@pytest.mark.parametrize("where", TABLE)
def test_a_row_of_the_failure_table(where):
    fresh, spent, kinds, status = TABLE[where]
    zero = VerdictSummary(attempt=1, where=where, passed=False, score=0.0)
    good = VerdictSummary(attempt=1, where=where, passed=True, score=1.0)

    assert decide(zero, TryCounts(), PATIENT) == fresh
    largest = 8 if where is FailureOrigin.RESOURCE else 1
    assert decide(zero, TryCounts(retries=2, scale=largest), PATIENT) == spent
    assert decide(zero, TryCounts(round=2, retries=2, scale=largest), PATIENT) is None
    found = outcome_kind(good, spent=False), outcome_kind(zero, spent=False), outcome_kind(zero, spent=True)
    assert found == kinds
    assert exit_status(kinds[2], where) == status


@pytest.mark.parametrize(
    "failure",
    [make_interrupt_failure("a signal"), make_loss_failure(Attempt(1, 1, 0, 1), "killed", own=True)],
)
def test_the_blameless_rows_are_tried_again_for_nothing_and_never_scored(failure):
    plan = RunPlanner(PlannerPolicy(concurrency=1, attempts=1, retries=0))
    plan.handle(SampleOpened(instance=1, sample=0), 0.0)
    for number in range(2, 11):  # one more lost worker closes it
        result = VerdictSummary.of(
            Verdict(attempt=number - 1, token=1, failure=failure, grade=Grade(True, 1.0))
        )
        commands = plan.handle(VerdictCommitted(result=result), 0.0)
        (start,) = [command.attempt for command in commands if isinstance(command, StartAttempt)]
        assert (start.number, start.round, start.scale) == (number, 1, 1)
    assert outcome_kind(result, spent=True) == failure.where
    assert exit_status(failure.where, failure.where) == (
        3 if failure.where is FailureOrigin.INTERRUPTED else 1
    )


def test_every_place_has_a_row():
    assert set(RULES) == set(FailureOrigin) == {*TABLE, FailureOrigin.WORKER, FailureOrigin.INTERRUPTED}


def test_poison_is_not_tried_again():
    first = make_loss_failure(Attempt(9, 1, 0, 3, alone=True), "SIGSEGV", own=True)
    assert (first.where, first.kind, first.again) == (FailureOrigin.WORKER, CRASHED, True)
    alone = make_loss_failure(Attempt(9, 1, 0, 4, alone=True, crashes=1), "SIGSEGV", own=True)

    assert (alone.where, alone.kind, alone.again) == (FailureOrigin.WORKER, POISON, False)
    assert decide(VerdictSummary.of(Verdict(attempt=9, token=1, failure=alone)), TryCounts(), PATIENT) is None


def test_a_sample_without_a_failure_is_retried_only_if_not_passed():
    assert decide(VerdictSummary(attempt=1, passed=True), TryCounts(), PATIENT) is None
    assert decide(VerdictSummary(attempt=1, passed=False), TryCounts(), PATIENT) == ATTEMPTS
    assert decide(VerdictSummary(attempt=1, passed=False), TryCounts(round=2), PATIENT) is None
    assert exit_status("failed", None) == 0


def play(policy: PlannerPolicy, *results: VerdictSummary) -> tuple[list[Attempt], Outcome | None]:
    """The attempts that follow when a sample's attempts end like this; its outcome, if it was closed."""
    plan, now, attempts, outcome = RunPlanner(policy), 0.0, [], None
    commands = plan.handle(SampleOpened(instance=1, sample=0), now)
    upcoming = iter(results)
    while commands:
        following = None
        for command in commands:
            match command:
                case StartAttempt(attempt=attempt):
                    attempts.append(attempt)
                    following = next(upcoming, None)
                case SetTimer(at=at):
                    now = at
                case CloseSample():
                    return attempts, command.outcome
        if following is not None:
            commands = plan.handle(VerdictCommitted(result=following), now)
        elif len(attempts) > len(results):
            break
        else:
            commands = plan.handle(TimerFired(), now)
    return attempts, outcome


def test_a_sample_that_failed_and_then_crashed_gets_a_third_attempt():
    policy = PlannerPolicy(concurrency=1, attempts=3, retries=0)
    failed = VerdictSummary(attempt=1, passed=False, score=0.0)
    crashed = VerdictSummary(attempt=2, where=FailureOrigin.SANDBOX)

    attempts, outcome = play(policy, failed, crashed)

    assert [attempt.round for attempt in attempts] == [1, 2, 3]
    assert outcome is None


def test_a_crash_after_a_failure_does_not_hide_the_score():
    policy = PlannerPolicy(concurrency=1, attempts=2, retries=0)
    failed = VerdictSummary(attempt=1, passed=False, score=0.5)

    _, outcome = play(policy, failed, VerdictSummary(attempt=2, where=FailureOrigin.MODEL))

    assert outcome == Outcome(instance=1, sample=0, attempt=1, kind="failed", score=0.5)


def test_resources_double_up_to_eight_times_and_a_zero_counts_only_then():
    policy = PlannerPolicy(concurrency=1, retries=5)
    killed = [
        VerdictSummary(attempt=n, where=FailureOrigin.RESOURCE, passed=False, score=0.0) for n in range(1, 7)
    ]

    attempts, outcome = play(policy, *killed)

    assert [attempt.scale for attempt in attempts] == [1, 2, 4, 8, 8, 8]
    assert (outcome.kind, outcome.score, outcome.where) == ("failed", 0.0, FailureOrigin.RESOURCE)
    assert exit_status(outcome.kind, outcome.where) == 1


def test_a_salvage_that_passes_closes_the_sample_though_it_was_killed():
    killed = VerdictSummary(attempt=1, where=FailureOrigin.RESOURCE, passed=True, score=1.0)

    attempts, outcome = play(PATIENT, killed)

    assert len(attempts) == 1
    assert (outcome.kind, outcome.score, outcome.where) == ("passed", 1.0, FailureOrigin.RESOURCE)
    assert exit_status(outcome.kind, outcome.where) == 0


def test_what_grew_stays_grown_in_the_next_round_and_retries_begin_anew():
    killed = VerdictSummary(attempt=1, where=FailureOrigin.RESOURCE)
    following = decide(VerdictSummary(attempt=2, passed=False), TryCounts(retries=1, scale=2), PATIENT)

    assert decide(killed, TryCounts(scale=2), PATIENT) == NextTry(round=1, retries=1, scale=4)
    assert following == NextTry(round=2, retries=0, scale=2)


def test_a_request_that_the_provider_calls_invalid_is_not_retried():
    once = PlannerPolicy(concurrency=1, retries=5)
    invalid = VerdictSummary(attempt=1, where=FailureOrigin.MODEL, kind="invalid", again=False)

    attempts, outcome = play(once, invalid)

    assert len(attempts) == 1
    assert (outcome.kind, outcome.score) == ("model", None)
    assert exit_status(outcome.kind, outcome.where) == 1


def test_the_finished_critic_is_satisfied_by_an_end_without_a_failure():
    failed = VerdictSummary(attempt=1, passed=False)
    late = VerdictSummary(attempt=1, where=FailureOrigin.LIMIT, passed=True)

    assert satisfies_critic(failed, CriticKind.FINISHED) and not satisfies_critic(failed, CriticKind.GRADE)
    assert satisfies_critic(late, CriticKind.GRADE) and not satisfies_critic(late, CriticKind.FINISHED)


@given(
    where=st.sampled_from([None, *FailureOrigin]),
    passed=st.sampled_from([True, False, None]),
    patch=st.sampled_from([None, 0, 7]),
    salvaged=st.booleans(),
    enough=st.sampled_from([None, True, False]),
)
def test_what_satisfies_each_critic(where, passed, patch, salvaged, enough):
    verdict = Verdict(
        attempt=1,
        token=1,
        failure=None if where is None else AttemptFailure(where=where, kind="x", message="x"),
        grade=None if passed is None else Grade(passed=passed, score=float(passed)),
        salvage=Salvage(name="x", files=1, bytes=1) if salvaged else None,
        patch=patch,
        critic_satisfied=enough,
    )
    result = VerdictSummary.of(msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict))
    ended_well = where is None
    work = patch == 7 or (patch is None and salvaged)
    # A failure that is nobody's fault satisfies nobody, whatever was left: it has to be tried again.
    scored = where in (None, FailureOrigin.AGENT, FailureOrigin.LIMIT) or (
        passed and RULES[where].scored is not ScoreRule.NO
    )
    expected = {
        "grade": bool(scored and passed),
        "finished": ended_well,
        "finished-with-patch": ended_well and work,
        "patch": bool(scored and work),
        "command:true": bool(scored and enough),
        "suite.py:critic": bool(scored and enough),
    }

    assert {critic: satisfies_critic(result, critic) for critic in expected} == expected


def test_a_run_of_an_earlier_version_keeps_its_critic():
    written = b'{"id":"x","suite":"s","agent":"a","created":1.0,"version":"0","critic":"finished"}'
    config = msgspec.json.decode(written, type=RunConfig)

    assert PlannerPolicy.of(config).critic == CriticKind.FINISHED
    assert msgspec.json.decode(msgspec.json.encode(config), type=RunConfig) == config


@given(attempt=st.integers(1, 10**9), retries=st.integers(0, 5000), after=st.floats(0, 1000))
def test_back_off_doubles_with_bounded_jitter_and_honours_retry_after(attempt, retries, after):
    policy = PlannerPolicy(concurrency=1, backoff=2.0)
    result = VerdictSummary(attempt=attempt, where=FailureOrigin.MODEL)
    doubled = min(2.0 * 2 ** min(retries, 10), LONGEST_BACKOFF)

    delay = backoff(result, retries, policy)

    assert 0.5 * doubled <= delay < 1.5 * doubled
    assert delay == backoff(result, retries, policy)
    told = VerdictSummary(attempt=attempt, where=FailureOrigin.MODEL, after=after)
    assert backoff(told, retries, policy) == max(delay, after)


def test_jitter_spreads_attempts_that_failed_together():
    delays = [backoff(VerdictSummary(attempt=n), 0, PlannerPolicy(concurrency=1)) for n in range(1, 101)]

    tenths = {int((delay - 0.5) * 10) for delay in delays}

    assert tenths == set(range(10))


def test_a_retry_waits_for_its_back_off():
    plan = RunPlanner(PlannerPolicy(concurrency=1, retries=1))
    plan.handle(SampleOpened(instance=1, sample=0), 100.0)
    commands = plan.handle(
        VerdictCommitted(result=VerdictSummary(attempt=1, where=FailureOrigin.MODEL, after=30.0)), 100.0
    )

    assert SetTimer(at=130.0) in commands
    assert not [c for c in plan.handle(TimerFired(), 129.0) if isinstance(c, StartAttempt)]
    assert [c for c in plan.handle(TimerFired(), 130.0) if isinstance(c, StartAttempt)]


def test_rank_prefers_a_pass_then_a_score_then_the_later_one():
    unscored = VerdictSummary(attempt=9, where=FailureOrigin.MODEL, score=0.9)
    zero = VerdictSummary(attempt=8, where=FailureOrigin.AGENT, passed=False, score=0.0)
    half = VerdictSummary(attempt=2, passed=False, score=0.5)
    later = VerdictSummary(attempt=3, passed=False, score=0.5)
    good = VerdictSummary(attempt=1, where=FailureOrigin.GRADE, passed=True, score=0.1)

    ordered = sorted([good, later, half, zero, unscored], key=rank)

    assert ordered == [unscored, zero, half, later, good]


def test_a_verdict_is_counted_by_its_kind():
    killed = AttemptFailure(where=FailureOrigin.RESOURCE, kind="memory", message="killed")

    assert [verdict_kind(None, True), verdict_kind(None, False)] == ["passed", "failed"]
    assert [verdict_kind(killed, True), verdict_kind(killed, False)] == ["passed", "resource"]


def test_a_policy_comes_from_the_configuration():
    config = RunConfig(
        id="r",
        suite="s",
        agent="a",
        created=0.0,
        version="0",
        concurrency=5,
        workers=0,
        attempts=3,
        retries=4,
    )

    policy = PlannerPolicy.of(config)

    assert (policy.concurrency, policy.attempts, policy.retries, policy.alone_at_once) == (5, 3, 4, 1)


def test_an_error_becomes_the_failure_that_it_stands_for():
    busy = as_failure(ModelFailed("busy", "wait", kind="429", after=7.0), AgentFailed, AttemptPhase.ACTING)
    foreign = as_failure(KeyError("x" * 5000), SandboxFailed, AttemptPhase.SETUP)
    places = {type_.where for type_ in (AgentFailed, LimitReached, ResourceExhausted, RunFailed)}

    assert busy == AttemptFailure(
        where=FailureOrigin.MODEL,
        kind="429",
        message="busy",
        hint="wait",
        phase=AttemptPhase.ACTING,
        after=7.0,
    )
    assert (foreign.where, foreign.kind, foreign.phase) == (
        FailureOrigin.SANDBOX,
        "exception",
        AttemptPhase.SETUP,
    )
    assert foreign.message.startswith("KeyError: 'xxx") and len(foreign.message) == 2000
    assert places == {FailureOrigin.AGENT, FailureOrigin.LIMIT, FailureOrigin.RESOURCE, FailureOrigin.RUN}
    assert not as_failure(RunFailed("no key"), AgentFailed, AttemptPhase.ACTING).again


def test_the_errors_that_end_a_command_carry_its_exit_status():
    assert [error.exit_status for error in (BadInput, RunInterrupted, RunStopped)] == [2, 3, 4]


def test_an_attempt_may_grow_eightfold_with_few_retries_but_not_with_none():
    killed = VerdictSummary(attempt=1, where=FailureOrigin.RESOURCE)
    few, none = PlannerPolicy(concurrency=1, retries=1, backoff=0.0), PlannerPolicy(concurrency=1, retries=0)

    assert decide(killed, TryCounts(retries=2, scale=4), few) == NextTry(round=1, retries=3, scale=8)
    assert decide(killed, TryCounts(retries=3, scale=8), few) is None
    assert decide(killed, TryCounts(), none) is None
