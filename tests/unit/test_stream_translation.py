"""A stream that is translated as it arrives is the same as its whole reply, translated at the end."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdwater.dialect import CHAT, DIALECTS
from holdwater.dialect.conversion import ReplyContext
from holdwater.dialect.interface import AdaptedRequest, RequestTarget
from holdwater.dialect.sse import render_event

TRANSLATED = ("messages", "responses", "gemini")
CONTEXT = ReplyContext("m", frozenset({"shell"}))
words = st.text(max_size=5)
said = st.lists(words, max_size=3)
arguments = st.dictionaries(words, words | st.integers(0, 9), max_size=2)
calls = st.lists(st.tuples(st.sampled_from(["read", "shell"]), arguments, words), max_size=3)
finishes = st.sampled_from(["stop", "length", "content_filter"])


def make_chunks(thoughts, texts, called, finish):
    """The chunks of a stream as servers send them, a call's arguments in two pieces."""
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in thoughts]
    deltas += [{"content": piece} for piece in texts]
    for number, (name, values, command) in enumerate(called):
        whole = msgspec.json.encode({"input": command} if name == "shell" else values).decode()
        half = len(whole) // 2
        begin = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [{"index": number, **begin}]})
        for piece in (whole[:half], whole[half:]):
            deltas.append({"tool_calls": [{"index": number, "function": {"arguments": piece}}]})
    about = {"id": "c", "object": "chat.completion.chunk", "model": "m"}
    for place, delta in enumerate(deltas):
        ids = {"token_ids": [place]} if place else {}
        yield {**about, "choices": [{"index": 0, "delta": delta, **ids}]}
    yield {**about, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
    details = {"completion_tokens_details": {"reasoning_tokens": 2}}
    yield {**about, "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, **details}}


def make_message(thoughts, texts, called, finish):
    """A reply of Messages: blocks of thoughts and texts, then calls."""
    blocks = [{"type": "thinking", "thinking": thought, "signature": "c2ln"} for thought in thoughts]
    blocks += [{"type": "text", "text": text} for text in texts]
    for number, (name, values, command) in enumerate(called):
        given = {"input": command} if name == "shell" else values
        blocks.append({"type": "tool_use", "id": f"call_{number}", "name": name, "input": given})
    reason = {
        "stop": "tool_use" if called else "end_turn",
        "length": "max_tokens",
        "content_filter": "refusal",
    }
    counts = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 5}
    usage = {**counts, "output_tokens_details": {"thinking_tokens": 2}}
    about = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_sequence": None}
    return {**about, "content": blocks, "stop_reason": reason[finish], "usage": usage}


def translate(dialect, stream, step, server=CHAT):
    """The events of a stream that arrives in pieces of `step` bytes, in another dialect; the whole reply."""
    reader, writer = server.open_chunks(), dialect.write_stream(CONTEXT)
    events = b""
    for start in range(0, len(stream), step):
        for chunk in reader.read(stream[start : start + step]):
            events += b"".join(writer.write(chunk))
    assert reader.error is None
    assert reader.done
    completion = server.reply_to_chat(reader.reply())
    return events + b"".join(writer.finish(completion)), completion


def read_stream(dialect, events):
    """The reply and the usage that the gateway itself reads from a stream."""
    stream = dialect.stream(AdaptedRequest(RequestTarget("x"), {}, wants_usage=True))
    assert b"".join(stream.events(events)) == events
    assert stream.error is None
    assert stream.ended
    return msgspec.json.decode(stream.reply()), stream.usage


@pytest.mark.parametrize("name", TRANSLATED)
@given(thoughts=said, texts=said, called=calls, finish=finishes, step=st.integers(1, 400))
@settings(max_examples=80, deadline=None)
def test_a_translated_stream_is_the_translated_reply(name, thoughts, texts, called, finish, step):
    dialect = DIALECTS[name]
    stream = b"".join(map(render_event, make_chunks(thoughts, texts, called, finish))) + b"data: [DONE]\n\n"
    events, completion = translate(dialect, stream, step)
    streamed, usage = read_stream(dialect, events)
    whole = dialect.reply_from_chat(completion, CONTEXT)
    assert usage == dialect.read_reply(whole).usage == CHAT.count_usage(completion["usage"])
    ours, theirs = dialect.parse_reply(streamed), dialect.parse_reply(msgspec.json.decode(whole))
    assert ours.message is not None
    assert theirs.message is not None
    assert ours.message.text == theirs.message.text == "".join(texts)
    assert ours.message.calls == theirs.message.calls
    assert ours.message.reasoning == theirs.message.reasoning == "".join(thoughts)
    assert (ours.finish, ours.tokens, ours.model) == (theirs.finish, theirs.tokens, "m")
    assert list(ours.tokens.completion) == completion["choices"][0].get("token_ids", [])


@pytest.mark.parametrize("name", ["chat", "responses", "gemini"])
@given(thoughts=said, texts=said, called=calls, finish=finishes, step=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_a_translated_stream_of_messages_is_the_reply(name, thoughts, texts, called, finish, step):
    dialect, server = DIALECTS[name], DIALECTS["messages"]
    body = msgspec.json.encode(make_message(thoughts, texts, called, finish))
    events, completion = translate(dialect, b"".join(server.render_stream(body)), step, server)
    assert completion == server.reply_to_chat(body)
    streamed, usage = read_stream(dialect, events)
    whole = dialect.reply_from_chat(completion, CONTEXT)
    assert usage == dialect.read_reply(whole).usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens) == (
        9,
        4,
        5,
        2,
    )
    ours, theirs = (
        dialect.parse_reply(streamed).message,
        dialect.parse_reply(msgspec.json.decode(whole)).message,
    )
    assert ours.text.replace("\n", "") == theirs.text.replace("\n", "") == "".join(texts).replace("\n", "")
    assert ours.calls == theirs.calls
    texts_of_shell = {"responses": lambda command: command}.get(name, lambda command: {"input": command})
    given_arguments = [texts_of_shell(it[2]) if it[0] == "shell" else it[1] for it in called]
    assert [call.arguments for call in ours.calls] == given_arguments
    assert ours.reasoning.replace("\n", "") == "".join(thoughts).replace("\n", "")


@pytest.mark.parametrize("name", TRANSLATED)
def test_the_first_text_does_not_wait_for_the_next(name):
    writer = DIALECTS[name].write_stream(CONTEXT)
    [first, second, *_] = make_chunks((), ("early", "late"), (), "stop")
    events = b"".join([*writer.write(first), *writer.write(second)])
    assert b"early" in events


def test_two_calls_that_alternate_are_refused():
    writer = DIALECTS["messages"].write_stream(CONTEXT)
    deltas = [{"tool_calls": [{"index": n, "function": {"name": "f", "arguments": "{"}}]} for n in (0, 1, 0)]
    with pytest.raises(ValueError, match="tool call 0 goes on"):
        for delta in deltas:
            list(writer.write({"choices": [{"index": 0, "delta": delta}]}))
