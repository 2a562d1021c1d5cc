"""A stream in any dialect, however it is cut, gives the client its bytes and the record the whole reply."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.dialect import DIALECTS, list_conversations
from holdwater.dialect.interface import AdaptedRequest as Wanted
from holdwater.dialect.interface import RequestTarget
from holdwater.dialect.message import DECODE_ERRORS
from holdwater.testing.reply_formats import WIRES, ScriptedRequest, encode_event
from holdwater.testing.scripted_model import ScriptedReply

SPOKEN = pytest.mark.parametrize("dialect", sorted(list_conversations()))
CALLS = st.fixed_dictionaries({"name": st.just("bash"), "arguments": st.just({"command": "ls\n", "n": 1.5})})
REPLIES = st.builds(
    ScriptedReply,
    text=st.text(max_size=60),
    reasoning=st.text(max_size=20),
    tool_calls=st.lists(CALLS, max_size=3),
    finish=st.sampled_from([None, "length"]),
    cached=st.integers(0, 30),
)


def stream_of(dialect):
    return DIALECTS[dialect].stream(Wanted(RequestTarget("x"), {}))


def fed(dialect, data, cuts=()):
    """The stream after `data` in pieces, and what went on to the client."""
    stream = stream_of(dialect)
    bounds = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    pieces = [data[a:b] for a, b in itertools.pairwise(bounds)]
    return stream, b"".join(event for piece in pieces for event in stream.events(piece))


def timeless(reply):
    return {k: v for k, v in reply.items() if k not in ("created", "created_at")}


def settled(dialect, reply):
    """Without what only tells how a reply was cut into pieces."""
    reply = timeless(json.loads(json.dumps(reply)))
    if dialect == "chat":
        message = reply["choices"][0]["message"]
        message["content"] = message["content"] or None
    return reply


@SPOKEN
@settings(max_examples=40, deadline=None)
@given(REPLIES, st.lists(st.integers(0, 9000), max_size=20), st.booleans())
def test_the_reply_is_put_together_as_if_it_had_come_whole(dialect, reply, cuts, returns):
    asked = ScriptedRequest(model="m", stream=True, size=400)
    events = list(WIRES[dialect].render_events(reply, asked))
    if dialect == "chat":
        usage = {"choices": [], "usage": WIRES["chat"].render_reply(reply, asked)["usage"]}
        events.insert(-1, encode_event(usage))
    data = b": alive\n\n" + b"".join(events)
    data = data.replace(b"\n", b"\r\n") if returns else data

    stream, passed = fed(dialect, data, cuts)

    assert passed == data
    assert (stream.ended, stream.error, stream.rest) == (True, None, b"")
    assert stream.done or dialect == "gemini"
    whole = WIRES[dialect].render_reply(reply, asked)
    assert settled(dialect, json.loads(stream.reply())) == settled(dialect, whole)
    tokens, said = asked.tokens(reply)
    usage = stream.usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (tokens, reply.cached, said)
    assert DIALECTS[dialect].read_reply(stream.reply()).usage == usage


@SPOKEN
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9000))
def test_a_stream_that_is_cut_anywhere_leaves_what_came(dialect, length):
    reply = ScriptedReply(
        text="many words in a row", reasoning="hm", tool_calls=[{"name": "a", "arguments": {"b": 1}}]
    )
    asked = ScriptedRequest(model="m", stream=True, size=400)
    data = b"".join(WIRES[dialect].render_events(reply, asked))
    stream, passed = fed(dialect, data[:length])
    assert passed + stream.rest == data[:length]
    assert stream.error is None
    partial = json.loads(stream.reply())
    if stream.began and not stream.ended:
        assert partial.keys() & {"choices", "output", "content", "candidates"}
    assert json.loads(stream.reply()) == partial, "asking changes nothing"


FIELDS = st.sampled_from(
    [
        *("choices", "index", "delta", "tool_calls", "function", "arguments", "usage", "error", "type"),
        *("message", "response", "item", "output_index", "content_block", "candidates", "content", "parts"),
        *("text", "finishReason", "usageMetadata", "logprobs", "partial_json", "promptFeedback", "id"),
    ]
)
kinds = st.sampled_from(
    [
        *("message_start", "message_delta", "message_stop", "content_block_start", "content_block_delta"),
        *("error", "response.created", "response.completed", "response.failed", "response.output_item.done"),
        *("response.output_item.added", "response.output_text.delta"),
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            FIELDS,
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
typed = st.builds(
    lambda kind, value: {**(value if isinstance(value, dict) else {}), "type": kind}, kinds, json_values
)


@SPOKEN
@settings(max_examples=80, deadline=None)
@given(st.lists(json_values | typed, max_size=6))
def test_no_event_however_shaped_breaks_a_stream(dialect, values):
    data = b"".join(b"data: " + json.dumps(value).encode() + b"\n\n" for value in values)
    stream, _ = fed(dialect, data)
    json.loads(stream.reply())
    assert stream.usage.requests == 1


@SPOKEN
@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200), st.lists(st.integers(0, 250), max_size=4))
def test_any_bytes_pass_through_without_a_crash(dialect, noise, cuts):
    data = b"data: " + noise + b"\n\n" + noise
    stream, passed = fed(dialect, data, cuts)
    assert passed + stream.rest == data
    json.loads(stream.reply())


@SPOKEN
@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_a_reply_or_unreadable(dialect, body):
    try:
        whole = DIALECTS[dialect].read_reply(body)
    except DECODE_ERRORS:
        return
    assert whole.usage.requests == 1


@SPOKEN
def test_an_error_inside_a_stream_is_seen_and_passed_on(dialect):
    failure = WIRES[dialect].render_failure()
    stream, passed = fed(dialect, failure)
    assert (stream.ended, passed) == (True, failure)
    assert "failed inside" in stream.error["message"]
    assert json.loads(stream.reply())["error"] == stream.error


@SPOKEN
def test_an_error_inside_a_whole_reply_is_seen(dialect):
    body = json.dumps(WIRES[dialect].render_error(500, "no")).encode()
    assert DIALECTS[dialect].read_reply(body).error["message"] == "no"


def test_chat_keeps_token_ids_and_logprobs():
    def chunk(**fields):
        return encode_event({"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}, **fields}]})

    data = b"".join(
        [
            encode_event({"id": "x", "prompt_token_ids": [1, 2, 3], "choices": []}),
            chunk(token_ids=[7], logprobs={"content": [{"token": "a", "logprob": -0.5}]}),
            chunk(
                token_ids=[8, 9], logprobs={"content": [{"token": "b", "logprob": -1.5}]}, finish_reason=None
            ),
            chunk(token_ids=[], finish_reason="stop", stop_reason=3),
        ]
    )
    reply = json.loads(fed("chat", data)[0].reply())
    [choice] = reply["choices"]
    assert (reply["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [7, 8, 9])
    assert [part["logprob"] for part in choice["logprobs"]["content"]] == [-0.5, -1.5]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 3)


def test_chat_tells_parallel_calls_without_an_index_apart_by_id():
    def delta(**call):
        return encode_event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]})

    data = delta(id="one", function={"name": "f", "arguments": "{"}) + delta(function={"arguments": "}"})
    data += delta(id="two", function={"name": "g", "arguments": "[]"})
    calls = json.loads(fed("chat", data)[0].reply())["choices"][0]["message"]["tool_calls"]
    assert [(c["id"], c["function"]["arguments"]) for c in calls] == [("one", "{}"), ("two", "[]")]


def test_chat_puts_a_custom_tools_call_together():
    deltas = [
        {"index": 0, "id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Be"}},
        {"index": 0, "custom": {"input": "gin"}},
    ]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]} for delta in deltas]
    stream, _ = fed("chat", b"".join(map(encode_event, chunks)))

    [call] = json.loads(stream.reply())["choices"][0]["message"]["tool_calls"]
    assert call == {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}


def test_gemini_keeps_logprobs_signatures_and_calls_between_texts():
    def chunk(*parts, **fields):
        return encode_event({"candidates": [{"content": {"role": "model", "parts": list(parts)}, **fields}]})

    one, two = ({"logprobsResult": {"chosenCandidates": [{"tokenId": n}]}} for n in (1, 2))
    call = {"functionCall": {"name": "f", "args": {}}, "thoughtSignature": "c2ln"}
    data = (
        chunk({"text": "a"}, **one)
        + chunk({"text": "b"}, call, **two)
        + chunk({"text": "c"}, finishReason="STOP")
    )
    [candidate] = json.loads(fed("gemini", data)[0].reply())["candidates"]
    assert candidate["content"]["parts"] == [{"text": "ab"}, call, {"text": "c"}]
    assert [c["tokenId"] for c in candidate["logprobsResult"]["chosenCandidates"]] == [1, 2]


def test_gemini_reads_a_stream_that_is_one_array():
    reply = ScriptedReply(text="hello there", tool_calls=[{"name": "f"}])
    asked = ScriptedRequest(model="m", size=40)
    chunks = [json.loads(e[6:]) for e in WIRES["gemini"].render_events(reply, asked)]
    whole = DIALECTS["gemini"].read_reply(json.dumps(chunks).encode())
    assert json.loads(whole.reply) == WIRES["gemini"].render_reply(reply, asked)


def test_gemini_counts_thoughts_as_output_and_a_blocked_prompt_as_an_end():
    counts = {
        "promptTokenCount": 5,
        "candidatesTokenCount": 2,
        "thoughtsTokenCount": 40,
        "cachedContentTokenCount": 3,
    }
    stream, _ = fed(
        "gemini", encode_event({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": counts})
    )
    assert (stream.ended, stream.error) == (True, None)
    assert (stream.usage.input_tokens, stream.usage.cached_tokens, stream.usage.output_tokens) == (5, 3, 42)


@pytest.mark.parametrize(
    ("dialect", "reply"),
    [
        ("chat", {"usage": {"completion_tokens": 42, "completion_tokens_details": {"reasoning_tokens": 40}}}),
        ("responses", {"usage": {"output_tokens": 42, "output_tokens_details": {"reasoning_tokens": 40}}}),
        ("messages", {"usage": {"output_tokens": 42, "output_tokens_details": {"thinking_tokens": 40}}}),
        ("gemini", {"usageMetadata": {"candidatesTokenCount": 2, "thoughtsTokenCount": 40}}),
    ],
)
def test_reasoning_tokens_are_counted_apart(dialect, reply):
    usage = DIALECTS[dialect].read_reply(json.dumps(reply).encode()).usage
    assert (usage.output_tokens, usage.reasoning_tokens) == (42, 40)


def test_messages_usage_is_cumulative_and_counts_the_cache_as_input():
    start = {
        "usage": {
            "input_tokens": 5,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 7,
            "output_tokens": 1,
        }
    }
    data = encode_event({"type": "message_start", "message": start})
    data += encode_event(
        {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 20}}
    )
    data += encode_event(
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": 30, "input_tokens": 0},
        }
    )
    usage = fed("messages", data)[0].usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (112, 100, 30)


def test_responses_whose_end_leaves_the_output_out_get_it_from_their_items():
    reply = ScriptedReply(text="hello", tool_calls=[{"name": "f"}])
    asked = ScriptedRequest(model="m", size=40)
    events = [json.loads(e.partition(b"data: ")[2]) for e in WIRES["responses"].render_events(reply, asked)]
    whole = events[-1]["response"]
    events[-1] = {**events[-1], "response": {**whole, "output": []}}
    stream, _ = fed("responses", b"".join(map(encode_event, events)))
    assert json.loads(stream.reply()) == whole


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed"])
def test_each_end_of_a_response_is_one(status):
    response = {
        "id": "r",
        "status": status,
        "output": [],
        "error": {"message": "no"} if status == "failed" else None,
    }
    stream, _ = fed("responses", encode_event({"type": f"response.{status}", "response": response}))
    assert stream.done
    assert (stream.error is not None) == (status == "failed")
    assert json.loads(stream.reply()) == response


@pytest.mark.parametrize(
    ("dialect", "one", "other"),
    [
        ("responses", {"id": "msg_1", "role": "user"}, {"id": "msg_2", "role": "user"}),
        (
            "responses",
            {"type": "function_call_output", "output": "Chunk ID: a1\nWall time: 0.05 seconds\nOutput:\nx"},
            {"type": "function_call_output", "output": "Chunk ID: ff\nWall time: 1.5 seconds\nOutput:\nx"},
        ),
        (
            "gemini",
            {"role": "model", "parts": [{"functionCall": {"id": "ls-1", "name": "ls"}}, {"text": "x"}]},
            {"role": "model", "parts": [{"functionCall": {"id": "ls-2", "name": "ls"}}, {"text": "x"}]},
        ),
    ],
)
def test_what_a_client_makes_up_anew_names_no_other_message(dialect, one, other):
    steady = DIALECTS[dialect].strip_generated

    assert steady(json.dumps(one).encode()) == steady(json.dumps(other).encode())
    changed = json.dumps(other).replace("x", "y").replace("user", "tool").encode()
    assert steady(json.dumps(one).encode()) != steady(changed)


@pytest.mark.parametrize("dialect", ["responses", "gemini"])
@given(message=st.binary(max_size=40) | json_values)
def test_whatever_is_no_message_has_a_name_all_the_same(dialect, message):
    content = (
        message if isinstance(message, bytes) else json.dumps({"id": message, "parts": message}).encode()
    )

    assert isinstance(
        DIALECTS[dialect].strip_generated(content + b'"id"' * isinstance(message, bytes)), bytes
    )
