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
from tests.gateway_harness import rebuilt

from holdwater.core.exchange import Exchange
from holdwater.dialect import DIALECTS
from holdwater.gateway import media
from holdwater.gateway.recorder import MOST_TIPS, ConversationRecorder
from holdwater.gateway.request_parser import MalformedRequest
from holdwater.ledger.blobs import resolve_references

IMAGE = "data:image/png;base64," + base64.b64encode(random.Random(7).randbytes(4500)).decode()
BLOBS: dict[str, bytes] = {}


def keep(content):
    digest = blake3(content).hexdigest()
    BLOBS[digest] = content
    return digest


def record(recorder, exchanges, body):
    """One request, as a session records it."""
    reading = recorder.read(bytearray(body))
    assert reading.span is None or json.loads(bytes(reading.span))
    delta = recorder.find_delta(reading, msgspec.json.encode(reading.head))
    number = len(exchanges) + 1
    exchanges.append(
        Exchange(
            number=number,
            parent=delta.parent,
            keep=delta.keep,
            append=tuple(Raw(media.extract_media(m, keep)) for m in delta.append),
            head=None if delta.head is None else Raw(media.extract_constants(delta.head, keep)),
            reply=None,
            status=200,
            dialect=delta.dialect,
        )
    )
    recorder.on_written(delta, number)
    return bytes(reading.span or b"[]")


texts = st.sampled_from(["", "a", "ü\n", '"quoted"', "holdwater-blob:1:x", "messages", IMAGE, "x" * 300])
messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts})
TOOLS = [{"messages": [], "contents": "", "input": "holdwater-json:1"}]
heads = st.sampled_from(
    [{}, {"model": "m"}, {"model": "m", "tools": TOOLS}, {"seed": 1}, {"seed": 2, "tools": TOOLS * 99}]
)
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
    """The requests that `steps` make: append, edit, branch, compact and, where nothing changes, retry."""
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


def encoded(head, current, layout, key="messages"):
    separators, messages_first, ascii_only = layout
    keys = {key: current, **head} if messages_first else {**head, key: current}
    return json.dumps(keys, separators=separators, ensure_ascii=ascii_only).encode()


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(max_examples=60, deadline=None)
@given(st.lists(edits, max_size=12), heads, st.lists(heads, max_size=12), layouts)
def test_any_conversation_reads_back_as_it_was_sent(dialect, steps, head, other_heads, layout):
    form = DIALECTS[dialect]
    recorder, exchanges, sent = ConversationRecorder(form), [], []
    for i, current in enumerate(conversation(steps)):
        keys = other_heads[i] if i < len(other_heads) and i % 3 == 2 else head
        if form.optional and i % 4 == 3:
            current = "a text is no list"
        body = encoded(keys, current, layout, form.key)
        record(recorder, exchanges, body)
        sent.append(json.loads(body))
        if isinstance(current, str):
            sent[-1][form.key] = [{"role": "user", "content": current}]
    assert rebuilt(exchanges, BLOBS) == sent


CACHED = {"type": "ephemeral", "ttl": "1h"}


def blocks(text, cached, first=False):
    own = {"type": "text", "text": text}
    content = {**({"cache_control": CACHED} if first else {}), **own} if cached else own
    content = {**content, "cache_control": CACHED} if cached and not first else content
    return {"role": "user", "content": [{"type": "text", "text": "same"}, content]}


def without_cache(value):
    if isinstance(value, dict):
        return {k: without_cache(v) for k, v in value.items() if k != "cache_control"}
    return [without_cache(v) for v in value] if isinstance(value, list) else value


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sets(st.integers(0, 3)), st.booleans()), max_size=10), layouts
)
def test_a_cache_control_that_walks_along_changes_no_message(turns, layout):
    """Each turn adds messages and marks some of the last ones; in the record each message is once."""
    recorder, exchanges, sent, count = ConversationRecorder(DIALECTS["messages"]), [], [], 0
    for new, marked, first in turns:
        count += new
        current = [blocks(f"message {i}", count - 1 - i in marked, first) for i in range(count)]
        body = encoded({"model": "m"}, current, layout)
        record(recorder, exchanges, body)
        sent.append(without_cache(json.loads(body)))
        assert len(exchanges[-1].append) == new
    assert without_cache(rebuilt(exchanges, BLOBS)) == sent


def test_a_moving_cache_control_does_not_cause_a_full_reread():
    recorder, exchanges = ConversationRecorder(DIALECTS["messages"]), []
    for count in range(3, 30, 2):
        current = [blocks(f"message {i}", i in (count - 1, count - 3)) for i in range(count)]
        reading = recorder.read(bytearray(encoded({}, current, ((",", ":"), False, True))))
        assert reading.known == max(0, count - 5)
        record(recorder, exchanges, encoded({}, current, ((",", ":"), False, True)))


def test_content_that_is_called_cache_control_is_content():
    recorder, exchanges = ConversationRecorder(DIALECTS["messages"]), []
    for secret in ("a" * 40, "b" * 40):
        call = {"type": "tool_use", "input": {"cache_control": {"type": secret}}}
        record(recorder, exchanges, encoded({}, [{"content": [call]}], ((",", ":"), False, True)))
    assert [len(exchange.append) for exchange in exchanges] == [1, 1]


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
    known = ConversationRecorder()
    opening = encoded({"model": "m"}, first, layout)
    record(known, [], opening)
    body = encoded({"model": "m"}, [*first, {"role": "user", "content": "more"}], layout)
    at = min(at, len(body))
    garbled = body[:at] + noise + body[at + (len(noise) if replace else 0) :]

    def outcome(recorder):
        try:
            reading = recorder.read(bytearray(garbled))
        except MalformedRequest:
            return None
        return {k: bytes(v) for k, v in reading.head.items()}, bytes(reading.span or b""), reading.digests

    assert outcome(known) == outcome(ConversationRecorder())


def test_only_new_messages_are_in_the_record():
    recorder, exchanges = ConversationRecorder(), []
    history = [{"role": "user", "content": f"message {i}"} for i in range(40)]
    for length in range(1, 41):
        record(recorder, exchanges, encoded({"model": "m"}, history[:length], ((",", ":"), False, True)))
    assert [len(e.append) for e in exchanges] == [1] * 40
    assert [e.keep for e in exchanges] == list(range(40))
    assert [e.head is None for e in exchanges] == [False] + [True] * 39


def test_a_branch_keeps_what_it_shares_with_the_nearest_conversation():
    recorder, exchanges = ConversationRecorder(), []
    layout = ((",", ":"), False, True)
    main = [{"content": c} for c in "abcdef"]
    record(recorder, exchanges, encoded({}, main, layout))
    record(recorder, exchanges, encoded({}, [{"content": "side"}], layout))
    record(recorder, exchanges, encoded({}, [*main[:4], {"content": "other"}], layout))
    assert (exchanges[1].parent, exchanges[1].keep) == (None, 0)
    assert (exchanges[2].parent, exchanges[2].keep, len(exchanges[2].append)) == (1, 4, 1)


def test_the_state_of_an_attempt_is_bounded():
    recorder, exchanges = ConversationRecorder(), []
    for i in range(MOST_TIPS + 8):
        record(recorder, exchanges, encoded({}, [{"content": str(i)}], ((",", ":"), False, True)))
    assert len(recorder._tips) == MOST_TIPS
    assert len(rebuilt(exchanges, BLOBS)) == MOST_TIPS + 8


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"messages": {}}', b'{"model": "m"}', b'{"messages": [1,]}', b"\xff"]
)
def test_an_invalid_request_is_malformed(body):
    with pytest.raises(MalformedRequest):
        ConversationRecorder().read(bytearray(body))


def test_text_that_is_not_utf8_is_malformed():
    recorder = ConversationRecorder()
    reading = recorder.read(bytearray(b'{"messages": ["\xff"]}'))
    with pytest.raises(MalformedRequest):
        recorder.find_delta(reading, b"{}")


def extracted_and_back(message):
    kept = {}

    def keep_here(content):
        digest = f"{len(kept):064x}"
        kept[digest] = content
        return digest

    stored = media.extract_media(message, keep_here)
    assert json.loads(resolve_references(stored, kept)) == json.loads(message)
    return stored, kept


def test_a_large_image_leaves_the_message_for_the_blobs():
    message = json.dumps({"content": [{"type": "image_url", "image_url": {"url": IMAGE}}, IMAGE]}).encode()
    stored, kept = extracted_and_back(message)
    assert len(stored) < 300
    assert [len(content) for content in kept.values()] == [4500, 4500]


@pytest.mark.parametrize("field", ["data", "file_data"])
@pytest.mark.parametrize("space", ["", " "])
def test_bare_base64_leaves_the_message_too(field, space):
    """As Anthropic and Gemini send images, and OpenAI audio and files."""
    source = {"type": "base64", "media_type": "image/png", field: IMAGE.partition(",")[2]}
    content = {
        "content": [{"type": "image", "source": source}, {"text": 'he said \\"data\\":\\"AAAA'}, IMAGE]
    }
    message = json.dumps(content, separators=(",", ":" + space)).encode()
    stored, kept = extracted_and_back(message)
    assert len(stored) < 600
    assert (len(kept), len(set(kept.values()))) == (2, 1)
    assert resolve_references(stored, kept) == message


def test_a_large_constant_leaves_the_head_and_its_text_is_no_reference():
    head = {"model": "holdwater-json:" + "0" * 64, "tools": [{"x": "holdwater-blob:1:x" * 400}]}
    kept = {}

    def keep_here(content):
        kept[f"{len(kept):064x}"] = content
        return f"{len(kept) - 1:064x}"

    stored = media.extract_constants(json.dumps(head).encode(), keep_here)
    assert (len(stored) < 250, len(kept)) == (True, 1)
    assert json.loads(resolve_references(stored, kept)) == head


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
def test_text_that_is_not_wholly_a_medium_stays_in_the_message(text):
    message = json.dumps({"content": text}).encode()
    stored, kept = extracted_and_back(message)
    assert (stored, kept) == (message, {})


def test_a_text_that_looks_like_a_reference_is_not_one():
    stored, kept = extracted_and_back(json.dumps({"content": ["holdwater-blob:0:image/png"]}).encode())
    assert kept == {}
    assert b'"holdwater-blob:' not in stored
