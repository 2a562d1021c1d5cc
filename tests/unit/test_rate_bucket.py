"""The rate that a run keeps, as arithmetic; and imposed parameters in the words of each dialect."""

import json

from msgspec import Raw

from holdwater.dialect import find_dialect
from holdwater.gateway.call_terms import BURST, RateBucket


def test_a_bucket_gives_at_its_rate_after_its_burst():
    bucket = RateBucket(60, now=0.0)  # one a second
    taken, now = [], 0.0
    for _ in range(10):
        now += bucket.delay(1, now)
        bucket.take(1, now)
        taken.append(round(now, 6))
    assert taken == [0, 0, *range(1, 9)]
    assert BURST == 2


def test_what_was_used_beyond_the_bucket_is_paid_back_first():
    bucket = RateBucket(600, now=0.0)  # ten a second, 20 at once
    bucket.take(120, 0.0)
    assert bucket.delay(1, 0.0) == 10.1
    bucket.give(50)
    assert bucket.delay(1, 5.0) == 0.1
    assert bucket.delay(1e9, 100.0) == 0.0  # more than there can ever be: a full bucket will do


def head(**keys):
    return {key: Raw(json.dumps(value).encode()) for key, value in keys.items()}


def changed(dialect, sampling, **keys):
    return {
        key: json.loads(bytes(raw))
        for key, raw in find_dialect(dialect).impose_sampling(head(**keys), sampling).items()
    }


def test_parameters_are_imposed_in_the_words_of_each_dialect():
    sampling = {"temperature": 0.5, "max_tokens": 9}
    assert changed("chat", sampling, temperature=1, n=2) == {"temperature": 0.5, "max_tokens": 9}
    assert changed("chat", sampling, max_completion_tokens=5) == {
        "temperature": 0.5,
        "max_completion_tokens": 9,
    }
    assert changed("messages", sampling, max_tokens=9) == {"temperature": 0.5}
    assert changed("responses", sampling) == {"temperature": 0.5, "max_output_tokens": 9}
    config = {"topK": 3, "temperature": 1}
    assert changed("gemini", sampling, generationConfig=config) == {
        "generationConfig": {"topK": 3, "temperature": 0.5, "maxOutputTokens": 9}
    }
    assert changed("chat", {}, temperature=1) == {}
