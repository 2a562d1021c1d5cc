"""A conversation that is translated for a server says the same, and so do the options of a request."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.dialect import CHAT, DIALECTS

AGENTS = ("chat", "responses", "messages", "gemini")
TARGETS = ("chat", "messages")
PAIRS = [(agent, target) for agent in AGENTS for target in TARGETS]
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
IMAGE = "iVBORw0KGgo="


class Said(NamedTuple):
    """One message, as it is meant."""

    role: str
    text: str
    image: bool = False
    calls: tuple[tuple[str, Any], ...] = ()
    answers: int = -1  # the number of the answered call in the conversation


class Conversation(NamedTuple):
    system: str
    messages: list[Said]


words = st.text(min_size=1, max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words, lambda v: st.lists(v, max_size=2)
)
arguments = st.dictionaries(words, values, max_size=2)
calls = st.lists(st.tuples(st.sampled_from(["read", "write"]), arguments), max_size=3)


@st.composite
def conversations(draw: Any) -> Conversation:
    said: list[Said] = []
    count = 0
    for _ in range(draw(st.integers(1, 3))):
        said.append(Said("user", draw(words), draw(st.booleans())))
        for called in draw(st.lists(calls.filter(bool), max_size=2)):
            said.append(Said("assistant", draw(words | st.just("")), calls=tuple(called)))
            for number in range(count, count + len(called)):
                said.append(Said("tool", draw(words), draw(st.booleans()), answers=number))
            count += len(called)
        said.append(Said("assistant", draw(words)))
    return Conversation(draw(words), [*said, Said("user", draw(words))])


# How clients of each dialect say it.


class Numbered:
    """Gives the calls of a conversation their ids."""

    def __init__(self) -> None:
        self.count = -1

    def next(self) -> str:
        self.count += 1
        return f"call_id_{self.count}"


def speak_chat(it: Conversation) -> dict[str, Any]:
    numbered, messages = Numbered(), [{"role": "developer", "content": it.system}]
    url = f"data:image/png;base64,{IMAGE}"
    for said in it.messages:
        content: Any = said.text or None
        if said.image:
            content = [{"type": "text", "text": said.text}, {"type": "image_url", "image_url": {"url": url}}]
        message: dict[str, Any] = {"role": said.role, "content": content}
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": numbered.next(),
                    "type": "function",
                    "function": {"name": name, "arguments": encode(value)},
                }
                for name, value in said.calls
            ]
        if said.role == "tool":
            message["tool_call_id"] = f"call_id_{said.answers}"
        messages.append(message)
    return {"messages": messages}


def speak_responses(it: Conversation) -> dict[str, Any]:
    numbered, items = Numbered(), list[dict[str, Any]]()
    image = [{"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"}]
    for said in it.messages:
        kind = "output_text" if said.role == "assistant" else "input_text"
        content = [{"type": kind, "text": said.text}, *(image if said.image else [])]
        if said.role == "tool":
            answers = f"call_id_{said.answers}"
            items.append({"type": "function_call_output", "call_id": answers, "output": content})
        elif said.text:
            items.append({"type": "message", "role": said.role, "content": content})
        for name, value in said.calls:
            call = {"type": "function_call", "call_id": numbered.next(), "name": name}
            items.append({**call, "arguments": encode(value)})
    return {"instructions": it.system, "input": items}


def speak_messages(it: Conversation) -> dict[str, Any]:
    numbered, messages = Numbered(), list[dict[str, Any]]()
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
    for said in it.messages:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": said.text}] if said.text else []
        blocks += [{"type": "image", "source": source}] if said.image else []
        for name, value in said.calls:
            blocks.append({"type": "tool_use", "id": numbered.next(), "name": name, "input": value})
        if said.role == "tool":
            answers = f"call_id_{said.answers}"
            blocks = [{"type": "tool_result", "tool_use_id": answers, "content": blocks}]
        role = "assistant" if said.role == "assistant" else "user"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += blocks
        else:
            messages.append({"role": role, "content": blocks})
    return {"system": [{"type": "text", "text": it.system}], "messages": messages, "max_tokens": 9}


def speak_gemini(it: Conversation) -> dict[str, Any]:
    contents, names = list[dict[str, Any]](), list[str]()
    inline = [{"inlineData": {"mimeType": "image/png", "data": IMAGE}}]
    for said in it.messages:
        parts: list[dict[str, Any]] = [{"text": said.text}] if said.text else []
        if said.role == "tool":
            answer: dict[str, Any] = {"name": names[said.answers], "response": {"output": said.text}}
            parts = [{"functionResponse": {**answer, **({"parts": inline} if said.image else {})}}]
        elif said.image:
            parts += inline
        for name, value in said.calls:
            names.append(name)
            parts.append({"functionCall": {"name": name, "args": value}})
        contents.append({"role": "model" if said.role == "assistant" else "user", "parts": parts})
    return {"systemInstruction": {"parts": [{"text": it.system}]}, "contents": contents}


SPEAKERS = {
    "chat": speak_chat,
    "responses": speak_responses,
    "messages": speak_messages,
    "gemini": speak_gemini,
}


def encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def translate(agent: str, target: str, request: dict[str, Any]) -> dict[str, Any]:
    """The request that the server gets."""
    chat = DIALECTS[agent].request_to_chat(msgspec.json.decode(msgspec.json.encode(request)))
    made = DIALECTS[target].request_from_chat(chat, CHAT.parse_messages(chat["messages"]))
    result: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))
    return result


def read(dialect: str, request: dict[str, Any]) -> Conversation:
    """What a request says."""
    messages = [
        *DIALECTS[dialect].parse_system(request),
        *DIALECTS[dialect].parse_messages(request["messages"]),
    ]
    said: list[Said] = []
    ids: list[str] = []
    for message in messages[1:]:
        images = [part for part in message.parts if not isinstance(part, str)]
        assert all((image.type, image.data) == ("image/png", IMAGE) for image in images)
        ids += [call.id for call in message.calls]
        called = tuple((call.name, call.arguments) for call in message.calls)
        answers = ids.index(message.answers) if message.role == "tool" else -1
        said.append(Said(message.role, message.text, bool(images), called, answers))
    assert len(set(ids)) == len(ids)
    return Conversation(messages[0].text, said)


@pytest.mark.parametrize(("agent", "target"), PAIRS)
@given(it=conversations())
@settings(max_examples=30, deadline=None)
def test_a_translated_conversation_says_the_same(agent: str, target: str, it: Conversation) -> None:
    assert read(target, translate(agent, target, SPEAKERS[agent](it))) == it


@given(it=conversations())
@settings(max_examples=30, deadline=None)
def test_a_conversation_there_and_back_is_the_same(it: Conversation) -> None:
    there = translate("chat", "messages", speak_chat(it))
    assert read("chat", translate("messages", "chat", there)) == it


TOOLS: dict[str, Any] = {
    "chat": {
        "tools": [
            {"type": "function", "function": {"name": "read", "description": "d", "parameters": SCHEMA}}
        ]
    },
    "responses": {"tools": [{"type": "function", "name": "read", "description": "d", "parameters": SCHEMA}]},
    "messages": {"tools": [{"name": "read", "description": "d", "input_schema": SCHEMA}]},
    "gemini": {
        "tools": [
            {"functionDeclarations": [{"name": "read", "description": "d", "parametersJsonSchema": SCHEMA}]}
        ]
    },
}
OPTIONS: dict[str, Any] = {
    "chat": {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 77,
        "stop": ["END"],
        "tool_choice": {"type": "function", "function": {"name": "read"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "response_format": {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}},
    },
    "responses": {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 77,
        "tool_choice": {"type": "function", "name": "read"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "reply", "schema": SCHEMA}},
    },
    "messages": {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 77,
        "stop_sequences": ["END"],
        "tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "gemini": {
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["read"]}},
        "generationConfig": {
            "temperature": 0.5,
            "topP": 0.9,
            "maxOutputTokens": 77,
            "stopSequences": ["END"],
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT", "properties": {"path": {"type": "STRING"}}},
        },
    },
}


@pytest.mark.parametrize(("agent", "target"), PAIRS)
def test_options_mean_the_same(agent: str, target: str) -> None:
    it = Conversation("be exact", [Said("user", "hi")])
    request = translate(agent, target, {**SPEAKERS[agent](it), **TOOLS[agent], **OPTIONS[agent]})
    wanted = {**TOOLS[target], **OPTIONS[target]}
    if target == "chat" and agent != "chat":
        wanted["max_tokens"] = wanted.pop("max_completion_tokens")
    if agent == "responses":  # it has no stop sequences
        wanted.pop("stop_sequences" if target == "messages" else "stop")
    if agent == "gemini":  # it can express neither of the two
        wanted.pop("parallel_tool_calls", None)
        wanted.pop("reasoning_effort", None)
        if target == "messages":
            wanted["tool_choice"] = {"type": "tool", "name": "read"}
            wanted["output_config"] = {"format": wanted["output_config"]["format"]}
    assert {name: request.get(name) for name in wanted} == wanted
