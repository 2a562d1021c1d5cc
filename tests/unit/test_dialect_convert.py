"""Requests as Chat Completions, and a `chat.completion` as a reply of every dialect."""

import json

import pytest
from tests.dialect_requests import DIALECTS

from holdwater.dialect import DIALECTS as SPOKEN
from holdwater.dialect import find_dialect
from holdwater.dialect.conversion import ReplyContext
from holdwater.dialect.message import ReplyTokens, ToolCall

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PICTURE = "data:image/png;base64,aGk="
REQUESTS = {
    "responses": {
        "model": "m",
        "instructions": "be exact",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "look"},
                    {"type": "input_image", "image_url": PICTURE},
                ],
            },
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "well"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}],
        "tool_choice": "required",
        "max_output_tokens": 9,
        "temperature": 0.5,
        "stream": True,
        "store": False,
    },
    "messages": {
        "model": "m",
        "system": [{"type": "text", "text": "be exact", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "look"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
                    },
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "well"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}],
            },
        ],
        "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
        "max_tokens": 9,
        "temperature": 0.5,
        "stream": True,
    },
    "gemini": {
        "model": "m",
        "systemInstruction": {"parts": [{"text": "be exact"}]},
        "contents": [
            {
                "role": "user",
                "parts": [
                    {"text": "look"},
                    {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
                ],
            },
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True},
                    {"text": "well"},
                    {"functionCall": {"name": "add", "args": {"a": 1}}},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"result": "2"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "add", "description": "adds", "parameters": SCHEMA}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
        "generationConfig": {"maxOutputTokens": 9, "temperature": 0.5, "stopSequences": ["END"]},
    },
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_the_same_in_chat(name):
    made = SPOKEN[name].request_to_chat(REQUESTS[name])
    call = made["messages"][2]["tool_calls"][0]
    assert made["messages"] == [
        {"role": "system", "content": "be exact"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": PICTURE}},
            ],
        },
        {
            "role": "assistant",
            "content": "well",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": call["id"], "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": call["id"]},
    ]
    function = {"name": "add", "description": "adds", "parameters": SCHEMA}
    options = {"model": "m", "max_tokens": 9, "temperature": 0.5, "tool_choice": "required"}
    beside = {"stop": ["END"]} if name == "gemini" else {"stream": True}
    del made["messages"]
    assert made == {**options, **beside, "tools": [{"type": "function", "function": function}]}


def test_a_plain_text_input_and_a_custom_tool_are_converted():
    asked = {"input": "hello", "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}]}
    made = SPOKEN["responses"].request_to_chat(asked)
    assert made["messages"] == [{"role": "user", "content": "hello"}]
    [patch] = made["tools"]  # only the provider itself can search the web
    assert patch["function"]["name"] == "patch"
    assert patch["function"]["parameters"]["required"] == ["input"]
    completion = {"choices": [{"message": {"tool_calls": [_called("patch", '{"input": "*** a"}', "c9")]}}]}
    [item] = json.loads(
        SPOKEN["responses"].reply_from_chat(completion, ReplyContext("m", frozenset({"patch"})))
    )["output"]
    assert (item["type"], item["call_id"], item["input"]) == ("custom_tool_call", "c9", "*** a")


def _called(name, arguments, id=None):
    return {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **({"id": id} if id else {}),
    }


COMPLETION = {
    "id": "chatcmpl-1",
    "model": "mine",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "let me",
                "reasoning_content": "hm",
                "tool_calls": [_called("add", '{"a": 1}', "c1"), _called("bad", "{not json")],
            },
            "finish_reason": "tool_calls",
            "token_ids": [5, 6, 7],
            "logprobs": {"content": [{"token": "x", "logprob": -0.5}, {"token": "y", "logprob": -1}]},
        }
    ],
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    "policy_version": "p7",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
def test_a_completion_is_a_reply_of_every_dialect(name, stream):
    whole = SPOKEN[name].reply_from_chat(COMPLETION, ReplyContext("m"))
    spoken = SPOKEN[name]
    if stream:
        place = type("P", (), {"path": "v1beta/models/m:x", "query": ""})
        read = spoken.stream(spoken.adapt_request({}, place, None))
        assert b"".join(read.events(b"".join(spoken.render_stream(whole))))
        assert read.ended
        usage, whole = read.usage, read.reply()
    else:
        usage = spoken.read_reply(whole).usage
    reply = find_dialect(name).parse_reply(json.loads(whole))
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (7, 4, 3)
    assert (reply.message.text, reply.message.reasoning, reply.model) == ("let me", "hm", "mine")
    first, second = reply.message.calls
    assert first == ToolCall("add", {"a": 1}, "c1")
    assert second.name == "bad"
    assert "{not json" in json.dumps(second.arguments)
    assert reply.tokens == ReplyTokens((1, 2), (5, 6, 7), (-0.5, -1.0))
    assert json.loads(whole)["policy_version"] == "p7"


ENDS = {
    "responses": ["completed", "max_output_tokens", "content_filter"],
    "messages": ["end_turn", "max_tokens", "refusal"],
    "gemini": ["STOP", "MAX_TOKENS", "SAFETY"],
}


@pytest.mark.parametrize("name", ENDS)
def test_why_it_ended(name):
    finishes = ["stop", "length", "content_filter"]
    replies = [
        SPOKEN[name].reply_from_chat(
            {"choices": [{"message": {"content": "x"}, "finish_reason": finish}]}, ReplyContext()
        )
        for finish in finishes
    ]
    assert [find_dialect(name).parse_reply(json.loads(reply)).finish for reply in replies] == ENDS[name]


def test_without_usage_tokens_are_counted():
    choice = {"message": {"content": "x"}, "token_ids": [1, 2, 3]}
    whole = SPOKEN["messages"].reply_from_chat({"choices": [choice], "prompt_token_ids": [4]}, ReplyContext())
    usage = SPOKEN["messages"].read_reply(whole).usage
    assert (usage.input_tokens, usage.output_tokens) == (1, 3)
