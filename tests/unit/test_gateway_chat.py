"""A stream, however it is cut, gives the client its events and the record the reply."""

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.dialect import chat
from holdwater.testing.reply_formats import WIRES, ScriptedRequest
from holdwater.testing.reply_formats import encode_event as _event
from holdwater.testing.scripted_model import ScriptedReply

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}


def events_of(reply):
    asked = ScriptedRequest(model="m", stream=True, stream_options=None, size=40)
    *events, end = WIRES["chat"].render_events(reply, asked)
    assert end == b"data: [DONE]\n\n"
    return events, WIRES["chat"].render_reply(reply, asked)


def pieces_of(data, cuts):
    bounds = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def assembled(data, cuts=(), wants_usage=False):
    stream = chat.ChatStream(wants_usage)
    passed = b"".join(event for piece in pieces_of(data, cuts) for event in stream.events(piece))
    return stream, passed


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        ScriptedReply,
        text=st.text(max_size=60),
        reasoning=st.text(max_size=20),
        tool_calls=st.lists(
            st.fixed_dictionaries({"name": st.just("bash"), "arguments": st.just({"command": "ls\n"})}),
            max_size=3,
        ),
    ),
    st.lists(st.integers(0, 4000), max_size=20),
    st.booleans(),
)
def test_the_reply_is_put_together_from_its_deltas(reply, cuts, returns):
    events, whole = events_of(reply)
    usage = _event({"id": "x", "choices": [], "usage": USAGE})
    data = b": alive\n\n" + b"".join(events) + usage + b"data: [DONE]\n\n"
    expected = data.replace(usage, b"")
    if returns:
        data, expected = data.replace(b"\n\n", b"\r\n\r\n"), expected.replace(b"\n\n", b"\r\n\r\n")

    stream, passed = assembled(data, cuts)

    assert passed == expected
    assert (stream.done, stream.finished, stream.rest) == (True, True, b"")
    got = json.loads(stream.reply())
    message, wanted = got["choices"][0]["message"], whole["choices"][0]["message"]
    assert (message["content"] or None) == wanted["content"]
    assert message.get("tool_calls") == wanted.get("tool_calls")
    assert message.get("reasoning_content") == wanted.get("reasoning_content")
    assert got["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (stream.usage.input_tokens, stream.usage.cached_tokens, stream.usage.output_tokens) == (7, 5, 3)


def test_usage_that_was_asked_for_is_passed_on():
    data = _event({"choices": [], "usage": USAGE})
    assert assembled(data, wants_usage=True)[1] == data
    assert assembled(data, wants_usage=False)[1] == b""


def test_parallel_calls_and_choices_are_separated_by_index():
    def delta(index, **fields):
        return _event({"choices": [{"index": index, "delta": fields, "finish_reason": None}]})

    def call(index, arguments, **fields):
        return {"index": index, **fields, "function": {"arguments": arguments}}

    data = b"".join(
        [
            delta(1, tool_calls=[call(1, '{"b"', id="two"), call(0, "{", id="one")]),
            delta(0, content="hel"),
            delta(1, tool_calls=[call(0, "}"), call(1, ":1}")]),
            delta(0, content="lo", custom="x"),
            delta(0, custom="y"),
        ]
    )
    choices = json.loads(assembled(data)[0].reply())["choices"]
    assert (choices[0]["message"]["content"], choices[0]["message"]["custom"]) == ("hello", "xy")
    calls = choices[1]["message"]["tool_calls"]
    assert [(c["id"], c["function"]["arguments"]) for c in calls] == [("one", "{}"), ("two", '{"b":1}')]


def test_an_error_inside_a_stream_is_seen_and_passed_on():
    data = _event({"error": {"message": "overloaded"}})
    stream, passed = assembled(data)
    assert (stream.error, stream.ended, passed) == ({"message": "overloaded"}, True, data)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_pass_through_without_a_crash(noise):
    data = b"data: " + noise + b"\n\n"
    stream, passed = assembled(data)
    assert passed + stream.rest == data or stream.usage is not None
    stream.reply()
