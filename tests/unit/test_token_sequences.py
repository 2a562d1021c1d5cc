"""Token sequences: each sampled token in exactly one, the reasons for new ones, their size on the wire."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recorded_conversations import Recording, chat, says

from holdwater.conversation.nodes import read_nodes
from holdwater.conversation.prompt_deltas import PromptHistory, restore_prompt
from holdwater.core.serving_protocol import MessageNode
from holdwater.core.token_sequences import (
    PackedSequence,
    SequencePacking,
    SequenceStart,
    TokenSequence,
    build_sequences,
    unpack_sequences,
)
from holdwater.ledger.directory import RunDirectory

FIRST, CHILD, BRANCH = SequenceStart.FIRST, SequenceStart.CHILD, SequenceStart.BRANCH
RETOKENIZED, REWRITTEN = SequenceStart.RETOKENIZED, SequenceStart.REWRITTEN
RESTARTED = SequenceStart.RESTARTED


class SampledReply(msgspec.Struct):
    """The ids of one reply, as its upstream returned them."""

    node: int
    prompt: list[int]
    tokens: list[int]


class GrownConversation:
    """Message nodes that a test adds one by one."""

    def __init__(self) -> None:
        self.nodes: list[MessageNode] = []
        self.replies: list[SampledReply] = []
        self._history = PromptHistory()

    def add_message(self, parent: int | None, role: str = "user") -> int:
        node = MessageNode(id=len(self.nodes), parent=parent, role=role, message=None, exchange=1)
        self._history.add_message(node.id, parent, role)
        self.nodes.append(node)
        return node.id

    def add_reply(
        self, parent: int, prompt: list[int], tokens: list[int], by: str = "", version: str = ""
    ) -> int:
        number = len(self.nodes)
        self._history.add_message(number, parent, "assistant", sampled=True)
        delta = self._history.add_reply(number, by, prompt, tokens)
        self.nodes.append(
            MessageNode(
                id=number,
                parent=parent,
                role="assistant",
                message=None,
                exchange=number,
                sampled=True,
                tokens=tuple(tokens),
                prompt_delta=delta.new,
                follows=delta.follows,
                shared=delta.shared,
                sequence_start=delta.start,
                logprobs=tuple(-token / 8 for token in tokens),
                version=version,
                by=by,
            )
        )
        self.replies.append(SampledReply(number, prompt, tokens))
        return number

    def path(self, node: int | None) -> list[int]:
        before: list[int] = []
        while node is not None:
            before.append(node)
            node = self.nodes[node].parent
        return before[::-1]


def pack_sequences(nodes: list[MessageNode]) -> tuple[PackedSequence, ...]:
    packing = SequencePacking()
    for node in nodes:
        packing.add(node)
    return packing.build()


def describe(sequences: list[TokenSequence]) -> list[tuple[SequenceStart, list[int], str]]:
    return [(s.reason, s.ids.tolist(), "".join(map(str, s.mask))) for s in sequences]


def test_a_conversation_is_one_sequence_with_a_span_for_each_part() -> None:
    talk = GrownConversation()
    user = talk.add_message(talk.add_message(None, "system"))
    first = talk.add_reply(user, [1, 2, 3], [4, 5], version="7")
    result = talk.add_message(first, "tool")
    talk.add_reply(result, [1, 2, 3, 4, 5, 6], [7], version="8")

    [sequence] = build_sequences(talk.nodes)

    assert describe([sequence]) == [(FIRST, [1, 2, 3, 4, 5, 6, 7], "0001101")]
    assert [(s.start, s.stop, s.sampled, s.messages, s.version) for s in sequence.spans] == [
        (0, 3, False, (0, 1), ""),
        (3, 5, True, (2,), "7"),
        (5, 6, False, (3,), ""),
        (6, 7, True, (4,), "8"),
    ]
    assert sequence.logprobs.tolist() == [0.0, 0.0, 0.0, -0.5, -0.625, 0.0, -0.875]
    assert (sequence.prompt, sequence.versions, sequence.complete, len(sequence)) == (3, ("7", "8"), True, 7)
    assert [(turn.prompt.tolist(), turn.completion.tolist()) for turn in sequence.turns()] == [
        ([1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 5, 6], [7]),
    ]


def test_a_branch_repeats_its_beginning_without_the_mask() -> None:
    talk = GrownConversation()
    first = talk.add_reply(talk.add_message(None), [1, 2], [3])
    for ids in ([1, 2, 3, 4], [1, 2, 3, 5]):
        talk.add_reply(talk.add_message(first), ids, [9])

    whole, branch = build_sequences(talk.nodes)

    assert describe([whole, branch]) == [
        (FIRST, [1, 2, 3, 4, 9], "00101"),
        (BRANCH, [1, 2, 3, 5, 9], "00001"),
    ]
    assert branch.logprobs.tolist() == [0.0, 0.0, 0.0, 0.0, -1.125]
    assert [(s.start, s.stop, s.messages) for s in branch.spans] == [
        (0, 2, (0,)),
        (2, 3, (1,)),
        (3, 4, (4,)),
        (4, 5, (5,)),
    ]


def test_another_reply_to_the_same_prompt_is_a_branch() -> None:
    talk = GrownConversation()
    user = talk.add_message(None)
    for token in (3, 4):
        talk.add_reply(user, [1, 2], [token])

    assert describe(build_sequences(talk.nodes)) == [(FIRST, [1, 2, 3], "001"), (BRANCH, [1, 2, 4], "001")]


def test_the_same_messages_in_other_ids_are_retokenized() -> None:
    talk = GrownConversation()
    first = talk.add_reply(talk.add_message(None), [1, 2], [3, 4])
    talk.add_reply(talk.add_message(first), [1, 2, 34, 5], [6])

    assert describe(build_sequences(talk.nodes)) == [
        (FIRST, [1, 2, 3, 4], "0011"),
        (RETOKENIZED, [1, 2, 34, 5, 6], "00001"),
    ]


def test_a_changed_history_is_rewritten_and_a_forgotten_one_restarted() -> None:
    talk = GrownConversation()
    system = talk.add_message(None, "system")
    task = talk.add_message(system)
    talk.add_reply(task, [1, 2], [3])
    edited = talk.add_message(talk.add_message(task, "assistant"))
    talk.add_reply(edited, [1, 2, 30, 4], [5])
    talk.add_reply(talk.add_message(system), [1, 8], [9])

    reasons = [sequence.reason for sequence in build_sequences(talk.nodes)]
    assert reasons == [FIRST, REWRITTEN, RESTARTED]


def test_tokens_that_go_on_do_so_although_the_agent_changed_its_text() -> None:
    talk = GrownConversation()
    user = talk.add_message(None)
    talk.add_reply(user, [1, 2], [3])
    trimmed = talk.add_message(talk.add_message(user, "assistant"))
    talk.add_reply(trimmed, [1, 2, 3, 4], [5])

    assert describe(build_sequences(talk.nodes)) == [(FIRST, [1, 2, 3, 4, 5], "00101")]


def test_a_child_begins_a_sequence_of_its_own_and_continues_it() -> None:
    talk = GrownConversation()
    first = talk.add_reply(talk.add_message(None), [1, 2], [3])
    asked = talk.add_message(first)
    said = talk.add_reply(asked, [1, 2, 3, 4], [5], by="helper")
    talk.add_reply(talk.add_message(said), [1, 2, 3, 4, 5, 6], [7], by="helper")
    talk.add_reply(asked, [1, 2, 3, 4], [8])

    sequences = build_sequences(talk.nodes)

    assert [(s.reason, s.by, "".join(map(str, s.mask))) for s in sequences] == [
        (FIRST, "", "00101"),
        (CHILD, "helper", "0000101"),
    ]


def test_unknown_logprobs_keep_their_places() -> None:
    talk = GrownConversation()
    talk.add_reply(talk.add_message(None), [1], [2, 3, 4])
    last = talk.nodes.pop()

    [gap] = build_sequences([*talk.nodes, msgspec.structs.replace(last, logprobs=(-1.0, None, -3.0))])
    [short] = build_sequences([*talk.nodes, msgspec.structs.replace(last, logprobs=(-1.0, -3.0))])

    assert (gap.logprobs[1], gap.logprobs[3], gap.complete) == (-1.0, -3.0, False)
    assert [math.isnan(value) for value in gap.logprobs] == [False, False, True, False]
    assert [math.isnan(value) for value in short.logprobs] == [False, True, True, True]


# Conversations of any shape


class GrowthStep(msgspec.Struct):
    """One step: what is added, after which earlier node, with how many tokens."""

    kind: str
    place: int
    size: int


STEPS = st.lists(
    st.builds(
        GrowthStep,
        st.sampled_from(["user", "tool", "assistant", "reply", "reply", "reply", "again", "child"]),
        st.integers(0, 6),
        st.integers(1, 4),
    ),
    min_size=1,
    max_size=30,
)


def grow(steps: list[GrowthStep]) -> GrownConversation:
    """Add the steps, each after one of the newest nodes; `again` tokenizes the history anew."""
    talk = GrownConversation()
    ids: list[list[int]] = [[0]]
    talk.add_message(None, "system")
    for number, step in enumerate(steps):
        parent = max(0, len(talk.nodes) - 1 - step.place)
        new = [10 * number + at for at in range(step.size)]
        if step.kind in ("user", "tool", "assistant"):
            talk.add_message(parent, step.kind)
        else:
            prompt = [token for node in talk.path(parent) for token in ids[node]]
            if step.kind == "again":
                middle = step.place % len(prompt)
                prompt = [*prompt[:middle], *(token + 5000 for token in prompt[middle:])]
            talk.add_reply(parent, prompt, new, by="helper" if step.kind == "child" else "")
        ids.append(new)
    return talk


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_each_sampled_token_is_in_one_sequence_after_its_prompt(steps: list[GrowthStep]) -> None:
    talk = grow(steps)

    packed = msgspec.msgpack.decode(
        msgspec.msgpack.encode(pack_sequences(talk.nodes)), type=tuple[PackedSequence, ...]
    )
    sequences = unpack_sequences(packed)

    places = {span.messages: (s, span) for s in sequences for span in s.spans if span.sampled}
    assert len(places) == len(talk.replies)
    assert sum(sum(s.mask) for s in sequences) == sum(len(reply.tokens) for reply in talk.replies)
    known = {node.id: node for node in talk.nodes}
    for reply in talk.replies:
        sequence, span = places[reply.node,]
        assert sequence.ids[: span.start].tolist() == reply.prompt == restore_prompt(known[reply.node], known)
        assert sequence.ids[span.start : span.stop].tolist() == reply.tokens
        assert sequence.logprobs[span.start : span.stop].tolist() == [-token / 8 for token in reply.tokens]
        assert sequence.by == known[reply.node].by
    for sequence in sequences:
        masks = [bit for span in sequence.spans for bit in [int(span.sampled)] * (span.stop - span.start)]
        assert sequence.mask.tolist() == masks
        assert [span.start for span in sequence.spans] == [0, *(span.stop for span in sequence.spans[:-1])]
        assert len(sequence.mask) == len(sequence.logprobs) == sequence.spans[-1].stop


@given(STEPS)
@settings(max_examples=50, deadline=None)
def test_each_prompt_token_is_packed_once_without_a_new_tokenization(steps: list[GrowthStep]) -> None:
    talk = grow([step for step in steps if step.kind != "again"])

    packed = pack_sequences(talk.nodes)

    paths = {node for reply in talk.replies for node in talk.path(reply.node)}
    sizes = [len(talk.nodes[node].tokens or ()) for node in paths]
    most = sum(sizes) + sum(4 for node in paths if talk.nodes[node].tokens is None)
    assert sum(len(sequence.ids) for sequence in packed) <= 4 * most * 2


@pytest.mark.parametrize("wire", [msgspec.msgpack, msgspec.json], ids=["msgpack", "json"])
def test_a_hundred_turns_take_at_most_twelve_bytes_a_token(wire: Any) -> None:
    talk = GrownConversation()
    at, prompt = talk.add_message(None), list(range(40))
    for turn in range(100):
        tokens = [150_000 + turn + n for n in range(80)]
        at = talk.add_message(talk.add_reply(at, prompt, tokens, version=str(turn)))
        prompt = [*prompt, *tokens, *range(80)]

    packed = pack_sequences(talk.nodes)

    [sequence] = unpack_sequences(packed)
    assert len(sequence) == 40 + 100 * 80 + 99 * 80
    assert len(wire.encode(packed)) <= 12 * len(sequence)


# Recorded conversations


def ids_reply(text: str, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
    reply = says(text)
    return {**reply, "prompt_token_ids": prompt, "choices": [{**reply["choices"][0], "token_ids": tokens}]}


def read_sequences(path: Path, *turns: tuple[Any, Any, dict[str, Any]]) -> list[TokenSequence]:
    directory = RunDirectory(path)
    recording = Recording(directory, 1)
    for request, reply, about in turns:
        recording.add(request, reply, **about)
    recording.log.close()
    return build_sequences(read_nodes(directory, 1))


def test_recorded_turns_are_a_sequence_and_judges_are_in_none(tmp_path: Path) -> None:
    sequences = read_sequences(
        tmp_path,
        (chat("a"), ids_reply("b", [1, 2], [3]), {"version": "5"}),
        (chat("judge it"), ids_reply("good", [1, 9], [8]), {"by": "grader"}),
        (chat("a", "b", "c"), ids_reply("d", [1, 2, 3, 4], [5]), {"version": "6"}),
    )

    assert describe(sequences) == [(FIRST, [1, 2, 3, 4, 5], "00101")]
    assert [(span.exchange, span.version) for span in sequences[0].spans if span.sampled] == [
        (1, "5"),
        (3, "6"),
    ]


def test_replies_without_ids_of_their_prompt_are_in_no_sequence(tmp_path: Path) -> None:
    reply = ids_reply("b", [], [3])

    assert read_sequences(tmp_path, (chat("a"), reply, {})) == []


@pytest.mark.parametrize("ids", [[-1, 2], [1 << 40], [True, 1], [1.5], "12"])
def test_ids_that_are_none_are_not_known(tmp_path: Path, ids: Any) -> None:
    assert read_sequences(tmp_path, (chat("a"), ids_reply("b", ids, [3]), {})) == []
    assert read_sequences(tmp_path / "2", (chat("a"), ids_reply("b", [3], ids), {})) == []
