"""What the errors of each provider mean: the run's failure, an invalid request, or overload that passes."""

import json

import pytest

from holdwater.core.records import FailureOrigin
from holdwater.gateway.upstreams.retry import CircuitBreaker, failure_inside, failure_of, read_delay


def openai(kind, code=None):
    return {"error": {"message": "reason", "type": kind, "code": code}}


def anthropic(kind, message="reason"):
    return {"type": "error", "error": {"type": kind, "message": message}}


def google(code, status, *details):
    return {"error": {"code": code, "message": "reason", "status": status, "details": list(details)}}


@pytest.mark.parametrize(
    ("status", "body", "where", "kind", "again"),
    [
        (429, openai("insufficient_quota", "insufficient_quota"), FailureOrigin.RUN, "quota", False),
        (402, openai("x"), FailureOrigin.RUN, "quota", False),
        (
            400,
            anthropic("invalid_request_error", "Your credit balance is too low"),
            FailureOrigin.RUN,
            "quota",
            False,
        ),
        (
            400,
            google(400, "INVALID_ARGUMENT", {"reason": "API_KEY_INVALID"}),
            FailureOrigin.RUN,
            "key",
            False,
        ),
        (404, google(404, "NOT_FOUND"), FailureOrigin.RUN, "model", False),
        (429, openai("tokens", "rate_limit_exceeded"), FailureOrigin.MODEL, "429", True),
        (429, [google(429, "RESOURCE_EXHAUSTED")], FailureOrigin.MODEL, "429", True),
        (529, anthropic("overloaded_error"), FailureOrigin.MODEL, "5xx", True),
        (503, google(503, "UNAVAILABLE"), FailureOrigin.MODEL, "5xx", True),
        (408, openai("timeout"), FailureOrigin.MODEL, "5xx", True),
        (400, google(400, "INVALID_ARGUMENT"), FailureOrigin.MODEL, "invalid", False),
        (400, anthropic("invalid_request_error"), FailureOrigin.MODEL, "invalid", False),
        (413, anthropic("request_too_large"), FailureOrigin.MODEL, "invalid", False),
        (
            500,
            openai("invalid_request_error", "context_length_exceeded"),
            FailureOrigin.MODEL,
            "invalid",
            False,
        ),
    ],
)
def test_an_error_says_whose_failure_it_is(status, body, where, kind, again):
    failure = failure_of(status, {}, json.dumps(body).encode())
    assert (failure.where, failure.kind, failure.again) == (where, kind, again)


def test_the_delay_requested_by_google_applies_unless_a_header_differs():
    body = json.dumps(google(429, "RESOURCE_EXHAUSTED", {"retryDelay": "34.5s"})).encode()
    assert read_delay({}, body) == 34.5
    assert failure_of(429, {}, body).after == 34.5
    assert read_delay({"Retry-After": "2"}, body) == 2.0
    assert read_delay({}, json.dumps(google(429, "X", {"retryDelay": "soon"}, "odd")).encode()) is None


def test_the_breaker_opens_when_several_attempts_fail_for_a_while_without_success():
    breaker = CircuitBreaker(attempts=3, seconds=30)
    assert not any(
        breaker.record_failure(attempt=1, now=float(now)) for now in range(100)
    )  # one attempt's own affair
    breaker.record_success()
    assert [
        breaker.record_failure(attempt, now) for attempt, now in ((1, 0.0), (2, 1.0), (3, 29.0), (1, 30.0))
    ] == [
        False,
        False,
        False,
        True,
    ]
    breaker.record_success()
    assert not breaker.record_failure(4, 31.0)


@pytest.mark.parametrize(
    ("error", "where", "kind", "again"),
    [
        (openai("insufficient_quota")["error"], FailureOrigin.RUN, "quota", False),
        (anthropic("authentication_error")["error"], FailureOrigin.RUN, "key", False),
        (anthropic("invalid_request_error")["error"], FailureOrigin.MODEL, "invalid", False),
        (anthropic("overloaded_error")["error"], FailureOrigin.MODEL, "error", True),
        (google(503, "UNAVAILABLE")["error"], FailureOrigin.MODEL, "error", True),
        ("just a text", FailureOrigin.MODEL, "error", True),
    ],
)
def test_an_error_inside_a_success_means_what_it_says(error, where, kind, again):
    failure = failure_inside(error)

    assert (failure.where, failure.kind, failure.again) == (where, kind, again)
    assert "contains an error" in failure.message
