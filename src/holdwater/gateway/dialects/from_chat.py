"""Converts a `chat.completion` to a complete reply of any dialect: text, reasoning, calls, end, usage.

The other dialects have no field for token ids, log probabilities and the policy's version. These go to the
top of the reply, under their Chat Completions names: see `ledger/dialects/chat.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ...ledger.message import as_dict, as_list, as_string
from .to_chat import INPUT_PARAMETER

Object = dict[str, Any]
_CHOICE_FIELDS = ("token_ids", "logprobs")  # fields of the choice
_COMPLETION_FIELDS = ("prompt_token_ids", "policy_version")  # fields of the completion


class ReplyContext(NamedTuple):
    """The parts of a request that its reply depends on."""

    model: str = ""
    custom: frozenset[str] = frozenset()  # the tools that take a text instead of an object


def convert_reply(dialect: str, completion: Object, wanted: ReplyContext = ReplyContext()) -> bytes:  # noqa: B008 (frozen)
    """Return `completion` as a reply of `dialect`. Missing ids are generated."""
    if dialect == "chat":
        return msgspec.json.encode(completion)
    choice = as_dict(next(iter(as_list(completion.get("choices"))), None))
    said = _CompletionContent(completion, choice, wanted)
    beside = {name: choice[name] for name in _CHOICE_FIELDS if choice.get(name) is not None}
    beyond = {name: completion[name] for name in _COMPLETION_FIELDS if completion.get(name) is not None}
    return msgspec.json.encode({**_REPLIES[dialect](said), **beside, **beyond})


class _CompletionContent:
    """The content of a completion that all dialects can express."""

    def __init__(self, completion: Object, choice: Object, wanted: ReplyContext) -> None:
        message = as_dict(choice.get("message"))
        self.id = secrets.token_hex(12)
        self.model = as_string(completion.get("model")) or wanted.model
        self.text = _join_text(message.get("content")) or as_string(message.get("refusal"))
        self.thoughts = as_string(message.get("reasoning_content")) or as_string(message.get("reasoning"))
        self.calls = [_parse_call(as_dict(call)) for call in as_list(message.get("tool_calls"))]
        self.finish = as_string(choice.get("finish_reason"))
        self.custom = wanted.custom
        usage = as_dict(completion.get("usage"))
        self.prompt = _count_tokens(usage.get("prompt_tokens"), completion.get("prompt_token_ids"))
        self.sampled = _count_tokens(usage.get("completion_tokens"), choice.get("token_ids"))
        self.cached = _count_tokens(as_dict(usage.get("prompt_tokens_details")).get("cached_tokens"), None)


class _ReplyCall(NamedTuple):
    id: str
    name: str
    arguments: str
    custom: bool

    @property
    def object(self) -> Object:
        """The arguments as an object; invalid JSON becomes the only field of one."""
        try:
            return msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return {"arguments": self.arguments}

    @property
    def input(self) -> str:
        """The text for a tool that takes a text."""
        given = self.object.get(INPUT_PARAMETER)
        return given if isinstance(given, str) and not self.custom else self.arguments


def _parse_call(call: Object) -> _ReplyCall:
    custom = as_dict(call.get("custom"))
    called = custom or as_dict(call.get("function"))
    given = called.get("input" if custom else "arguments")
    text = given if isinstance(given, str) else msgspec.json.encode({} if given is None else given).decode()
    made_up = f"call_{secrets.token_hex(12)}"
    return _ReplyCall(as_string(call.get("id")) or made_up, as_string(called.get("name")), text, bool(custom))


def _join_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(as_string(as_dict(part).get("text")) for part in content)
    return as_string(content)


def _count_tokens(count: Any, ids: Any) -> int:
    """Return the reported count, or else the number of ids."""
    return count if isinstance(count, int) else len(as_list(ids))


def _render_responses(said: _CompletionContent) -> Object:
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(said.finish)
    return {
        "id": f"resp_{said.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": said.model,
        "output": list(_render_items(said)),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": said.prompt,
            "input_tokens_details": {"cached_tokens": said.cached},
            "output_tokens": said.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": said.prompt + said.sampled,
        },
    }


def _render_items(said: _CompletionContent) -> Iterator[Object]:
    if said.thoughts:
        summary = [{"type": "summary_text", "text": said.thoughts}]
        yield {"type": "reasoning", "id": f"rs_{said.id}", "summary": summary}
    if said.text or not said.calls:
        part = {"type": "output_text", "text": said.text, "annotations": []}
        own = {"id": f"msg_{said.id}", "role": "assistant", "status": "completed"}
        yield {"type": "message", **own, "content": [part]}
    for place, call in enumerate(said.calls):
        ids = {"call_id": call.id, "name": call.name, "status": "completed"}
        if call.custom or call.name in said.custom:
            yield {"type": "custom_tool_call", "id": f"ctc_{said.id}_{place}", **ids, "input": call.input}
        else:
            own = {"id": f"fc_{said.id}_{place}", "arguments": call.arguments}
            yield {"type": "function_call", **own, **ids}


def _render_messages(said: _CompletionContent) -> Object:
    stop = {"length": "max_tokens", "content_filter": "refusal"}.get(said.finish)
    return {
        "id": f"msg_{said.id}",
        "type": "message",
        "role": "assistant",
        "model": said.model,
        "content": list(_render_blocks(said)),
        "stop_reason": stop or ("tool_use" if said.calls else "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": said.prompt - said.cached,
            "cache_read_input_tokens": said.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": said.sampled,
        },
    }


def _render_blocks(said: _CompletionContent) -> Iterator[Object]:
    if said.thoughts:
        yield {"type": "thinking", "thinking": said.thoughts, "signature": ""}
    if said.text or not said.calls:
        yield {"type": "text", "text": said.text}
    for call in said.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.object}


def _render_gemini(said: _CompletionContent) -> Object:
    parts: list[Object] = [{"text": said.thoughts, "thought": True}] if said.thoughts else []
    if said.text or not said.calls:
        parts.append({"text": said.text})
    for call in said.calls:
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": call.object}})
    finish = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(said.finish, "STOP")
    content = {"parts": parts, "role": "model"}
    counts = {"promptTokenCount": said.prompt, "candidatesTokenCount": said.sampled}
    cached = {"cachedContentTokenCount": said.cached} if said.cached else {}
    return {
        "candidates": [{"content": content, "finishReason": finish, "index": 0}],
        "usageMetadata": {**counts, **cached, "totalTokenCount": said.prompt + said.sampled},
        "modelVersion": said.model,
        "responseId": said.id,
    }


_REPLIES = {"responses": _render_responses, "messages": _render_messages, "gemini": _render_gemini}
