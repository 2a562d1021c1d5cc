"""Converts the answer of a policy or a trainer to a complete reply in the dialect of the call.

The answer may be a text, a Chat Completions message, a `chat.completion`, or a reply of the dialect itself.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

import msgspec

from ...core.errors import ModelFailed
from ...core.serving_protocol import CallAnswer
from ...ledger.message import as_dict, as_list
from ..dialects.from_chat import ReplyContext, convert_reply
from ..dialects.sse import SHAPE_ERRORS
from ..dialects.to_chat import custom_tools
from . import UpstreamCall

_PATH = re.compile(r"[^/]+/(?:models/)?(.+):\w+")
_OWN_KEYS = {
    "responses": "output",
    "messages": "stop_reason",
    "gemini": "candidates",
}  # only their replies have it


class _RequestShape(msgspec.Struct):
    model: Any = None
    tools: Any = None


def read_context(call: UpstreamCall) -> ReplyContext:
    """Return the parts of a call that its reply depends on; the body must still be available."""
    try:
        shape = msgspec.json.decode(call.body.to_bytes(), type=_RequestShape)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelFailed(f"the request cannot be read: {error}", kind="invalid", again=False) from None
    in_path = _PATH.match(call.path) if call.dialect == "gemini" else None
    model = in_path[1] if in_path else shape.model
    custom = custom_tools({"tools": shape.tools}) if call.dialect == "responses" else frozenset[str]()
    return ReplyContext(model if isinstance(model, str) else "", custom)


def render_answer(answer: CallAnswer, dialect: str, wanted: ReplyContext) -> bytes:
    """Return a trainer's answer as a reply."""
    if answer.error is not None:
        raise ModelFailed(f"the trainer answered with an error: {answer.error}", kind="policy")
    reply = answer.reply
    if reply is not None and _OWN_KEYS.get(dialect, "choices") in reply:
        return msgspec.json.encode(reply)
    return render_reply(answer.text if reply is None else reply, dialect, wanted)


def render_reply(what: Any, dialect: str, wanted: ReplyContext) -> bytes:
    """Return a policy's result, a text, a message or a `chat.completion`, as a reply."""
    try:
        return convert_reply(dialect, make_completion(what, wanted.model or "policy"), wanted)
    except SHAPE_ERRORS as error:
        raise ModelFailed(f"cannot convert the policy's answer to a reply: {error}", kind="policy") from error


def make_completion(what: Any, model: str) -> dict[str, Any]:
    """Return a `chat.completion` with a finish reason: clients wait for one."""
    if isinstance(what, dict) and "choices" in what:
        choices = [
            {
                **choice,
                "finish_reason": choice.get("finish_reason") or _find_finish_reason(choice.get("message")),
            }
            for choice in what["choices"]
        ]
        return {**what, "choices": choices}
    if isinstance(what, str):
        what = {"content": what}
    if not isinstance(what, dict):
        raise ModelFailed(f"the policy returned {type(what).__name__}, not a str or a dict", kind="policy")
    message = {"role": "assistant", "content": None, **what}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",  # later requests may name it
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": _find_finish_reason(message)}],
    }


def _find_finish_reason(message: Any) -> str:
    return "tool_calls" if as_list(as_dict(message).get("tool_calls")) else "stop"
