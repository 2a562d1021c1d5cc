"""The failure table, row by row, and what `policy` decides by it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.config import Critic, RunConfig
from holdwater.core.errors import (
    AgentFailed,
    BadInput,
    Interrupted,
    LimitReached,
    ModelFailed,
    ResourceExhausted,
    RunFailed,
    RunStopped,
    SandboxFailed,
    as_failure,
)
from holdwater.core.events import Close, Opened, Settled, Start, Wake, Woke
from holdwater.core.failures import CRASHED, POISON, RULES, Scored, interrupted, worker_lost
from holdwater.core.plan import Plan
from holdwater.core.policy import (
    LONGEST_BACKOFF,
    Next,
    Policy,
    Result,
    Spent,
    backoff,
    decide,
    exit_status,
    outcome_kind,
    rank,
    satisfied,
    verdict_kind,
)
from holdwater.core.records import Attempt, Failure, Grade, Outcome, Phase, Salvage, Verdict, Where

PATIENT = Policy(concurrency=1, attempts=2, retries=2, backoff=0.0)
ATTEMPTS = Next(round=2, retries=0, scale=1)
RETRY = Next(round=1, retries=1, scale=1)
GROWN = Next(round=1, retries=1, scale=2)

# where: the next try at first, and with retries spent; the kind of (a pass, a zero, a zero once spent); exit
TABLE = {
    Where.AGENT: (ATTEMPTS, ATTEMPTS, ("passed", "failed", "failed"), 0),
    Where.LIMIT: (ATTEMPTS, ATTEMPTS, ("passed", "failed", "failed"), 0),
    Where.RESOURCE: (GROWN, Next(round=2, retries=0, scale=8), ("passed", "resource", "failed"), 1),
    Where.MODEL: (RETRY, ATTEMPTS, ("model", "model", "model"), 1),
    Where.IMAGE: (RETRY, ATTEMPTS, ("passed", "image", "image"), 1),
    Where.SANDBOX: (RETRY, ATTEMPTS, ("passed", "sandbox", "sandbox"), 1),
    Where.GRADE: (RETRY, ATTEMPTS, ("passed", "grade", "grade"), 1),
    Where.BUDGET: (None, None, ("budget", "budget", "budget"), 1),
    Where.CANCELLED: (None, None, ("cancelled", "cancelled", "cancelled"), 0),
    Where.RUN: (None, None, ("run", "run", "run"), 4),
}


@pytest.mark.parametrize("where", TABLE)
def test_a_row_of_the_failure_table(where):
    fresh, spent, kinds, status = TABLE[where]
    zero = Result(attempt=1, where=where, passed=False, score=0.0)
    good = Result(attempt=1, where=where, passed=True, score=1.0)

    assert decide(zero, Spent(), PATIENT) == fresh
    largest = 8 if where is Where.RESOURCE else 1
    assert decide(zero, Spent(retries=2, scale=largest), PATIENT) == spent
    assert decide(zero, Spent(round=2, retries=2, scale=largest), PATIENT) is None
    found = outcome_kind(good, spent=False), outcome_kind(zero, spent=False), outcome_kind(zero, spent=True)
    assert found == kinds
    assert exit_status(kinds[2], where) == status


@pytest.mark.parametrize(
    "failure", [interrupted("a signal"), worker_lost(Attempt(1, 1, 0, 1), "killed", own=True)]
)
def test_the_blameless_rows_are_tried_again_for_nothing_and_never_scored(failure):
    plan = Plan(Policy(concurrency=1, attempts=1, retries=0))
    plan.handle(Opened(instance=1, sample=0), 0.0)
    for number in range(2, 11):  # one more lost worker closes it
        result = Result.of(Verdict(attempt=number - 1, token=1, failure=failure, grade=Grade(True, 1.0)))
        commands = plan.handle(Settled(result=result), 0.0)
        (start,) = [command.attempt for command in commands if isinstance(command, Start)]
        assert (start.number, start.round, start.scale) == (number, 1, 1)
    assert outcome_kind(result, spent=True) == failure.where
    assert exit_status(failure.where, failure.where) == (3 if failure.where is Where.INTERRUPTED else 1)


def test_every_place_has_a_row():
    assert set(RULES) == set(Where) == {*TABLE, Where.WORKER, Where.INTERRUPTED}


def test_poison_is_not_tried_again():
    first = worker_lost(Attempt(9, 1, 0, 3, alone=True), "SIGSEGV", own=True)
    assert (first.where, first.kind, first.again) == (Where.WORKER, CRASHED, True)
    alone = worker_lost(Attempt(9, 1, 0, 4, alone=True, crashes=1), "SIGSEGV", own=True)

    assert (alone.where, alone.kind, alone.again) == (Where.WORKER, POISON, False)
    assert decide(Result.of(Verdict(attempt=9, token=1, failure=alone)), Spent(), PATIENT) is None


def test_a_sample_without_a_failure_is_tried_again_only_if_it_did_not_pass():
    assert decide(Result(attempt=1, passed=True), Spent(), PATIENT) is None
    assert decide(Result(attempt=1, passed=False), Spent(), PATIENT) == ATTEMPTS
    assert decide(Result(attempt=1, passed=False), Spent(round=2), PATIENT) is None
    assert exit_status("failed", None) == 0


def play(policy: Policy, *results: Result) -> tuple[list[Attempt], Outcome | None]:
    """The attempts that follow when a sample's attempts end like this; its outcome, if it was closed."""
    plan, now, attempts, outcome = Plan(policy), 0.0, [], None
    commands = plan.handle(Opened(instance=1, sample=0), now)
    upcoming = iter(results)
    while commands:
        following = None
        for command in commands:
            match command:
                case Start(attempt=attempt):
                    attempts.append(attempt)
                    following = next(upcoming, None)
                case Wake(at=at):
                    now = at
                case Close():
                    return attempts, command.outcome
        if following is not None:
            commands = plan.handle(Settled(result=following), now)
        elif len(attempts) > len(results):
            break
        else:
            commands = plan.handle(Woke(), now)
    return attempts, outcome


def test_failed_in_attempt_1_and_crashed_in_attempt_2_is_tried_in_attempt_3():
    policy = Policy(concurrency=1, attempts=3, retries=0)
    failed = Result(attempt=1, passed=False, score=0.0)
    crashed = Result(attempt=2, where=Where.SANDBOX)

    attempts, outcome = play(policy, failed, crashed)

    assert [attempt.round for attempt in attempts] == [1, 2, 3]
    assert outcome is None


def test_a_crash_after_a_failure_does_not_hide_the_score():
    policy = Policy(concurrency=1, attempts=2, retries=0)
    failed = Result(attempt=1, passed=False, score=0.5)

    _, outcome = play(policy, failed, Result(attempt=2, where=Where.MODEL))

    assert outcome == Outcome(instance=1, sample=0, attempt=1, kind="failed", score=0.5)


def test_resources_double_up_to_eight_times_and_a_zero_counts_only_then():
    policy = Policy(concurrency=1, retries=5)
    killed = [Result(attempt=n, where=Where.RESOURCE, passed=False, score=0.0) for n in range(1, 7)]

    attempts, outcome = play(policy, *killed)

    assert [attempt.scale for attempt in attempts] == [1, 2, 4, 8, 8, 8]
    assert (outcome.kind, outcome.score, outcome.where) == ("failed", 0.0, Where.RESOURCE)
    assert exit_status(outcome.kind, outcome.where) == 1


def test_a_salvage_that_passes_closes_the_sample_though_it_was_killed():
    killed = Result(attempt=1, where=Where.RESOURCE, passed=True, score=1.0)

    attempts, outcome = play(PATIENT, killed)

    assert len(attempts) == 1
    assert (outcome.kind, outcome.score, outcome.where) == ("passed", 1.0, Where.RESOURCE)
    assert exit_status(outcome.kind, outcome.where) == 0


def test_what_grew_stays_grown_in_the_next_round_and_retries_begin_anew():
    killed = Result(attempt=1, where=Where.RESOURCE)
    following = decide(Result(attempt=2, passed=False), Spent(retries=1, scale=2), PATIENT)

    assert decide(killed, Spent(scale=2), PATIENT) == Next(round=1, retries=1, scale=4)
    assert following == Next(round=2, retries=0, scale=2)


def test_a_request_that_the_provider_calls_invalid_is_not_retried():
    once = Policy(concurrency=1, retries=5)
    invalid = Result(attempt=1, where=Where.MODEL, kind="invalid", again=False)

    attempts, outcome = play(once, invalid)

    assert len(attempts) == 1
    assert (outcome.kind, outcome.score) == ("model", None)
    assert exit_status(outcome.kind, outcome.where) == 1


def test_the_finished_critic_is_satisfied_by_an_end_without_a_failure():
    failed = Result(attempt=1, passed=False)
    late = Result(attempt=1, where=Where.LIMIT, passed=True)

    assert satisfied(failed, Critic.FINISHED) and not satisfied(failed, Critic.GRADE)
    assert satisfied(late, Critic.GRADE) and not satisfied(late, Critic.FINISHED)


@given(
    where=st.sampled_from([None, *Where]),
    passed=st.sampled_from([True, False, None]),
    patch=st.sampled_from([None, 0, 7]),
    salvaged=st.booleans(),
    enough=st.sampled_from([None, True, False]),
)
def test_what_satisfies_each_critic(where, passed, patch, salvaged, enough):
    verdict = Verdict(
        attempt=1,
        token=1,
        failure=None if where is None else Failure(where=where, kind="x", message="x"),
        grade=None if passed is None else Grade(passed=passed, score=float(passed)),
        salvage=Salvage(name="x", files=1, bytes=1) if salvaged else None,
        patch=patch,
        enough=enough,
    )
    result = Result.of(msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict))
    ended_well = where is None
    work = patch == 7 or (patch is None and salvaged)
    # A failure that is nobody's fault satisfies nobody, whatever was left: it has to be tried again.
    scored = where in (None, Where.AGENT, Where.LIMIT) or (passed and RULES[where].scored is not Scored.NO)
    expected = {
        "grade": bool(scored and passed),
        "finished": ended_well,
        "finished-with-patch": ended_well and work,
        "patch": bool(scored and work),
        "command:true": bool(scored and enough),
        "suite.py:critic": bool(scored and enough),
    }

    assert {critic: satisfied(result, critic) for critic in expected} == expected


def test_a_run_of_an_earlier_version_keeps_its_critic():
    written = b'{"id":"x","suite":"s","agent":"a","created":1.0,"version":"0","critic":"finished"}'
    config = msgspec.json.decode(written, type=RunConfig)

    assert Policy.of(config).critic == Critic.FINISHED
    assert msgspec.json.decode(msgspec.json.encode(config), type=RunConfig) == config


@given(attempt=st.integers(1, 10**9), retries=st.integers(0, 5000), after=st.floats(0, 1000))
def test_back_off_doubles_with_bounded_jitter_and_honours_retry_after(attempt, retries, after):
    policy = Policy(concurrency=1, backoff=2.0)
    result = Result(attempt=attempt, where=Where.MODEL)
    doubled = min(2.0 * 2 ** min(retries, 10), LONGEST_BACKOFF)

    delay = backoff(result, retries, policy)

    assert 0.5 * doubled <= delay < 1.5 * doubled
    assert delay == backoff(result, retries, policy)
    told = Result(attempt=attempt, where=Where.MODEL, after=after)
    assert backoff(told, retries, policy) == max(delay, after)


def test_jitter_spreads_attempts_that_failed_together():
    delays = [backoff(Result(attempt=n), 0, Policy(concurrency=1)) for n in range(1, 101)]

    tenths = {int((delay - 0.5) * 10) for delay in delays}

    assert tenths == set(range(10))


def test_a_retry_waits_for_its_back_off():
    plan = Plan(Policy(concurrency=1, retries=1))
    plan.handle(Opened(instance=1, sample=0), 100.0)
    commands = plan.handle(Settled(result=Result(attempt=1, where=Where.MODEL, after=30.0)), 100.0)

    assert Wake(at=130.0) in commands
    assert not [c for c in plan.handle(Woke(), 129.0) if isinstance(c, Start)]
    assert [c for c in plan.handle(Woke(), 130.0) if isinstance(c, Start)]


def test_rank_prefers_a_pass_then_a_score_then_the_later_one():
    unscored = Result(attempt=9, where=Where.MODEL, score=0.9)
    zero = Result(attempt=8, where=Where.AGENT, passed=False, score=0.0)
    half = Result(attempt=2, passed=False, score=0.5)
    later = Result(attempt=3, passed=False, score=0.5)
    good = Result(attempt=1, where=Where.GRADE, passed=True, score=0.1)

    ordered = sorted([good, later, half, zero, unscored], key=rank)

    assert ordered == [unscored, zero, half, later, good]


def test_a_verdict_is_counted_by_its_kind():
    killed = Failure(where=Where.RESOURCE, kind="memory", message="killed")

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

    policy = Policy.of(config)

    assert (policy.concurrency, policy.attempts, policy.retries, policy.alone_at_once) == (5, 3, 4, 1)


def test_an_error_becomes_the_failure_that_it_stands_for():
    busy = as_failure(ModelFailed("busy", "wait", kind="429", after=7.0), AgentFailed, Phase.ACTING)
    foreign = as_failure(KeyError("x" * 5000), SandboxFailed, Phase.SETUP)
    places = {type_.where for type_ in (AgentFailed, LimitReached, ResourceExhausted, RunFailed)}

    assert busy == Failure(
        where=Where.MODEL, kind="429", message="busy", hint="wait", phase=Phase.ACTING, after=7.0
    )
    assert (foreign.where, foreign.kind, foreign.phase) == (Where.SANDBOX, "exception", Phase.SETUP)
    assert foreign.message.startswith("KeyError: 'xxx") and len(foreign.message) == 2000
    assert places == {Where.AGENT, Where.LIMIT, Where.RESOURCE, Where.RUN}
    assert not as_failure(RunFailed("no key"), AgentFailed, Phase.ACTING).again


def test_the_errors_that_end_a_command_carry_its_exit_status():
    assert [error.exit_status for error in (BadInput, Interrupted, RunStopped)] == [2, 3, 4]


def test_an_attempt_may_grow_eightfold_however_few_retries_there_are_but_not_with_none():
    killed = Result(attempt=1, where=Where.RESOURCE)
    few, none = Policy(concurrency=1, retries=1, backoff=0.0), Policy(concurrency=1, retries=0)

    assert decide(killed, Spent(retries=2, scale=4), few) == Next(round=1, retries=3, scale=8)
    assert decide(killed, Spent(retries=3, scale=8), few) is None
    assert decide(killed, Spent(), none) is None
