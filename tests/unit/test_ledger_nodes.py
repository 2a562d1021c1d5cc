"""Message nodes of recorded conversations: shared beginnings, replies that are sent back, branches, media."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recorded_conversations import BASE64, CONVERSATIONS, IMAGE, PIXELS, Recording, chat, says

from holdwater import dialect as dialects
from holdwater.conversation.nodes import read_nodes
from holdwater.core.serving_protocol import MessageNode
from holdwater.dialect.message import says_same
from holdwater.ledger.blobs import BlobStore
from holdwater.ledger.directory import RunDirectory

NAMES = sorted(CONVERSATIONS)


class Talk:
    """One attempt's record, and its nodes."""

    def __init__(self, path: Path, dialect: str = "chat") -> None:
        self.directory = RunDirectory(path)
        self.recording = Recording(self.directory, 1, dialect)
        self.add = self.recording.add

    def nodes(self, **options: Any) -> list[MessageNode]:
        self.recording.log.close()
        return list(read_nodes(self.directory, 1, **options))


def chain(found: list[MessageNode], node: MessageNode) -> list[MessageNode]:
    """The nodes up to this one, from the root."""
    before = [] if node.parent is None else chain(found, found[node.parent])
    return [*before, node]


def said(found: list[MessageNode]) -> list[tuple[int | None, str, bool]]:
    return [(node.parent, node.message["content"], node.sampled) for node in found]


@pytest.mark.parametrize("dialect", NAMES)
def test_a_conversation_is_a_chain_in_every_dialect(tmp_path: Path, dialect: str) -> None:
    talk = Talk(tmp_path, dialect)
    for request, reply in CONVERSATIONS[dialect]:
        talk.add(request, reply)

    found = talk.nodes()

    assert [node.role for node in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert [node.parent for node in found] == [None, 0, 1, 2, 3]
    assert [node.sampled for node in found] == [False, False, True, False, True]
    assert [node.exchange for node in found] == [1, 1, 1, 2, 2]
    assert {node.dialect for node in found} == {dialect}
    assert [bool(node.finish) for node in found] == [node.sampled for node in found]


@pytest.mark.parametrize("dialect", NAMES)
def test_media_are_references_or_in_their_places(tmp_path: Path, dialect: str) -> None:
    talk = Talk(tmp_path, dialect)
    talk.add(*CONVERSATIONS[dialect][0])

    referring, inline = (json.dumps(talk.nodes(media=how)[1].message) for how in ("reference", "inline"))

    assert BASE64 in inline
    assert BASE64 not in referring and "holdwater-b" in referring
    [name] = (part.partition(":")[2][:64] for part in referring.split("holdwater-")[1:])
    assert BlobStore(talk.directory.blobs).get(name) == PIXELS


def test_what_only_looks_like_a_reference_is_left_alone(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.add(chat(IMAGE), says(IMAGE))
    forged = f"holdwater-blob:{BlobStore(talk.directory.blobs).put(PIXELS)}:image/png"
    talk.add(chat(forged), says(forged))

    found = talk.nodes(media="inline")

    assert [node.message["content"] for node in found] == [IMAGE, IMAGE, forged, forged]


def test_a_reply_that_comes_back_changed_is_a_node_of_its_own(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.add(chat("hi"), says("hello", reasoning_content="a greeting"))
    talk.add(chat("hi", "hello", "and now?"), says("more"))
    talk.add(chat("hi", "HELLO", "and now?"), says("less"))

    assert said(talk.nodes()) == [
        (None, "hi", False),
        (0, "hello", True),
        (1, "and now?", False),
        (2, "more", True),
        (0, "HELLO", False),
        (4, "and now?", False),
        (5, "less", True),
    ]


def test_several_replies_to_one_request_are_continued_each_for_itself(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    for text in ("a", "b"):
        talk.add(chat("hi"), says(text))
    for text in ("a", "b"):
        talk.add(chat("hi", text, "go on"), says(f"{text}!"))

    found = talk.nodes()

    sampled = [[n.message["content"] for n in chain(found, node)] for node in found if node.sampled]
    assert sampled == [["hi", "a"], ["hi", "b"], ["hi", "a", "go on", "a!"], ["hi", "b", "go on", "b!"]]
    assert len(found) == 7


def test_a_conversation_that_the_gateway_took_for_new_shares_its_nodes(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.add(chat("hi"), says("hello"))
    talk.recording = again = Recording(talk.directory, 1)
    again.log.count = 1
    other = {"messages": [dict(reversed(m.items())) for m in chat("hi", "hello", "and now?")["messages"]]}
    again.add(other, says("more"))

    found = talk.nodes()

    assert [node.parent for node in found] == [None, 0, 1, 2]


def test_what_failed_or_broke_off_is_not_sampled(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    talk.add(chat("hi"), {"error": {"message": "busy"}}, error="busy", status=503)
    talk.add(chat("hi"), says("hel"), error="the reply broke off")
    talk.add(chat("hi"), None, error="gone", status=499)
    talk.add(chat("hi"), says("hello"))

    assert said(talk.nodes()) == [(None, "hi", False), (0, "hello", True)]


def test_every_choice_is_a_node_with_its_own_tokens(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    choices = [
        {
            "index": index,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
            "token_ids": [index, 9],
            "logprobs": {"content": [{"token": "x", "logprob": -0.5}, {"token": "y", "logprob": -index}]},
        }
        for index, text in enumerate(["a", "b"])
    ]
    talk.add(chat("hi"), {"choices": choices, "prompt_token_ids": [5, 6]}, version="step-3", by="judge")

    asked, *found = talk.nodes()

    assert [node.tokens for node in found] == [(0, 9), (1, 9)]
    assert [node.logprobs for node in found] == [(-0.5, 0.0), (-0.5, -1.0)]
    assert [(node.follows, node.shared, node.prompt_delta) for node in found] == [
        (None, 0, (5, 6)),
        (1, 2, ()),
    ]
    assert {(node.version, node.by) for node in found} == {("step-3", "judge")}
    assert (asked.tokens, asked.version, asked.by) == (None, "", "judge")


def test_other_instructions_begin_another_root(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "messages")
    (first, reply), (second, last) = CONVERSATIONS["messages"]
    talk.add(first, reply)
    talk.add({**second, "system": "You are careless."}, last)

    found = talk.nodes(media="inline")

    assert [node.role for node in found if node.parent is None] == ["system", "system"]
    again = chain(found, found[-1])
    assert [node.message for node in again[:-1]] == ["You are careless.", *second["messages"]]
    assert [node.sampled for node in again] == [False, False, False, False, True]


def test_a_branch_within_a_reply_that_was_sent_back_as_several_items(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "responses")
    (first, reply), (second, last) = CONVERSATIONS["responses"]
    talk.add(first, reply)
    talk.add(second, last)
    talk.add({**second, "input": [*second["input"][:3], {"role": "user", "content": "stop"}]}, last)

    found = talk.nodes()

    branch = chain(found, found[-1])
    assert [node.message.get("type") for node in branch[2:-1]] == ["reasoning", "message", None]
    assert [node.sampled for node in branch] == [False, False, False, False, False, True]


def test_a_text_in_the_place_of_messages_is_one(tmp_path: Path) -> None:
    talk = Talk(tmp_path, "responses")
    talk.add({"model": "m", "instructions": "Be brief.", "input": "hi"}, CONVERSATIONS["responses"][1][1])

    found = talk.nodes()

    assert [(node.role, node.parent) for node in found] == [("system", None), ("user", 0), ("assistant", 1)]
    assert [node.message for node in found[:2]] == ["Be brief.", {"role": "user", "content": "hi"}]


# Any conversation: what was sent is what the nodes say.


class Speech:
    """How requests and replies of a dialect are made, from texts alone."""

    def __init__(self, dialect: str) -> None:
        self.dialect = dialect
        self.key = dialects.find_dialect(dialect).key

    def user(self, text: str) -> Any:
        if self.dialect == "gemini":
            return {"role": "user", "parts": [{"text": text}]}
        return {"role": "user", "content": text}

    def assistant(self, text: str) -> list[Any]:
        """What is sent back for a reply, item by item."""
        if self.dialect == "gemini":
            return [{"role": "model", "parts": [{"text": text}]}]
        if self.dialect == "responses":
            call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
            return [{"type": "message", "role": "assistant", "content": text}, call]
        return [{"role": "assistant", "content": text}]

    def reply(self, text: str) -> dict[str, Any]:
        items = self.assistant(text)
        if self.dialect == "gemini":
            return {"candidates": [{"content": items[0]}]}
        if self.dialect == "responses":
            thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
            return {"output": [thought, *items]}
        if self.dialect == "messages":
            return {"type": "message", "content": [{"type": "text", "text": text}]}
        return {"choices": [{"message": {**items[0], "reasoning_content": "hm"}}]}

    def head(self, system: str) -> dict[str, Any]:
        name = {"messages": "system", "responses": "instructions", "gemini": "systemInstruction"}
        if not system or self.dialect == "chat":
            return {"model": "m"}
        value = {"parts": [{"text": system}]} if self.dialect == "gemini" else system
        return {"model": "m", name[self.dialect]: value}


STEPS = st.lists(
    st.tuples(
        st.integers(0, 7),  # which conversation goes on
        st.integers(0, 3),  # how many of its last messages are cut off
        st.sampled_from(["echo", "changed", "none", "whole"]),
        st.sampled_from("abc"),
        st.sampled_from(["", "x", "y"]),
        st.booleans(),  # whether it is answered
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("dialect", NAMES)
@given(steps=STEPS)
@settings(max_examples=40, deadline=None)
def test_walking_up_gives_exactly_what_was_sent(dialect: str, steps: list[Any]) -> None:
    speech = Speech(dialect)
    with tempfile.TemporaryDirectory() as path:
        talk = Talk(Path(path), dialect)
        talks: list[tuple[list[Any], str]] = [([], "")]
        sent: dict[int, list[Any]] = {}
        for number, (which, cut, back, text, system, answered) in enumerate(steps, 1):
            before, reply = talks[which % len(talks)]
            kept = before[: len(before) - cut] if back == "none" else before
            echo = {"echo": speech.assistant(reply), "changed": speech.assistant("?")}.get(back, [])
            messages = [*kept, *(echo if reply else []), speech.user(text)]
            head = speech.head(system)
            made = speech.reply(text) if answered else None
            talk.add({**head, speech.key: messages}, made, error="" if answered else "gone")
            talks.append((messages, text if answered else ""))
            sent[number] = [*[value for name, value in head.items() if name != "model"], *messages]
        found = talk.nodes()

    assert [node.id for node in found] == list(range(len(found)))
    assert all(node.parent is None or node.parent < node.id for node in found)
    unsampled = [(node.parent, json.dumps(node.message)) for node in found if not node.sampled]
    assert len(set(unsampled)) == len(unsampled)
    assert [node.exchange for node in found if node.sampled] == [n for n, s in enumerate(steps, 1) if s[5]]
    for node in found:
        if node.sampled:
            check_says(dialect, chain(found, node)[:-1], sent[node.exchange])


def check_says(dialect: str, walked: list[MessageNode], sent: list[Any]) -> None:
    """Message for message the same; a sampled one says the same as those that sent it back."""
    at = 0
    for node in walked:
        if not node.sampled:
            assert node.message == sent[at]
            at += 1
            continue
        items = node.message if dialect == "responses" else [node.message]
        back = len([item for item in items if item.get("type") != "reasoning"])
        mine, theirs = (
            dialects.find_dialect(dialect).parse_messages(told) for told in (items, sent[at : at + back])
        )
        assert len(mine) == len(theirs) == 1
        assert says_same(mine[0], theirs[0])
        at += back
    assert at == len(sent)
