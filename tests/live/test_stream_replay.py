"""A stream that is served again from its record leads a client to the same message as the first time.

The accumulators are those of the SDKs themselves, and a plain one on dictionaries, as LiteLLM has.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.live.test_gateway_clients import client_library

from holdwater.dialect import DIALECTS
from holdwater.dialect.interface import AdaptedRequest, ReplyFormat, RequestTarget
from holdwater.gateway.upstreams.complete_reply import CompleteReply
from holdwater.testing.reply_formats import encode_event

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.timeout(600),  # the SDKs take long to import on a busy machine
]

ABSENT = object()
EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

text = st.text(max_size=6)
pieces = st.lists(text, max_size=3)
absent = st.just(ABSENT)
missing = absent | st.none()
# Absent, null, empty, or said in pieces, of which the first may be null.
said = missing | st.just([""]) | pieces | pieces.map(lambda texts: [None, *texts])
JSON = st.recursive(
    st.booleans() | st.integers(-99, 99) | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
inputs = st.dictionaries(text, JSON, max_size=2)


def present(**fields):
    """The fields that there are."""
    return {name: value for name, value in fields.items() if value is not ABSENT}


def spread(field, value):
    """The deltas that say a field: none, one that is null, or one for each piece."""
    if value is ABSENT:
        return []
    return [{field: piece} for piece in (value if isinstance(value, list) else [value])]


def replay(dialect, original):
    """The events of `original` as they are served again from the record that is made of them."""
    stream = DIALECTS[dialect].stream(AdaptedRequest(RequestTarget("x"), {}, wants_usage=True))
    assert b"".join(stream.events(original)) == original
    assert stream.error is None
    answer = CompleteReply(stream.reply(), DIALECTS[dialect], ReplyFormat.EVENTS, "", stream.chunks)
    return b"".join(answer._pieces)


def data_of(stream):
    """The data of the events, decoded, without the end mark."""
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


# --- Chat Completions

chat_calls = st.fixed_dictionaries(
    {
        "id": text.filter(bool),
        "name": text.filter(bool),
        "arguments": missing | pieces,
        "later": st.sampled_from([{}, {"id": None}, {"id": "", "type": "function"}]),
    }
)
chat_messages = st.fixed_dictionaries(
    {
        "first": st.booleans(),  # the first delta has the first piece of the content beside the role
        "content": said,
        "texts": st.fixed_dictionaries({"reasoning_content": said, "refusal": said}),
        "calls": missing | st.lists(chat_calls, max_size=2),
        "logprobs": missing | st.just({"content": None}) | st.just({"content": [{"token": "a"}]}),
        "finish": st.sampled_from(["stop", "tool_calls"]),
        "system_fingerprint": missing | text,
    }
)


def chat_call(place, call):
    """The first delta names the function; some servers repeat its id later, empty or null."""
    arguments = call["arguments"]
    first = present(name=call["name"], arguments=arguments[:1] if isinstance(arguments, list) else arguments)
    if isinstance(first.get("arguments"), list):
        first["arguments"] = "".join(first["arguments"])
    yield {"index": place, "id": call["id"], "type": "function", "function": first}
    for piece in arguments[1:] if isinstance(arguments, list) else ():
        yield {"index": place, **call["later"], "function": {"arguments": piece}}


def chat_stream(message):
    content = spread("content", message["content"])
    deltas = [{"role": "assistant", **(content.pop(0) if content and message["first"] else {})}]
    for field, value in message["texts"].items():
        deltas += spread(field, value)
    deltas += content
    calls = message["calls"]
    if calls is None or calls == []:
        deltas.append({"tool_calls": calls})
    elif calls is not ABSENT:
        deltas += [{"tool_calls": [d]} for place, call in enumerate(calls) for d in chat_call(place, call)]
    about = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    about |= present(system_fingerprint=message["system_fingerprint"])
    beside = present(logprobs=message["logprobs"])
    chunks = [{**about, "choices": [{"index": 0, **beside, "delta": delta}]} for delta in deltas[:1]]
    chunks += [
        {**about, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas[1:]
    ]
    chunks.append({**about, "choices": [{"index": 0, "delta": {}, "finish_reason": message["finish"]}]})
    chunks.append({**about, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
    return b"".join(map(encode_event, chunks)) + b"data: [DONE]\n\n"


def chat_of_openai(stream):
    streaming = client_library("openai.lib.streaming.chat")
    chunk = client_library("openai.types.chat").ChatCompletionChunk
    construct = client_library("openai._models").construct_type
    state = streaming.ChatCompletionStreamState()
    for data in data_of(stream):
        state.handle_chunk(construct(type_=chunk, value=data))
    snapshot = state.current_completion_snapshot.to_dict()
    for choice in snapshot["choices"]:
        # The SDK fills in what is null here when another chunk comes.
        logprobs = choice.pop("logprobs", None) or {}
        choice["logprobs"] = {field: listed for field, listed in logprobs.items() if listed is not None}
    return snapshot


def chat_of_dictionaries(stream):
    """A text is there if any delta has one, and a call has what its deltas have."""
    message, calls = {}, {}
    for data in data_of(stream):
        for choice in data["choices"]:
            delta = dict(choice["delta"])
            for call in delta.pop("tool_calls", None) or ():
                known = calls.setdefault(call["index"], {"arguments": None})
                known["id"] = known.get("id") or call.get("id")
                known["type"] = known.get("type") or call.get("type")
                known["name"] = known.get("name") or call["function"].get("name")
                if (more := call["function"].get("arguments")) is not None:
                    known["arguments"] = (known["arguments"] or "") + more
            for field, value in delta.items():
                known = message.get(field)
                message[field] = known if value is None else (known or "") + value
    return message, calls


@EXAMPLES
@given(chat_messages)
@example(
    {
        "first": True,
        "content": [""],
        "texts": {"reasoning_content": ABSENT, "refusal": ABSENT},
        "calls": [{"id": "c", "name": "f", "arguments": ["{", "}"], "later": {}}],
        "logprobs": ABSENT,
        "finish": "tool_calls",
        "system_fingerprint": ABSENT,
    }
)
def test_a_chat_that_is_streamed_again_makes_the_same_message(message):
    original = chat_stream(message)
    again = replay("chat", original)
    assert chat_of_dictionaries(again) == chat_of_dictionaries(original)
    assert chat_of_openai(again) == chat_of_openai(original)
    assert chat_of_openai(replay("chat", again)) == chat_of_openai(original)


# --- Messages

citations = st.lists(
    st.fixed_dictionaries({"type": st.just("char_location"), "cited_text": text}), min_size=1, max_size=2
)
blocks = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("text"), "text": pieces, "citations": missing | st.just([]) | citations}
    ),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": pieces, "signature": absent | text}),
    st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": text}),
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["tool_use", "server_tool_use"]),
            "id": text,
            "name": text,
            "input": inputs,
            "spaced": st.booleans(),
            "caller": missing | st.just({"type": "direct"}),
        }
    ),
)
messages = st.fixed_dictionaries(
    {
        "content": st.lists(blocks, max_size=3),
        "stop_reason": st.sampled_from(["end_turn", "tool_use"]),
        "stop_sequence": missing | text,
        "container": missing | st.just({"id": "c", "expires_at": "2026"}),
        "service_tier": missing | text,
    }
)


def block_events(block):
    """The start of a block, and its deltas."""
    block = present(**block)
    deltas = []
    if block["type"] == "text":
        deltas = [{"type": "text_delta", "text": piece} for piece in block["text"]]
        block["text"] = ""
        for note in block.get("citations") or ():
            deltas.append({"type": "citations_delta", "citation": note})
        if block.get("citations"):
            block["citations"] = None
    elif block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in block["thinking"]]
        if "signature" in block:
            deltas.append({"type": "signature_delta", "signature": block.pop("signature")})
        block["thinking"] = ""
    elif "input" in block:
        whole = json.dumps(block["input"], separators=None if block.pop("spaced") else (",", ":"))
        texts = ["", whole[:2], whole[2:]] if block["input"] else [""]
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in texts]
        block["input"] = {}
    return block, deltas


def messages_stream(message):
    usage = present(input_tokens=5, output_tokens=1, service_tier=message["service_tier"])
    start = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    events = [{"type": "message_start", "message": {**start, "stop_reason": None, "stop_sequence": None}}]
    for place, (block, deltas) in enumerate(map(block_events, message["content"])):
        events.append({"type": "content_block_start", "index": place, "content_block": block})
        events += ({"type": "content_block_delta", "index": place, "delta": delta} for delta in deltas)
        events.append({"type": "content_block_stop", "index": place})
    ends = present(**{name: message[name] for name in ("stop_reason", "stop_sequence", "container")})
    events += [{"type": "message_delta", "delta": ends, "usage": {"output_tokens": 9}}]
    return b"".join(encode_event(data, data["type"]) for data in [*events, {"type": "message_stop"}])


def message_of_anthropic(stream):
    accumulate = client_library("anthropic.lib.streaming._messages").accumulate_event
    snapshot, buffers = None, {}
    for data in data_of(stream):
        snapshot = accumulate(event=data, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


@EXAMPLES
@given(messages)
def test_a_message_that_is_streamed_again_has_the_same_blocks(message):
    original = messages_stream(message)
    again = replay("messages", original)
    one, other = message_of_anthropic(again), message_of_anthropic(original)
    assert one.pop("container", None) == other.pop("container", None)
    assert one == other


# --- Responses

parts = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("output_text"),
            "text": pieces,
            "annotations": st.just([]),
            "logprobs": missing | st.just([]),
        }
    ),
    st.fixed_dictionaries({"type": st.just("refusal"), "refusal": pieces}),
)
thoughts = st.fixed_dictionaries({"type": st.just("summary_text"), "text": pieces})
items = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.just("message"),
            "role": st.just("assistant"),
            "content": st.lists(parts, max_size=2),
            "phase": absent | st.sampled_from(["commentary", "final_answer"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("reasoning"),
            "summary": st.lists(thoughts, max_size=2),
            "encrypted_content": missing | text,
            "content": missing | st.just([]),
        }
    ),
    st.fixed_dictionaries({"type": st.just("function_call"), "name": text, "arguments": pieces}),
)
responses = st.fixed_dictionaries(
    {"output": st.lists(items, max_size=3), "instructions": missing | text, "bare_end": st.booleans()}
)
TEXTS = {
    "output_text": ("text", "response.output_text"),
    "refusal": ("refusal", "response.refusal"),
    "summary_text": ("text", "response.reasoning_summary_text"),
}
PARTS = {
    "content": ("content_index", "response.content_part"),
    "summary": ("summary_index", "response.reasoning_summary_part"),
}


def part_events(part, where, name):
    field, delta = TEXTS[part["type"]]
    texts, part = part[field], present(**part)
    yield {"type": f"{name}.added", **where, "part": {**part, field: ""}}
    yield from ({"type": f"{delta}.delta", **where, "delta": piece, "logprobs": []} for piece in texts)
    part[field] = "".join(texts)
    yield {"type": f"{delta}.done", **where, field: part[field], "logprobs": []}
    yield {"type": f"{name}.done", **where, "part": part}
    return part


def item_events(place, item):
    """The events of an item; returns it as it is when it is done."""
    item = {"id": f"i_{place}", "status": "completed", **present(**item)}
    if item["type"] == "function_call":
        item["call_id"] = f"call_{place}"
    where = {"item_id": item["id"], "output_index": place}
    lists = {field for field in PARTS if item.get(field) is not None}
    texts = item.get("arguments", [])
    begun = {**item, "status": "in_progress", **{field: [] for field in lists}}
    begun |= {"arguments": ""} if "arguments" in item else {}
    yield {"type": "response.output_item.added", "output_index": place, "item": begun}
    for field in lists:
        number, name = PARTS[field]
        done = []
        for n, part in enumerate(item[field]):
            done.append((yield from part_events(part, {**where, number: n}, name)))
        item[field] = done
    if "arguments" in item:
        name = "response.function_call_arguments"
        yield from ({"type": f"{name}.delta", **where, "delta": piece} for piece in texts)
        item["arguments"] = "".join(texts)
        yield {"type": f"{name}.done", **where, "arguments": item["arguments"], "name": item["name"]}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}
    return item


def responses_stream(response):
    """`bare_end`: the last event leaves the output out, as some backends do."""
    about = {"id": "r", "object": "response", "created_at": 1, "model": "m", "tools": [], "error": None}
    about |= present(instructions=response["instructions"])
    events = [{"type": "response.created", "response": {**about, "status": "in_progress", "output": []}}]
    output = []

    def told():
        for place, item in enumerate(response["output"]):
            output.append((yield from item_events(place, item)))

    events += told()
    whole = {**about, "status": "completed", "output": [] if response["bare_end"] else output}
    usage = {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}
    events.append({"type": "response.completed", "response": {**whole, "usage": usage}})
    return b"".join(
        encode_event({**data, "sequence_number": n}, data["type"]) for n, data in enumerate(events)
    ), output


def response_of_openai(stream):
    streaming = client_library("openai.lib.streaming.responses._responses")
    events = client_library("openai.types.responses").ResponseStreamEvent
    omit = client_library("openai").omit
    construct = client_library("openai._models").construct_type
    state = streaming.ResponseStreamState(input_tools=omit, text_format=omit)
    for data in data_of(stream):
        state.handle_event(construct(type_=events, value=data))
    return state._completed_response.to_dict()


def items_done(stream):
    """As clients that keep each item when it is done."""
    return [data["item"] for data in data_of(stream) if data["type"] == "response.output_item.done"]


@EXAMPLES
@given(responses)
def test_a_response_that_is_streamed_again_has_the_same_items(response):
    original, output = responses_stream(response)
    again = replay("responses", original)
    assert items_done(again) == items_done(original) == output
    if not response["bare_end"]:
        assert response_of_openai(again) == response_of_openai(original)


# --- Gemini

signatures = missing | st.just("c2ln")
part = st.one_of(
    st.fixed_dictionaries(
        {"text": text, "thought": absent | st.booleans(), "thoughtSignature": absent | st.just("c2ln")}
    ),
    st.fixed_dictionaries(
        {"functionCall": st.fixed_dictionaries({"name": text, "args": inputs}), "thoughtSignature": absent}
    ),
)
gemini_chunks = st.lists(
    st.fixed_dictionaries(
        {
            "parts": missing | st.lists(part, max_size=2),
            "role": absent | st.just("model"),
            "bare": st.booleans(),
        }
    ),
    max_size=4,
)


def gemini_stream(chunks):
    """`bare`: a chunk without content, as the one that only has the usage."""
    events = []
    for chunk in chunks:
        parts = chunk["parts"]
        if isinstance(parts, list):
            parts = [present(**part) for part in parts]
        content = {} if chunk["bare"] else {"content": present(parts=parts, role=chunk["role"])}
        events.append({"candidates": [{"index": 0, **content}], "modelVersion": "m"})
    last = {"finishReason": "STOP", "index": 0, "content": {"parts": [{"text": ""}], "role": "model"}}
    events.append({"candidates": [last], "usageMetadata": {"promptTokenCount": 5}})
    return b"".join(map(encode_event, events))


@pytest.fixture(scope="module")
def chat_of_google():
    """Asks Google's own chat for its history after it was told a stream."""
    genai = client_library("google.genai")

    class Telling(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Content-Length", str(len(self.server.stream)))
            self.end_headers()
            self.wfile.write(self.server.stream)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Telling)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = genai.types.HttpOptions(base_url=f"http://127.0.0.1:{server.server_port}")

    def told(stream):
        server.stream = stream
        chat = client.chats.create(model="m")
        for _ in chat.send_message_stream("go on"):
            pass
        histories = [chat.get_history(curated=curated) for curated in (False, True)]
        return [[content.model_dump(exclude_unset=True) for content in history] for history in histories]

    with genai.Client(api_key="k", http_options=options) as client:
        yield told
    server.shutdown()
    server.server_close()


@settings(parent=EXAMPLES, max_examples=30)
@given(gemini_chunks)
def test_a_gemini_chat_that_is_streamed_again_has_the_same_history(chat_of_google, chunks):
    original = gemini_stream(chunks)
    assert chat_of_google(replay("gemini", original)) == chat_of_google(original)
