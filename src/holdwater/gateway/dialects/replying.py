"""A `chat.completion` as a whole reply of any dialect: text, thoughts, tool calls, why it ended, usage.

Token ids, log probabilities and the policy's version, which the other dialects have no place for, stand at
the top of their replies under the names that Chat Completions has: see `ledger/dialects/chat.py`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ...ledger.message import fields, items, string
from .asking import INPUT

Object = dict[str, Any]
_BESIDE = ("token_ids", "logprobs")  # of the choice
_BEYOND = ("prompt_token_ids", "policy_version")  # of the completion


class Wanted(NamedTuple):
    """What a reply has to know of its request."""

    model: str = ""
    custom: frozenset[str] = frozenset()  # the tools that take a text in the place of an object


def from_chat(dialect: str, completion: Object, wanted: Wanted = Wanted()) -> bytes:  # noqa: B008 (frozen)
    """`completion` as a reply of `dialect`. Ids that it lacks are made up."""
    if dialect == "chat":
        return msgspec.json.encode(completion)
    choice = fields(next(iter(items(completion.get("choices"))), None))
    said = _Said(completion, choice, wanted)
    beside = {name: choice[name] for name in _BESIDE if choice.get(name) is not None}
    beyond = {name: completion[name] for name in _BEYOND if completion.get(name) is not None}
    return msgspec.json.encode({**_REPLIES[dialect](said), **beside, **beyond})


class _Said:
    """What a completion says, as far as all dialects can say it."""

    def __init__(self, completion: Object, choice: Object, wanted: Wanted) -> None:
        message = fields(choice.get("message"))
        self.id = secrets.token_hex(12)
        self.model = string(completion.get("model")) or wanted.model
        self.text = _text(message.get("content")) or string(message.get("refusal"))
        self.thoughts = string(message.get("reasoning_content")) or string(message.get("reasoning"))
        self.calls = [_call(fields(call)) for call in items(message.get("tool_calls"))]
        self.finish = string(choice.get("finish_reason"))
        self.custom = wanted.custom
        usage = fields(completion.get("usage"))
        self.prompt = _number(usage.get("prompt_tokens"), completion.get("prompt_token_ids"))
        self.sampled = _number(usage.get("completion_tokens"), choice.get("token_ids"))
        self.cached = _number(fields(usage.get("prompt_tokens_details")).get("cached_tokens"), None)


class _Call(NamedTuple):
    id: str
    name: str
    arguments: str
    custom: bool

    @property
    def object(self) -> Object:
        """The arguments as an object; a text that is none comes as one of its own."""
        try:
            return msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return {"arguments": self.arguments}

    @property
    def input(self) -> str:
        """The text for a tool that takes one."""
        given = self.object.get(INPUT)
        return given if isinstance(given, str) and not self.custom else self.arguments


def _call(call: Object) -> _Call:
    custom = fields(call.get("custom"))
    called = custom or fields(call.get("function"))
    given = called.get("input" if custom else "arguments")
    text = given if isinstance(given, str) else msgspec.json.encode({} if given is None else given).decode()
    made_up = f"call_{secrets.token_hex(12)}"
    return _Call(string(call.get("id")) or made_up, string(called.get("name")), text, bool(custom))


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(string(fields(part).get("text")) for part in content)
    return string(content)


def _number(count: Any, ids: Any) -> int:
    """As it is counted, or as many as there are."""
    return count if isinstance(count, int) else len(items(ids))


def _responses(said: _Said) -> Object:
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
        "output": list(_items(said)),
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


def _items(said: _Said) -> Iterator[Object]:
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


def _messages(said: _Said) -> Object:
    stop = {"length": "max_tokens", "content_filter": "refusal"}.get(said.finish)
    return {
        "id": f"msg_{said.id}",
        "type": "message",
        "role": "assistant",
        "model": said.model,
        "content": list(_blocks(said)),
        "stop_reason": stop or ("tool_use" if said.calls else "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": said.prompt - said.cached,
            "cache_read_input_tokens": said.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": said.sampled,
        },
    }


def _blocks(said: _Said) -> Iterator[Object]:
    if said.thoughts:
        yield {"type": "thinking", "thinking": said.thoughts, "signature": ""}
    if said.text or not said.calls:
        yield {"type": "text", "text": said.text}
    for call in said.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.object}


def _gemini(said: _Said) -> Object:
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


_REPLIES = {"responses": _responses, "messages": _messages, "gemini": _gemini}
