"""Renders a scripted reply in each dialect: as one body, as stream events, and as an error.

It reads only the fields of a request in `ScriptedRequest`; `scripted_model.py` serves the result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..dialect.conversion import ReplyContext
from ..dialect.interface import Dialect
from ..dialect.sse import decode_object
from ..dialect.sse import render_event as encode_event

if TYPE_CHECKING:
    from .scripted_model import ScriptedReply

CHARS_PER_TOKEN = 4
PIECES = 8  # the most chunks of a streamed text
FAILED = "the model failed inside its reply"


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ScriptedRequest(msgspec.Struct):
    """The fields of a request that shape the reply; msgspec skips the rest, messages included."""

    model: str = "scripted"
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    size: int = 0

    @classmethod
    def of(cls, body: bytes) -> ScriptedRequest:
        asked = msgspec.json.decode(body, type=cls)
        asked.size = len(body)
        return asked

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def tokens(self, reply: ScriptedReply) -> tuple[int, int]:
        """Return the token counts of the request and of the reply."""
        said = len(reply.text) + len(reply.reasoning) + sum(len(str(c)) for c in reply.tool_calls)
        return max(self.size // CHARS_PER_TOKEN, reply.cached), -(-said // CHARS_PER_TOKEN)


class DialectWire(Protocol):
    """The wire format of one dialect, as a server writes it."""

    def render_reply(self, reply: ScriptedReply, asked: ScriptedRequest) -> dict[str, Any]: ...

    def render_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[bytes]: ...

    def render_error(self, status: int, message: str) -> dict[str, Any]: ...

    def render_failure(self) -> bytes:
        """Return the event of an error inside a stream."""


def split_text(text: str) -> Iterator[str]:
    size = -(-len(text) // PIECES) or 1
    return (text[i : i + size] for i in range(0, len(text), size))


def _encode_arguments(call: Any) -> str:
    return msgspec.json.encode(call.get("arguments", {})).decode()


class ChatWire:
    def render_reply(self, reply: ScriptedReply, asked: ScriptedRequest) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = self._calls(reply)
        return {
            **self._envelope("chat.completion", asked),
            "choices": [{"index": 0, "message": message, "finish_reason": self._finish(reply)}],
            "usage": self._usage(reply, asked),
        }

    def render_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[bytes]:
        yield from map(encode_event, self._chunks(reply, asked))
        yield b"data: [DONE]\n\n"

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": "scripted", "param": None, "code": None}}

    def render_failure(self) -> bytes:
        return encode_event(self.render_error(500, FAILED))

    def _calls(self, reply: ScriptedReply) -> list[dict[str, Any]]:
        return [
            {
                "id": call.get("id", f"call_{index}"),
                "type": "function",
                "function": {"name": call["name"], "arguments": _encode_arguments(call)},
            }
            for index, call in enumerate(reply.tool_calls)
        ]

    def _finish(self, reply: ScriptedReply) -> str:
        return reply.finish or ("tool_calls" if reply.tool_calls else "stop")

    def _envelope(self, kind: str, asked: ScriptedRequest) -> dict[str, Any]:
        made = {"created": int(time.time()), "model": asked.model}
        return {"id": f"chatcmpl-{asked.size}", "object": kind, **made}

    def _usage(self, reply: ScriptedReply, asked: ScriptedRequest) -> dict[str, Any]:
        prompt, completion = asked.tokens(reply)
        details = {"prompt_tokens_details": {"cached_tokens": reply.cached}} if reply.cached else {}
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return {**counts, "total_tokens": prompt + completion, **details}

    def _chunks(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[dict[str, Any]]:
        envelope = self._envelope("chat.completion.chunk", asked)
        tail = {"usage": None} if asked.wants_usage else {}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return {**envelope, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **tail}

        yield chunk({"role": "assistant", "content": ""})
        for piece in split_text(reply.reasoning):
            yield chunk({"reasoning_content": piece})
        for piece in split_text(reply.text):
            yield chunk({"content": piece})
        for index, call in enumerate(self._calls(reply)):
            function = call["function"]
            opening = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
            yield chunk({"tool_calls": [opening]})
            for piece in split_text(function["arguments"]):
                yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield chunk({}, self._finish(reply))
        if asked.wants_usage:
            yield {**envelope, "choices": [], "usage": self._usage(reply, asked)}


class ResponsesWire:
    def render_reply(self, reply: ScriptedReply, asked: ScriptedRequest) -> dict[str, Any]:
        prompt, completion = asked.tokens(reply)
        cut = reply.finish == "length"
        return {
            **self._opening(asked),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items(reply, asked),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": reply.cached, "cache_write_tokens": 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + completion,
            },
        }

    def render_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[bytes]:
        for number, data in enumerate(self._list_events(reply, asked)):
            yield encode_event({**data, "sequence_number": number}, data["type"])

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        return ChatWire().render_error(status, message)

    def render_failure(self) -> bytes:
        error = {"code": "server_error", "message": FAILED}
        failed = {**self._opening(ScriptedRequest()), "status": "failed", "error": error}
        return encode_event({"type": "response.failed", "response": failed}, "response.failed")

    def _opening(self, asked: ScriptedRequest) -> dict[str, Any]:
        return {
            "id": f"resp_{asked.size}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": asked.model,
            "output": [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": None,
        }

    def _items(self, reply: ScriptedReply, asked: ScriptedRequest) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        if reply.reasoning:
            summary = [{"type": "summary_text", "text": reply.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{asked.size}", "summary": summary})
        if reply.text:
            part = {"type": "output_text", "text": reply.text, "annotations": []}
            own = {"id": f"msg_{asked.size}", "role": "assistant", "status": "completed"}
            items.append({"type": "message", **own, "content": [part]})
        for index, call in enumerate(reply.tool_calls):
            ids = {"id": f"fc_{asked.size}_{index}", "call_id": call.get("id", f"call_{asked.size}_{index}")}
            said = {"name": call["name"], "arguments": _encode_arguments(call)}
            items.append({"type": "function_call", **ids, **said, "status": "completed"})
        return items

    def _list_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[dict[str, Any]]:
        whole = self.render_reply(reply, asked)
        yield {"type": "response.created", "response": self._opening(asked)}
        yield {"type": "response.in_progress", "response": self._opening(asked)}
        for index, item in enumerate(whole["output"]):
            empty = {"content": [], "arguments": "", "status": "in_progress"}
            added = {**item, **{field: value for field, value in empty.items() if field in item}}
            yield {"type": "response.output_item.added", "output_index": index, "item": added}
            yield from self._deltas(index, item)
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _deltas(self, index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        where = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            for piece in split_text(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **where, "delta": piece}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **where, **done}
        elif item["type"] == "message":
            part, where = item["content"][0], {**where, "content_index": 0}
            yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
            for piece in split_text(part["text"]):
                yield {"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **where, "part": part}


class MessagesWire:
    def render_reply(self, reply: ScriptedReply, asked: ScriptedRequest) -> dict[str, Any]:
        prompt, completion = asked.tokens(reply)
        counts = {"input_tokens": prompt - reply.cached, "cache_read_input_tokens": reply.cached}
        return {
            "id": f"msg_{asked.size}",
            "type": "message",
            "role": "assistant",
            "model": asked.model,
            "content": self._blocks(reply, asked),
            "stop_reason": self._stop(reply),
            "stop_sequence": None,
            "usage": {**counts, "cache_creation_input_tokens": 0, "output_tokens": completion},
        }

    def render_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[bytes]:
        return (encode_event(data, data["type"]) for data in self._list_events(reply, asked))

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": "scripted_error", "message": message}}

    def render_failure(self) -> bytes:
        return encode_event(
            {"type": "error", "error": {"type": "overloaded_error", "message": FAILED}}, "error"
        )

    def _blocks(self, reply: ScriptedReply, asked: ScriptedRequest) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if reply.reasoning:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": "c2lnbmVk"})
        if reply.text:
            blocks.append({"type": "text", "text": reply.text})
        for index, call in enumerate(reply.tool_calls):
            said = {"name": call["name"], "input": call.get("arguments", {})}
            blocks.append({"type": "tool_use", "id": call.get("id", f"toolu_{asked.size}_{index}"), **said})
        return blocks

    def _stop(self, reply: ScriptedReply) -> str:
        if reply.finish == "length":
            return "max_tokens"
        return "tool_use" if reply.tool_calls else "end_turn"

    def _list_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[dict[str, Any]]:
        whole = self.render_reply(reply, asked)
        usage = whole["usage"]
        begun = {**usage, "output_tokens": min(1, usage["output_tokens"])}
        opening = {**whole, "content": [], "stop_reason": None, "usage": begun}
        yield {"type": "message_start", "message": opening}
        yield {"type": "ping"}
        for index, block in enumerate(whole["content"]):
            empty = {"thinking": "", "signature": "", "text": "", "input": {}}
            start = {**block, **{k: v for k, v in empty.items() if k in block}}
            yield {"type": "content_block_start", "index": index, "content_block": start}
            for delta in self._deltas(block):
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield {"type": "message_delta", "delta": stop, "usage": {"output_tokens": usage["output_tokens"]}}
        yield {"type": "message_stop"}

    def _deltas(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if block["type"] == "text":
            yield from ({"type": "text_delta", "text": piece} for piece in split_text(block["text"]))
        elif block["type"] == "thinking":
            yield from ({"type": "thinking_delta", "thinking": p} for p in split_text(block["thinking"]))
            yield {"type": "signature_delta", "signature": block["signature"]}
        else:
            said = msgspec.json.encode(block["input"]).decode()
            yield from ({"type": "input_json_delta", "partial_json": piece} for piece in split_text(said))


class GeminiWire:
    def render_reply(self, reply: ScriptedReply, asked: ScriptedRequest) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [
            *([{"text": reply.reasoning, "thought": True}] if reply.reasoning else []),
            *([{"text": reply.text}] if reply.text else []),
            *self._calls(reply),
        ]
        return self._chunk(parts, reply, asked, last=True)

    def render_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[bytes]:
        for piece in split_text(reply.reasoning):
            yield encode_event(self._chunk([{"text": piece, "thought": True}], reply, asked))
        for piece in split_text(reply.text):
            yield encode_event(self._chunk([{"text": piece}], reply, asked))
        yield encode_event(self._chunk(self._calls(reply), reply, asked, last=True))

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        return {"error": {"code": status, "message": message, "status": "SCRIPTED"}}

    def render_failure(self) -> bytes:
        return encode_event(self.render_error(500, FAILED))

    def _calls(self, reply: ScriptedReply) -> list[dict[str, Any]]:
        return [
            {"functionCall": {"name": call["name"], "args": call.get("arguments", {})}}
            for call in reply.tool_calls
        ]

    def _chunk(
        self, parts: list[dict[str, Any]], reply: ScriptedReply, asked: ScriptedRequest, last: bool = False
    ) -> dict[str, Any]:
        prompt, completion = asked.tokens(reply)
        finish = {"finishReason": "MAX_TOKENS" if reply.finish == "length" else "STOP"} if last else {}
        counts = {"promptTokenCount": prompt, "candidatesTokenCount": completion}
        cached = {"cachedContentTokenCount": reply.cached} if reply.cached else {}
        return {
            "candidates": [{"content": {"parts": parts, "role": "model"}, **finish, "index": 0}],
            "usageMetadata": {**counts, **cached, "totalTokenCount": prompt + completion},
            "modelVersion": asked.model,
            "responseId": f"gen-{asked.size}",
        }


class ConvertedWire:
    """The wire format of a dialect without a class of its own here: the dialect converts Chat Completions."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    def render_reply(self, reply: ScriptedReply, asked: ScriptedRequest) -> dict[str, Any]:
        completion = ChatWire().render_reply(reply, asked)
        return decode_object(self._dialect.reply_from_chat(completion, ReplyContext(asked.model)))

    def render_events(self, reply: ScriptedReply, asked: ScriptedRequest) -> Iterator[bytes]:
        return iter(self._dialect.render_stream(msgspec.json.encode(self.render_reply(reply, asked))))

    def render_error(self, status: int, message: str) -> dict[str, Any]:
        return decode_object(self._dialect.error_body(status, message))

    def render_failure(self) -> bytes:
        return encode_event(self.render_error(500, FAILED))


# These do not use the code of `dialect/`, so that tests of it have something to compare it with.
WIRES: dict[str, DialectWire] = {
    "chat": ChatWire(),
    "responses": ResponsesWire(),
    "messages": MessagesWire(),
    "gemini": GeminiWire(),
}
