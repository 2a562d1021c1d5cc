"""What was sent is what the record gives back, and only what is new is in it."""

import base64
import json
import random

import msgspec
import pytest
from blake3 import blake3
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import Raw
from tests.gateway_scene import rebuilt

from holdwater.core.records import Exchange
from holdwater.gateway import media
from holdwater.gateway.recorder import TIPS, Malformed, Recorder
from holdwater.ledger.media import resolve

IMAGE = "data:image/png;base64," + base64.b64encode(random.Random(7).randbytes(4500)).decode()
BLOBS: dict[str, bytes] = {}


def keep(content):
    digest = blake3(content).hexdigest()
    BLOBS[digest] = content
    return digest


def record(recorder, exchanges, body):
    """One request, as a session records it."""
    reading = recorder.read(bytearray(body))
    delta = recorder.delta(reading, msgspec.json.encode(reading.head))
    number = len(exchanges) + 1
    exchanges.append(
        Exchange(
            number=number,
            parent=delta.parent,
            keep=delta.keep,
            append=tuple(Raw(media.extracted(m, keep)) for m in delta.append),
            head=None if delta.head is None else Raw(delta.head),
            reply=None,
            status=200,
        )
    )
    recorder.written(delta, number)
    return bytes(reading.span or b"[]")


texts = st.sampled_from(["", "a", "ü\n", '"quoted"', "holdwater-blob:1:x", "messages", IMAGE, "x" * 300])
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts})
heads = st.sampled_from([{}, {"model": "m"}, {"model": "m", "tools": [{"messages": []}]}, {"seed": 1}])
edits = st.one_of(
    st.tuples(st.just("append"), st.lists(messages, max_size=3)),
    st.tuples(st.just("cut"), st.integers(0, 5)),
    st.tuples(st.just("edit"), messages),
    st.tuples(st.just("branch"), st.integers(0, 9)),
)
layouts = st.tuples(
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]), st.booleans(), st.booleans()
)


def conversation(steps):
    """The requests that `steps` make, each from one of those before it."""
    made = [[]]
    for kind, value in steps:
        current = list(made[-1])
        if kind == "append":
            current += value
        elif kind == "cut":
            current = current[: max(0, len(current) - value)]
        elif kind == "edit" and current:
            current[len(current) // 2] = value
        elif kind == "branch":
            current = list(made[value % len(made)])
        made.append(current)
    return made


def encoded(head, current, layout):
    separators, messages_first, ascii_only = layout
    keys = {"messages": current, **head} if messages_first else {**head, "messages": current}
    return json.dumps(keys, separators=separators, ensure_ascii=ascii_only).encode()


@settings(max_examples=150, deadline=None)
@given(st.lists(edits, max_size=12), heads, st.lists(heads, max_size=12), layouts)
def test_any_conversation_reads_back_as_it_was_sent(steps, head, other_heads, layout):
    recorder, exchanges, sent = Recorder(), [], []
    for i, current in enumerate(conversation(steps)):
        keys = other_heads[i] if i < len(other_heads) and i % 3 == 2 else head
        body = encoded(keys, current, layout)
        span = record(recorder, exchanges, body)
        assert json.loads(span) == current
        sent.append(json.loads(body))
    assert rebuilt(exchanges, BLOBS) == sent


@settings(max_examples=300, deadline=None)
@given(
    st.lists(messages, min_size=1, max_size=3),
    layouts,
    st.integers(0, 400),
    st.binary(max_size=12),
    st.booleans(),
)
@example([{"role": "user", "content": "a"}], ((",", ":"), False, True), 57, b",]", True)
@example([{"role": "user", "content": "a"}], ((",", ":"), True, True), 43, b',"messages":[]', False)
def test_a_continued_conversation_is_read_as_if_it_were_new(first, layout, at, noise, replace):
    """Any bytes after a known beginning: the short way agrees with the long one, in errors too."""
    known = Recorder()
    opening = encoded({"model": "m"}, first, layout)
    record(known, [], opening)
    body = encoded({"model": "m"}, [*first, {"role": "user", "content": "more"}], layout)
    at = min(at, len(body))
    garbled = body[:at] + noise + body[at + (len(noise) if replace else 0) :]

    def outcome(recorder):
        try:
            reading = recorder.read(bytearray(garbled))
        except Malformed:
            return None
        return {k: bytes(v) for k, v in reading.head.items()}, bytes(reading.span or b""), reading.digests

    assert outcome(known) == outcome(Recorder())


def test_only_new_messages_are_in_the_record():
    recorder, exchanges = Recorder(), []
    history = [{"role": "user", "content": f"message {i}"} for i in range(40)]
    for length in range(1, 41):
        record(recorder, exchanges, encoded({"model": "m"}, history[:length], ((",", ":"), False, True)))
    assert [len(e.append) for e in exchanges] == [1] * 40
    assert [e.keep for e in exchanges] == list(range(40))
    assert [e.head is None for e in exchanges] == [False] + [True] * 39


def test_a_branch_keeps_what_it_shares_with_the_nearest_conversation():
    recorder, exchanges = Recorder(), []
    layout = ((",", ":"), False, True)
    main = [{"content": c} for c in "abcdef"]
    record(recorder, exchanges, encoded({}, main, layout))
    record(recorder, exchanges, encoded({}, [{"content": "side"}], layout))
    record(recorder, exchanges, encoded({}, [*main[:4], {"content": "other"}], layout))
    assert (exchanges[1].parent, exchanges[1].keep) == (None, 0)
    assert (exchanges[2].parent, exchanges[2].keep, len(exchanges[2].append)) == (1, 4, 1)


def test_the_state_of_an_attempt_is_bounded():
    recorder, exchanges = Recorder(), []
    for i in range(TIPS + 8):
        record(recorder, exchanges, encoded({}, [{"content": str(i)}], ((",", ":"), False, True)))
    assert len(recorder._tips) == TIPS
    assert len(rebuilt(exchanges, BLOBS)) == TIPS + 8


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"messages": {}}', b'{"model": "m"}', b'{"messages": [1,]}', b"\xff"]
)
def test_what_is_no_request_is_malformed(body):
    with pytest.raises(Malformed):
        Recorder().read(bytearray(body))


def test_text_that_is_not_utf8_is_malformed():
    recorder = Recorder()
    reading = recorder.read(bytearray(b'{"messages": ["\xff"]}'))
    with pytest.raises(Malformed):
        recorder.delta(reading, b"{}")


def extracted_and_back(message):
    kept = {}

    def keep_here(content):
        digest = f"{len(kept):064x}"
        kept[digest] = content
        return digest

    stored = media.extracted(message, keep_here)
    assert json.loads(resolve(stored, kept)) == json.loads(message)
    return stored, kept


def test_a_large_image_leaves_the_message_for_the_blobs():
    message = json.dumps({"content": [{"type": "image_url", "image_url": {"url": IMAGE}}, IMAGE]}).encode()
    stored, kept = extracted_and_back(message)
    assert len(stored) < 300
    assert [len(content) for content in kept.values()] == [4500, 4500]


@pytest.mark.parametrize(
    "text",
    [
        "data:image/png;base64," + "A" * 4000,  # small
        "data:image/png;base64," + "A" * 5001,  # not base64
        "data:image/png;base64," + "A" * 5002 + "B=",  # not canonical
        "see " + IMAGE,  # not the whole value
        IMAGE + " there",
        'he said "' + IMAGE,  # a quote inside a string opens nothing
        'he said "' + IMAGE + '" and left',
        "data:" + "x" * 300 + ";base64," + "A" * 8000,
        'data:image/"png;base64,' + "A" * 8000,
    ],
)
def test_what_is_not_wholly_a_medium_stays_in_the_message(text):
    message = json.dumps({"content": text}).encode()
    stored, kept = extracted_and_back(message)
    assert (stored, kept) == (message, {})


def test_a_text_that_looks_like_a_reference_is_not_one():
    stored, kept = extracted_and_back(json.dumps({"content": ["holdwater-blob:0:image/png"]}).encode())
    assert kept == {}
    assert b'"holdwater-blob:' not in stored
