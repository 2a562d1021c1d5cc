"""A whole reply that is told as a stream is read back, by the dialect itself, as the reply that it was."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.dialect import DIALECTS, list_conversations
from holdwater.dialect.interface import AdaptedRequest as Wanted
from holdwater.dialect.interface import RequestTarget
from holdwater.dialect.message import DECODE_ERRORS
from holdwater.testing.reply_formats import WIRES, ScriptedRequest
from holdwater.testing.scripted_model import ScriptedReply

SPOKEN = pytest.mark.parametrize("dialect", sorted(list_conversations()))

text = st.text(max_size=12)
scalars = (
    st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text
)
values = st.recursive(
    scalars | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
unknown = st.dictionaries(text.map("x_{}".format), values.filter(lambda value: value is not None), max_size=2)
tokens = st.integers(0, 999)
notes = st.lists(st.fixed_dictionaries({"type": st.just("note"), "url": text}), max_size=2)


def made(fields, optional=None):
    """Objects with `fields`, some of `optional`, and others that nobody knows."""
    known = st.fixed_dictionaries(fields, optional=optional or {})
    return st.builds(lambda own, others: {**others, **own}, known, unknown)


def numbered(items, field="index"):
    return [{**item, field: n} for n, item in enumerate(items)]


chat_call = made(
    {
        "id": text,
        "type": st.just("function"),
        "function": made({"name": text, "arguments": text}),
    }
)
chat_choice = made(
    {
        "message": made(
            {
                "role": st.just("assistant"),
            },
            {
                "content": st.none()
                | text
                | st.lists(made({"type": st.just("text"), "text": text}), max_size=2),
                "reasoning_content": st.none() | text,
                "refusal": st.none() | text,
                "function_call": made({"name": text, "arguments": text}),
                "tool_calls": st.none() | st.lists(chat_call, max_size=3),
            },
        ),
        "finish_reason": st.sampled_from([None, "stop", "tool_calls"]),
    },
    {
        "logprobs": st.none() | st.fixed_dictionaries({"content": st.none() | st.lists(values, max_size=2)}),
        "token_ids": st.lists(tokens, max_size=4),
        "stop_reason": tokens,
    },
)
chat = made(
    {
        "id": text,
        "object": st.just("chat.completion"),
        "choices": st.lists(chat_choice, max_size=3).map(numbered),
    },
    {
        "prompt_token_ids": st.lists(tokens),
        "usage": made({"prompt_tokens": tokens, "completion_tokens": tokens}),
    },
)

output_text = made(
    {"type": st.just("output_text"), "text": text, "annotations": notes},
    {"logprobs": st.lists(values, max_size=1)},
)
refusal = made({"type": st.just("refusal"), "refusal": text})
spoken_item = made(
    {
        "type": st.just("message"),
        "id": text,
        "status": st.just("completed"),
        "content": st.lists(output_text | refusal | made({"type": text}), max_size=3),
    }
)
thought_item = made(
    {
        "type": st.just("reasoning"),
        "id": text,
        "summary": st.lists(made({"type": st.just("summary_text"), "text": text}), max_size=2),
    },
    {
        "content": st.none() | st.lists(made({"type": st.just("reasoning_text"), "text": text}), max_size=2),
        "encrypted_content": st.none() | text,
    },
)
called_item = made(
    {"type": st.just("function_call"), "id": text, "call_id": text, "name": text, "arguments": text}
) | made({"type": st.just("custom_tool_call"), "call_id": text, "name": text, "input": text})
responses = made(
    {
        "id": text,
        "status": st.sampled_from(["completed", "incomplete"]),
        "error": st.none(),
        "output": st.lists(
            spoken_item | thought_item | called_item | made({"type": text}, {"status": text}), max_size=3
        ),
        "usage": st.none() | made({"input_tokens": tokens, "output_tokens": tokens}),
    },
    {"incomplete_details": values},
)

block = (
    made({"type": st.just("text"), "text": text}, {"citations": st.none() | notes})
    | made({"type": st.just("thinking"), "thinking": text}, {"signature": text})
    | made({"type": st.just("redacted_thinking"), "data": text})
    | made(
        {
            "type": st.sampled_from(["tool_use", "server_tool_use", "mcp_tool_use"]),
            "id": text,
            "name": text,
            "input": st.dictionaries(text, values, max_size=3),
        }
    )
    | made({"type": st.just("web_search_tool_result"), "tool_use_id": text, "content": values})
    | made({"type": text}, {"text": text, "input": values, "signature": text})
)
messages = made(
    {
        "id": text,
        "type": st.just("message"),
        "content": st.lists(block, max_size=4),
        "stop_reason": st.sampled_from(["end_turn", "tool_use", "refusal"]),
        "stop_sequence": st.none() | text,
    },
    {
        "stop_details": values,
        "container": values,
        "context_management": values,
        "usage": made(
            {"input_tokens": tokens, "output_tokens": tokens},
            {"cache_read_input_tokens": tokens, "service_tier": text},
        ),
    },
)


def unmerged(parts):
    """Plain texts of a kind that follow each other are one to the reader."""
    plain = {"text", "thought"}
    kinds = [part.get("thought") if part.keys() <= plain and "text" in part else object() for part in parts]
    return [part for n, part in enumerate(parts) if n == 0 or kinds[n] != kinds[n - 1]]


part = (
    st.fixed_dictionaries({"text": text}, optional={"thought": st.booleans()})
    | made({"text": text, "thoughtSignature": text})
    | made({"functionCall": made({"name": text, "args": st.dictionaries(text, values, max_size=2)})})
)
candidate = made(
    {
        "content": made({"parts": st.lists(part, max_size=4).map(unmerged), "role": st.just("model")}),
        "finishReason": st.sampled_from(["STOP", "MAX_TOKENS"]),
    },
    {"logprobsResult": made({"chosenCandidates": st.lists(values, max_size=2)})},
)
gemini = made(
    {"candidates": st.lists(candidate, min_size=1, max_size=2).map(numbered)},
    {
        "usageMetadata": made({"promptTokenCount": tokens, "candidatesTokenCount": tokens}),
        "modelVersion": text,
    },
)

WHOLE = {"chat": chat, "responses": responses, "messages": messages, "gemini": gemini}
SCRIPTED = st.builds(
    ScriptedReply,
    text=st.text(max_size=60),
    reasoning=st.text(max_size=20),
    tool_calls=st.lists(
        st.fixed_dictionaries({"name": text, "arguments": st.dictionaries(text, values, max_size=2)}),
        max_size=3,
    ),
    finish=st.sampled_from([None, "length"]),
    cached=st.integers(0, 30),
)


def read(dialect, events):
    """The stream after `events`, none of which is kept from the client."""
    stream = DIALECTS[dialect].stream(Wanted(RequestTarget("x"), {}, wants_usage=True))
    assert list(stream.events(b"".join(events))) == events
    assert stream.rest == b""
    return stream


def check(dialect, reply, body):
    """The law: what is told says what was said, and that it ended well."""
    stream = read(dialect, DIALECTS[dialect].render_stream(body))
    assert (stream.error, stream.ended) == (None, True)
    assert stream.done == (dialect != "gemini")
    assert json.loads(stream.reply()) == reply
    assert stream.usage == DIALECTS[dialect].read_reply(body).usage


@SPOKEN
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_reply_is_read_back_unchanged_with_its_unknown_fields(dialect, data):
    reply = data.draw(WHOLE[dialect])
    body = json.dumps(
        reply, indent=data.draw(st.sampled_from([None, 2])), ensure_ascii=data.draw(st.booleans())
    )
    check(dialect, reply, body.encode())


@SPOKEN
@settings(max_examples=50, deadline=None)
@given(SCRIPTED)
def test_what_the_scripted_model_says_whole_is_read_back(dialect, scripted):
    reply = json.loads(json.dumps(WIRES[dialect].render_reply(scripted, ScriptedRequest(model="m", size=40))))
    check(dialect, reply, json.dumps(reply).encode())


@SPOKEN
@settings(max_examples=50, deadline=None)
@given(SCRIPTED)
def test_what_was_put_together_from_a_stream_is_read_back(dialect, scripted):
    asked = ScriptedRequest(model="m", size=40, stream=True)
    body = read(dialect, list(WIRES[dialect].render_events(scripted, asked))).reply()
    check(dialect, json.loads(body), body)


@settings(max_examples=50, deadline=None)
@given(responses)
def test_the_items_of_a_response_are_streamed_before_its_end(reply):
    *before, end = DIALECTS["responses"].render_stream(json.dumps(reply).encode())
    assert json.loads(end.partition(b"data: ")[2])["response"] == reply
    envelope = {**reply, "output": [], "usage": None, "status": "in_progress"}
    begun = envelope if "incomplete_details" not in reply else {**envelope, "incomplete_details": None}
    assert json.loads(read("responses", before).reply()) == {**begun, "output": reply["output"]}


def types_of(events):
    return [json.loads(event.partition(b"data: ")[2])["type"] for event in events]


def test_a_response_is_streamed_in_the_providers_order():
    item = {
        "type": "message",
        "id": "m",
        "content": [{"type": "output_text", "text": "hi", "annotations": [{}]}],
    }
    summary = [{"type": "summary_text", "text": "hm"}]
    call = {"type": "function_call", "id": "f", "name": "add", "arguments": "{}"}
    output = [{"type": "reasoning", "id": "r", "summary": summary}, item, call, {"type": "web_search_call"}]
    events = DIALECTS["responses"].render_stream(
        json.dumps({"status": "incomplete", "output": output}).encode()
    )
    assert types_of(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.annotation.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.output_item.done",
        "response.incomplete",
    ]
    data = [json.loads(event.partition(b"data: ")[2]) for event in events]
    assert [event["item"] for event in data if event["type"] == "response.output_item.added"] == [
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "id": "m", "content": []},
        {**call, "arguments": ""},
        {"type": "web_search_call"},
    ]
    assert [event["part"] for event in data if event["type"].endswith("_part.added")] == [
        {"type": "summary_text", "text": ""},
        {"type": "output_text", "text": "", "annotations": []},
    ]
    assert [event["sequence_number"] for event in data] == list(range(len(events)))
    assert [e.partition(b"\n")[0].decode() for e in events] == [f"event: {event['type']}" for event in data]


def test_blocks_of_a_message_start_empty_and_output_counts_come_last():
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}}
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "text", "text": "hi"},
        use,
    ]
    usage = {"input_tokens": 5, "output_tokens": 7}
    reply = {"type": "message", "content": content, "stop_reason": "end_turn", "usage": usage}
    events = DIALECTS["messages"].render_stream(json.dumps(reply).encode())
    data = [json.loads(event.partition(b"data: ")[2]) for event in events]
    assert data[0]["message"] == {
        **reply,
        "content": [],
        "stop_reason": None,
        "usage": {**usage, "output_tokens": 0},
    }
    assert [event["content_block"] for event in data if event["type"] == "content_block_start"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {**use, "input": {}},
    ]
    assert [event["delta"]["type"] for event in data if event["type"] == "content_block_delta"] == [
        *("thinking_delta", "signature_delta", "text_delta", "input_json_delta")
    ]
    assert data[-2:] == [
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}},
        {"type": "message_stop"},
    ]


def test_choices_start_before_the_first_ends_and_long_lists_appear_once():
    choices = [{"index": n, "message": {"content": "hi"}, "finish_reason": "stop"} for n in range(2)]
    reply = {"id": "x", "prompt_token_ids": [1, 2], "choices": choices, "usage": {"prompt_tokens": 1}}
    *events, end = DIALECTS["chat"].render_stream(json.dumps(reply).encode())
    chunks = [json.loads(event[6:]) for event in events]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
    assert ends == sorted(ends, key=lambda reason: reason is not None)
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [
        True,
        *itertools.repeat(False, len(chunks) - 1),
    ]
    assert {chunk["id"] for chunk in chunks} == {"x"}
    assert (chunks[-1]["choices"], end) == ([], b"data: [DONE]\n\n")


def test_a_null_in_a_providers_body_stays_null():
    message = {"role": "assistant", "content": "hi", "refusal": None, "annotations": []}
    logprobs = {"content": [{"token": "hi", "logprob": -0.5}], "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": "stop"}
    reply = {
        "object": "chat.completion",
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
    }
    stream = read("chat", DIALECTS["chat"].render_stream(json.dumps(reply).encode()))
    assert json.loads(stream.reply()) == reply


@SPOKEN
def test_a_reply_with_an_error_inside_is_streamed_with_it(dialect):
    error = {"message": "overloaded"}
    body = json.dumps({"status": "failed", "error": error}).encode()
    stream = read(dialect, DIALECTS[dialect].render_stream(body))
    assert (stream.error, stream.ended) == (error, True)


objects = st.dictionaries(st.sampled_from(["message", "type", "content", "input"]), values, max_size=3)


@SPOKEN
@settings(max_examples=80, deadline=None)
@given(
    st.binary(max_size=30)
    | st.dictionaries(
        st.sampled_from(["choices", "output", "content", "candidates", "usage", "status", "type", "message"]),
        values | st.lists(objects, max_size=2),
        max_size=3,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_streamed_or_unreadable(dialect, body):
    try:
        events = DIALECTS[dialect].render_stream(body)
    except DECODE_ERRORS:
        return
    assert all(event.endswith(b"\n\n") for event in events)
