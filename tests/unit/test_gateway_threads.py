"""The main thread of an attempt's calls, as far as it needs no gateway."""

from holdwater.core.records import AttemptFailure, FailureOrigin
from holdwater.gateway.recorder import RequestDelta
from holdwater.gateway.session_calls import MOST_EXCHANGES, MOST_THREADS, CallThreads

FAILED = AttemptFailure(where=FailureOrigin.MODEL, kind="5xx", message="busy")


def delta(messages, parent=None, keep=0):
    return RequestDelta("chat", parent, keep, [b"{}"] * (messages - keep), None, b"", b"", None, b"")


def begin(threads, messages=1, parent=None, keep=0, size=100, has_tools=False):
    return threads.begin(threads.tick(), delta(messages, parent, keep), size, has_tools)


def test_a_retry_that_is_given_up_leaves_the_failure():
    threads = CallThreads()
    first = begin(threads)
    threads.on_written(first, 1)
    threads.end(first, FAILED)

    again = begin(threads, 1, parent=1, keep=1)
    threads.abandon(again)

    assert (threads.failure, threads.unanswered) == (FAILED, FAILED)


def test_a_late_failure_of_an_earlier_request_changes_nothing():
    threads = CallThreads()
    root = begin(threads)
    threads.on_written(root, 1)
    threads.end(root, None)
    slow = begin(threads, 3, parent=1, keep=1)
    quick = begin(threads, 3, parent=1, keep=1)

    threads.end(quick, None)
    threads.end(slow, FAILED)

    assert threads.failure is None


def test_a_compacted_conversation_takes_the_place_of_the_old_one():
    threads = CallThreads()
    number = 0
    for messages in (1, 3, 5):
        call = begin(threads, messages, parent=number or None, keep=max(0, messages - 2), has_tools=True)
        number += 1
        threads.on_written(call, number)
        threads.end(call, None)

    threads.end(begin(threads, 2, parent=number, keep=1, has_tools=True), FAILED)

    assert threads.failure == FAILED


def test_many_threads_and_exchanges_are_kept_within_bounds():
    threads = CallThreads()
    for number in range(MOST_EXCHANGES + 10):
        call = begin(threads)
        threads.on_written(call, number)
        threads.end(call, FAILED)

    assert len(threads._threads) <= MOST_THREADS
    assert len(threads._lost) <= MOST_THREADS
    assert len(threads._written) <= MOST_EXCHANGES
    assert threads.failure == FAILED
