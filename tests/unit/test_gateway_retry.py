"""What an upstream's answer means: tried again or not, after how long, and whose failure it is."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from holdwater.core.records import FailureOrigin
from holdwater.gateway.upstreams.retry import LONGEST_BACKOFF, choose_delay, failure_of, parse_retry_after


def error(message="no", code=None):
    return json.dumps({"error": {"message": message, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "code", "where", "kind", "again"),
    [
        (401, None, FailureOrigin.RUN, "key", False),
        (403, None, FailureOrigin.RUN, "key", False),
        (404, None, FailureOrigin.RUN, "model", False),
        (400, "model_not_found", FailureOrigin.RUN, "model", False),
        (400, None, FailureOrigin.MODEL, "invalid", False),
        (422, None, FailureOrigin.MODEL, "invalid", False),
        (429, None, FailureOrigin.MODEL, "429", True),
        (500, None, FailureOrigin.MODEL, "5xx", True),
        (529, None, FailureOrigin.MODEL, "5xx", True),
    ],
)
def test_a_status_says_whose_failure_it_is(status, code, where, kind, again):
    failure = failure_of(status, {}, error("reason", code))
    assert (failure.where, failure.kind, failure.again) == (where, kind, again)
    assert "reason" in failure.message


def test_a_success_is_no_failure():
    assert failure_of(200, {}, b"{}") is None


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "text"}', b'{"error": [1]}', b"\xff"])
def test_any_body_of_an_error_is_understood(body):
    assert "the upstream answered 500" in failure_of(500, {}, body).message


def test_retry_after_is_read_in_both_forms():
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert parse_retry_after({"Retry-After": "2.5"}) == 2.5
    assert 55 < parse_retry_after({"Retry-After": date}) <= 60
    assert parse_retry_after({"Retry-After": "Thu, 01 Jan 1970 00:00:00 GMT"}) == 0.0
    assert parse_retry_after({"Retry-After": "soon"}) is None
    assert parse_retry_after({"Retry-After": "nan"}) is None
    assert parse_retry_after({}) is None


def test_the_delay_is_the_requested_one_or_grows_to_a_bound():
    assert 20 <= choose_delay(1, {"Retry-After": "20"}) <= 21
    assert all(0.25 <= choose_delay(1, {}) <= 0.5 for _ in range(50))
    assert all(LONGEST_BACKOFF / 2 <= choose_delay(30, {}) <= LONGEST_BACKOFF for _ in range(50))
