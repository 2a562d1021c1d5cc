"""What an agent in Python says is sent as it is, however it changes its messages from call to call."""

from __future__ import annotations

import enum
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.gateway.in_process_calls import LARGE, PIECE, MessageHistory
from holdwater.gateway.request_parser import digest

NUMBERS = st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, -0.0])
LEAVES = st.none() | NUMBERS | st.text(max_size=5)
TREES = st.recursive(
    LEAVES, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(max_size=2), t, max_size=3)
)
HISTORIES = st.lists(st.dictionaries(st.sampled_from("abc"), TREES, max_size=3), max_size=5)


def written(said):
    return b"".join(said.pieces())


def canonical(content):
    """As text: `1`, `1.0` and `True` are equal in Python."""
    return json.dumps(json.loads(content), sort_keys=True)


@given(st.lists(HISTORIES, max_size=4))
def test_messages_are_sent_unchanged_and_their_size_and_digests_are_right(histories):
    conversation = MessageHistory()

    for history in histories:
        said = conversation.copy_messages(history)

        assert canonical(written(said)) == canonical(msgspec.json.encode(history))
        assert len(said) == len(written(said))
        assert said.digests == b"".join(digest(message) for message in said[:])


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].update(content="other"),
        lambda m: m[1]["content"][0].update(text="other"),
        lambda m: m[1]["content"].append({"type": "text", "text": "more"}),
        lambda m: m[1].pop("name"),
        lambda m: m[2].update(n=True),
        lambda m: m.pop(0),
        lambda m: m.insert(0, {"role": "system", "content": "new"}),
        lambda m: m.clear(),
    ],
)
def test_a_message_changed_in_place_is_sent_in_its_current_state(change):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "user", "name": "x", "content": [{"type": "text", "text": "a"}]},
        {"role": "tool", "n": 1},
    ]
    conversation = MessageHistory()
    conversation.copy_messages(messages)

    change(messages)

    assert written(conversation.copy_messages(messages)) == msgspec.json.encode(messages)


@pytest.mark.parametrize("odd", ["", '"', "\\", "\n", "\x7f", "é", "\u2028", "😀", "/"])
def test_large_texts_are_sent_as_json_has_them(odd):
    large = "x" * LARGE + odd
    image = [{"type": "text", "text": large}, {"type": "image_url", "image_url": {"url": large + "y"}}]
    messages = [{"role": "user", "content": large}, {"role": "user", "name": None, "content": image}]
    conversation = MessageHistory()

    for _ in range(2):
        said = conversation.copy_messages(messages)

        assert written(said) == msgspec.json.encode(messages)
        assert len(said) == len(written(said))


def test_copied_messages_stay_unchanged_when_the_agent_changes_its_own_later():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    said = MessageHistory().copy_messages(messages)
    before = written(said)

    messages[0]["content"][0]["text"] = "b"
    messages.clear()

    assert written(said) == before == b'[{"role":"user","content":[{"type":"text","text":"a"}]}]'


def test_no_more_than_a_message_and_a_piece_is_encoded_at_once():
    messages = [{"role": "user", "content": "x" * 1000}] * 1000

    sizes = [len(piece) for piece in MessageHistory().copy_messages(messages).pieces()]

    assert max(sizes) < PIECE + 2000
    assert sum(sizes) == len(msgspec.json.encode(messages))


class Role(enum.StrEnum):
    USER = "user"


class Said(msgspec.Struct):
    role: str
    content: str


@pytest.mark.parametrize("message", [Said("user", "hi"), {"role": Role.USER, "content": ("hi",)}])
def test_whatever_json_can_say_can_be_said(message):
    assert written(MessageHistory().copy_messages([message])) == msgspec.json.encode([message])


def test_what_json_cannot_say_is_the_agents_error():
    with pytest.raises(TypeError):
        MessageHistory().copy_messages([{"role": "user", "content": object()}])
