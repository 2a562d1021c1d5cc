"""OpenAI Chat Completions.

Its streams report usage only on request: the gateway requests it, and removes it from the stream if the
client did not. Policies and trainers get all requests in this dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Raw

from .conversion import ReplyContext
from .interface import AdaptedRequest, RequestTarget
from .message import (
    ROLES,
    CommonMessage,
    ModelReply,
    ToolCall,
    as_dict,
    as_list,
    as_string,
    make_function_tool,
    parse_arguments,
)
from .openai import ChoiceStream, OpenAIDialect, check_index, parse_content, request_usage
from .reply_tokens import SAMPLED_FIELD, parse_tokens
from .sse import (
    NULL,
    ChunkStream,
    Object,
    decode_values,
    is_given,
    is_text,
    join_values,
    render_event,
    to_object,
    to_objects,
)
from .stream_writer import Events, StreamWriter
from .untranslated_fields import CHAT_KNOWN, CHAT_RULES


class ChatDialect(OpenAIDialect):
    name = "chat"
    path = "chat/completions"
    known_keys = CHAT_KNOWN
    untranslated = CHAT_RULES

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return request_usage(head, place, model)

    def name_parameter(self, head: Mapping[str, Raw], key: str) -> str:
        # Newer OpenAI models refuse `max_tokens`, and all models refuse both keys together.
        newer = key == "max_tokens" and "max_completion_tokens" in head
        return "max_completion_tokens" if newer else key

    def stream(self, asked: AdaptedRequest) -> ChatStream:
        return ChatStream(asked.wants_usage)

    def render_stream(self, reply: bytes) -> list[bytes]:
        """Return the chunks of the choices' content, then of their ends, then the usage."""
        whole = decode_values(reply)
        choices = list(enumerate(to_objects(whole.pop("choices", NULL))))
        given = [field for field in ("usage", "error") if is_given(whole, field)]
        last = [{"choices": [], field: whole.pop(field)} for field in given]
        said = [{"choices": [delta]} for place, choice in choices for delta in _chat_deltas(place, choice)]
        ends: list[dict[str, Any]] = []
        for place, choice in choices:
            index, finish = choice.get("index", place), choice.get("finish_reason", NULL)
            ends.append({"choices": [{"index": index, "delta": {}, "finish_reason": finish}]})
        parts: list[dict[str, Any]] = [*said, *ends, *last] or [{"choices": ()}]
        kind = {"object": "chat.completion.chunk"}
        again = {field: value for field, value in whole.items() if bytes(value)[:1] not in (b"[", b"{")}
        chunks = [{**(again if n else whole), **kind, **part} for n, part in enumerate(parts)]
        return [*map(render_event, chunks), b"data: [DONE]\n\n"]

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        role = ROLES.get(as_string(item.get("role")), "unknown")
        refusal = as_string(item.get("refusal"))
        yield CommonMessage(
            role=role,
            parts=(*parse_content(item.get("content")), *([refusal] if refusal else [])),
            reasoning=as_string(item.get("reasoning_content")) or as_string(item.get("reasoning")),
            calls=tuple(_parse_calls(item)),
            answers=as_string(item.get("tool_call_id")),
            tool=as_string(item.get("name")) if role == "tool" else "",
        )

    def parse_tools(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from (tool for tool in as_list(head.get("tools")) if isinstance(tool, dict))
        for legacy in map(as_dict, as_list(head.get("functions"))):
            yield make_function_tool(
                as_string(legacy.get("name")), legacy.get("description"), legacy.get("parameters")
            )

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        choices = [as_dict(choice) for choice in as_list(reply.get("choices"))]
        found = [as_dict(choice.get("message")) for choice in choices]
        messages = [message for item in found if item for message in self.parse_message(item)]
        first = choices[0] if choices else {}
        return ModelReply(
            message=messages[0] if messages else None,
            others=tuple(messages[1:]),
            finish=as_string(first.get("finish_reason")),
            model=as_string(reply.get("model")),
            tokens=parse_tokens(reply, first),
        )

    def split_choices(self, reply: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        for choice in map(as_dict, as_list(reply.get("choices"))):
            yield choice.get("message"), {**reply, "choices": [choice]}

    def request_to_chat(self, request: dict[str, Any]) -> dict[str, Any]:
        return request

    def reply_from_chat(self, completion: dict[str, Any], context: ReplyContext) -> bytes:
        return msgspec.json.encode(completion)

    def write_stream(self, context: ReplyContext) -> ChatWriter:
        return ChatWriter(context)

    translates = True
    thought_fields = ("reasoning_content", "reasoning", "reasoning_details")

    def request_from_chat(self, request: dict[str, Any], messages: list[CommonMessage]) -> dict[str, Any]:
        usage = {"stream_options": {"include_usage": True}} if request.get("stream") else {}
        return {**request, **usage}

    def reply_to_chat(self, body: bytes) -> dict[str, Any]:
        return msgspec.json.decode(body, type=dict[str, Any])

    def open_chunks(self) -> ChatChunks:
        return ChatChunks()

    def append_text(self, reply: dict[str, Any], text: str) -> None:
        message = reply["choices"][0]["message"]
        content = message.get("content")
        if isinstance(content, list):
            content.append({"type": "text", "text": text})
        else:
            message["content"] = f"{content}\n\n{text}" if content else text


def _parse_calls(item: dict[str, Any]) -> Iterator[ToolCall]:
    calls = as_list(item.get("tool_calls"))
    if isinstance(item.get("function_call"), dict):
        calls = [*calls, {"function": item["function_call"]}]
    for call in map(as_dict, calls):
        custom = as_dict(call.get("custom"))
        called = as_dict(call.get("function")) or custom
        given = custom.get("input") if custom else parse_arguments(called.get("arguments"))
        yield ToolCall(id=as_string(call.get("id")), name=as_string(called.get("name")), arguments=given)


class ChatStream(ChoiceStream):
    """Assembles a message per choice."""

    def __init__(self, wants_usage: bool) -> None:
        super().__init__(wants_usage)
        self._choices: dict[int, _ChoiceAssembly] = {}

    def _take_choice(self, index: int, choice: dict[str, Any]) -> None:
        self._choices.setdefault(index, _ChoiceAssembly()).take(choice)

    def _assemble(self) -> list[dict[str, Any]]:
        return [self._choices[index].build_choice(index) for index in sorted(self._choices)]

    def _reply(self) -> dict[str, Any]:
        return {**super()._reply(), "object": "chat.completion"}


class ChatChunks(ChunkStream, ChatStream):
    """Returns the chunks of a stream as they are."""

    def __init__(self) -> None:
        ChatStream.__init__(self, wants_usage=True)
        self._made = []

    def take_chunk(self, chunk: dict[str, Any]) -> bool:
        self._made.append({**chunk})
        return super().take_chunk(chunk)


class ChatWriter(StreamWriter):
    """Passes chunks on. The gateway keeps the usage from clients that did not ask for it."""

    def write(self, chunk: dict[str, Any]) -> Events:
        yield render_event(chunk)

    def finish(self, completion: dict[str, Any]) -> Events:
        yield b"data: [DONE]\n\n"


class _ChoiceAssembly:
    """One choice of a reply that came in deltas.

    A field that no delta has is absent, and null differs from empty: a client that receives the reply again
    must send back the same message.
    """

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}  # field -> its pieces
        self._fields: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._arguments: dict[int, list[str]] = {}
        self._beside: dict[str, Any] = {}  # beside the message: token ids, for example
        self._logprobs: dict[str, list[Any] | None] = {}

    def take(self, choice: dict[str, Any]) -> None:
        for field, value in (choice.get("delta") or {}).items():
            if field == "tool_calls" and isinstance(value, list):
                self._fields[field] = []
                for call in value:
                    self._take_call(call)
            elif field == "role":
                self._fields[field] = value or self._fields.get(field, "assistant")
            elif isinstance(value, str):
                self._texts.setdefault(field, []).append(value)
            else:
                self._fields[field] = join_values(self._fields.get(field), value)
        for field, value in (choice.get("logprobs") or {}).items():
            if value is not None:
                self._logprobs[field] = known = self._logprobs.get(field) or []
                known.extend(value)
            else:
                self._logprobs.setdefault(field, None)
        for field in choice.keys() - {"index", "delta"}:
            value = choice[field]
            if field in _REPEATED_FIELDS:
                self._beside[field] = _REPEATED_FIELDS[field](self._beside.get(field), value)
            elif isinstance(value, list):
                self._beside[field] = listed = self._beside.get(field) or []
                listed.extend(value)
            elif field == "logprobs" or value is None:
                self._beside.setdefault(field, None)
            else:
                self._beside[field] = value

    def _take_call(self, call: dict[str, Any]) -> None:
        index = self._find_index(call)
        known = self._calls.setdefault(index, {})
        for field, value in call.items():
            if field == "function" and isinstance(value, dict):
                arguments = value.get("arguments")
                if isinstance(arguments, str):
                    self._arguments.setdefault(index, []).append(arguments)
                named = known.get(field) or {}
                known[field] = {
                    **named,
                    **{name: _renew_name(named.get(name), v) for name, v in value.items()},
                }
            elif field == "custom":
                known[field] = join_values(known.get(field), value)
            elif field != "index":
                known[field] = _renew_name(known.get(field), value)

    def _find_index(self, call: dict[str, Any]) -> int:
        """Return the index of a call. Some upstreams omit it: then a new id begins a new call."""
        if call.get("index") is not None:
            return check_index(call["index"])
        last = max(self._calls, default=0)
        begins = call.get("id") is not None and self._calls.get(last, call).get("id") != call["id"]
        return last + 1 if begins else last

    def build_choice(self, index: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", **self._fields}
        message.update({field: "".join(pieces) for field, pieces in self._texts.items()})
        if self._calls:
            message["tool_calls"] = [self._build_call(i) for i in sorted(self._calls)]
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return {"finish_reason": None, **self._beside, **logprobs, "index": index, "message": message}

    def _build_call(self, index: int) -> dict[str, Any]:
        call = self._calls[index]
        if index not in self._arguments:
            return call
        return {**call, "function": {**call["function"], "arguments": "".join(self._arguments[index])}}


def _join_prompt(old: Any, new: Any) -> Any:
    return new or old


def _join_meta(old: Any, new: Any) -> Any:
    """Join SGLang's facts about the tokens so far: each chunk has all tokens, or the new ones alone."""
    before, more = (as_list(as_dict(meta).get(SAMPLED_FIELD)) for meta in (old, new))
    if not before or more[: len(before)] == before:
        return new or old
    return {**as_dict(old), **as_dict(new), SAMPLED_FIELD: before + more}


# Fields beside the message that a server may repeat in each chunk.
_REPEATED_FIELDS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"prompt_token_ids": _join_prompt, "meta_info": _join_meta}
)


def _renew_name(old: Any, new: Any) -> Any:
    """Return the latest value: some upstreams repeat a name, or leave it null or empty, in each delta."""
    return old if new in (None, "") and old is not None else new


def _chat_deltas(place: int, choice: Object) -> list[dict[str, Any]]:
    """Return the deltas of a choice; token ids and other fields beside the message come with the last one."""
    *before, last = _message_deltas(to_object(choice.get("message", NULL)))
    apart = ("index", "message", "finish_reason")
    beside = {field: value for field, value in choice.items() if field not in apart}
    where = {"index": choice.get("index", place), "finish_reason": None}
    return [*({**where, "delta": delta} for delta in before), {**beside, **where, "delta": last}]


def _message_deltas(message: Object) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a message: reasoning and other fields before the content, tool calls after it."""
    role, calls = message.pop("role", "assistant"), to_objects(message.get("tool_calls", NULL))
    if calls:
        del message["tool_calls"]
    texts = {field: value for field, value in message.items() if is_text(value)}
    content = {"content": texts.pop("content")} if "content" in texts else {}
    others = {field: value for field, value in message.items() if field not in texts}
    yield {"role": role, **others, **dict.fromkeys(content, "")}
    yield from ({field: text} for field, text in texts.items())
    if content:
        yield content
    for place, call in enumerate(calls):
        yield from ({"tool_calls": [{**piece, "index": place}]} for piece in _call_pieces(call))


def _call_pieces(call: Object) -> Iterator[dict[str, Any]]:
    function = to_object(call.get("function", NULL))
    if is_text(function.get("arguments", NULL)):
        yield {**call, "function": {**function, "arguments": ""}}
        yield {"function": {"arguments": function["arguments"]}}
    else:
        yield call
