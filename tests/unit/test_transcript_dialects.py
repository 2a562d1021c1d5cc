"""Every dialect comes out as the same messages, and nothing that a client sends makes reading fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recorded_conversations import BASE64, CONVERSATIONS, SCHEMA

from holdwater import dialect as dialects
from holdwater.dialect.message import (
    CallPairing,
    CommonMessage,
    MessageMedia,
    ToolCall,
    decode_foreign,
    decode_referring,
)
from holdwater.view.transcript import block

LS = ToolCall(name="bash", arguments={"command": "ls"}, id="call_1")
NAMES = sorted(CONVERSATIONS)


def heard(name: str, request: dict[str, Any]) -> list[CommonMessage]:
    speaks = dialects.find_dialect(name)
    pairing = CallPairing()
    spoken = [*speaks.parse_system(request), *speaks.parse_messages(request[speaks.key])]
    return [pairing.pair_message(message) for message in spoken]


@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_the_same_messages_in_every_dialect(name: str) -> None:
    request, _ = CONVERSATIONS[name][1]

    system, user, assistant, tool = heard(name, request)

    assert system == CommonMessage(role="system", parts=("You are careful.",))
    assert user == CommonMessage(
        role="user", parts=("What is here?", MessageMedia(type="image/png", data=BASE64))
    )
    assert (assistant.role, assistant.parts, assistant.calls) == ("assistant", ("I look.",), (LS,))
    assert tool == CommonMessage(role="tool", parts=("a.txt",), answers="call_1", tool="bash")


@pytest.mark.parametrize("name", NAMES)
def test_a_reply_is_the_same_message_in_every_dialect(name: str) -> None:
    _, raw = CONVERSATIONS[name][0]

    reply = dialects.find_dialect(name).parse_reply(raw)

    assert reply.message is not None
    said = CallPairing().pair_message(reply.message)
    assert said == CommonMessage(role="assistant", parts=("I look.",), reasoning="Look first.", calls=(LS,))
    assert reply.model.endswith("-2026")
    assert reply.finish


@pytest.mark.parametrize("name", NAMES)
def test_tools_come_out_as_chat_has_them(name: str) -> None:
    request, _ = CONVERSATIONS[name][0]

    [tool] = dialects.find_dialect(name).parse_tools(request)

    assert (tool["type"], tool["function"]["name"]) == ("function", "bash")
    assert tool["function"]["parameters"] == SCHEMA


def test_a_text_in_place_of_messages_is_the_users() -> None:
    found = list(dialects.find_dialect("responses").parse_system({"model": "m", "input": "Hello"}))

    assert found == [CommonMessage(role="user", parts=("Hello",))]


def test_a_text_that_looks_like_a_reference_is_a_text() -> None:
    """The gateway writes such a text with an escape; decoded, it must not point into the blobs."""
    hash_ = "0" * 64
    faked = b'{"role":"user","content":"\\u0068oldwater-blob:%s:image/png"}' % hash_.encode()
    true = b'{"role":"user","content":"holdwater-blob:%s:image/png"}' % hash_.encode()

    [text] = dialects.CHAT.parse_messages([decode_referring(faked)])
    [media] = dialects.CHAT.parse_messages([decode_referring(true)])

    assert text.parts == (f"holdwater-blob:{hash_}:image/png",)
    assert media.parts == (MessageMedia(type="image/png", blob=hash_),)


def test_json_that_cannot_be_read_is_shown_as_it_is() -> None:
    assert decode_foreign(b'{"content": "\\ud83d"}') == '{"content": "\\ud83d"}'


KEYS = """
role content type text parts tool_calls function arguments name id input output summary source data url
image_url inlineData mimeType functionCall functionResponse response args choices message candidates
thinking system instructions tools functionDeclarations file logprobs token_ids
"""
keys = st.sampled_from(KEYS.split())
WORDS = """
user assistant tool function message reasoning function_call function_call_output custom_tool_call image
tool_result tool_use thinking text input_audio file data:image/png;base64,AA {} x
"""
words = st.sampled_from(WORDS.split())
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), values, st.dictionaries(keys, values, max_size=5))
def test_whatever_a_client_or_a_server_sends_can_be_read(name: str, item: Any, whole: dict[str, Any]) -> None:
    speaks = dialects.find_dialect(name)

    found = [*speaks.parse_messages([item]), *speaks.parse_system(whole)]
    reply = speaks.parse_reply(whole)

    assert all(isinstance(message, CommonMessage) for message in found)
    assert all(isinstance(tool, dict) for tool in speaks.parse_tools(whole))
    assert reply.message is None or reply.message.role == "assistant" or name == "chat"


def test_text_of_others_cannot_steer_the_terminal() -> None:
    assert block("a\x1b[31mb\x1b[2Jc\r\n\td\u202e", "  ") == "  ab\ufffd[2Jc\n      d\ufffd"
