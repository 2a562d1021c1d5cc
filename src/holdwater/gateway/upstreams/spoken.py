"""What somebody says in the place of a model, as a whole reply in the dialect of the call.

It may be a text, a message of Chat Completions, a `chat.completion`, or a reply of the dialect itself.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import msgspec

from ...core.errors import ModelFailed
from ...core.serving import Answer
from ...ledger.message import fields, items
from ..dialects.asking import custom_tools
from ..dialects.replying import Wanted, from_chat
from ..dialects.sse import MISSHAPEN
from . import Call

_PATH = re.compile(r"[^/]+/(?:models/)?(.+):\w+")
_OWN = {"responses": "output", "messages": "stop_reason", "gemini": "candidates"}  # in their replies alone


class _Shape(msgspec.Struct):
    model: Any = None
    tools: Any = None


def wanted_by(call: Call) -> Wanted:
    """What the reply to a call has to know of it, while its body is at hand."""
    try:
        shape = msgspec.json.decode(call.body.taken(), type=_Shape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFailed(f"the request cannot be read: {error}", kind="invalid", again=False) from None
    in_path = _PATH.match(call.path) if call.dialect == "gemini" else None
    model = in_path[1] if in_path else shape.model
    custom = custom_tools({"tools": shape.tools}) if call.dialect == "responses" else frozenset[str]()
    return Wanted(model if isinstance(model, str) else "", custom)


def answered(answer: Answer, dialect: str, wanted: Wanted) -> bytes:
    """A trainer's answer."""
    if answer.error is not None:
        raise ModelFailed(f"the trainer answered with an error: {answer.error}", kind="policy")
    reply = answer.reply
    if reply is not None and _OWN.get(dialect, "choices") in reply:
        return msgspec.json.encode(reply)
    return said(answer.text if reply is None else reply, dialect, wanted)


def said(what: Any, dialect: str, wanted: Wanted) -> bytes:
    """What a policy returned: a text, a message or a `chat.completion`."""
    try:
        return from_chat(dialect, completion(what, wanted.model or "policy"), wanted)
    except MISSHAPEN as error:
        raise ModelFailed(f"the policy's answer makes no reply: {error}", kind="policy") from error


def completion(what: Any, model: str) -> dict[str, Any]:
    """As a `chat.completion`, with a reason to end: clients wait for one."""
    if isinstance(what, dict) and "choices" in what:
        choices = [
            {**choice, "finish_reason": choice.get("finish_reason") or _finish(choice.get("message"))}
            for choice in what["choices"]
        ]
        return {**what, "choices": choices}
    if isinstance(what, str):
        what = {"content": what}
    if not isinstance(what, dict):
        raise ModelFailed(f"the policy returned {type(what).__name__}, not a str or a dict", kind="policy")
    message = {"role": "assistant", "content": None, **what}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",  # a later request may name it
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(message)}],
    }


def _finish(message: Any) -> str:
    return "tool_calls" if items(fields(message).get("tool_calls")) else "stop"
