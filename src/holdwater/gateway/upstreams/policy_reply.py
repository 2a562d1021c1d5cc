"""Converts the answer of a policy or a trainer to a complete reply in the dialect of the call.

The answer may be a text, a Chat Completions message, a `chat.completion`, or a reply of the dialect itself.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from ...core.errors import ModelFailed
from ...core.serving_protocol import CallAnswer
from ...dialect import DIALECTS
from ...dialect.conversion import ReplyContext
from ...dialect.interface import Dialect
from ...dialect.message import DECODE_ERRORS, SHAPE_ERRORS, as_dict, as_list
from . import UpstreamCall


def read_context(call: UpstreamCall) -> ReplyContext:
    """Return the parts of a call that its reply depends on; the body must still be available."""
    try:
        return DIALECTS[call.dialect].read_context(call.body.to_bytes(), call.path)
    except DECODE_ERRORS as error:
        raise ModelFailed(f"the request cannot be read: {error}", kind="invalid", again=False) from None


def render_answer(answer: CallAnswer, dialect: Dialect, wanted: ReplyContext) -> bytes:
    """Return a trainer's answer as a reply."""
    if answer.error is not None:
        raise ModelFailed(f"the trainer answered with an error: {answer.error}", kind="policy")
    reply = answer.reply
    if reply is not None and dialect.reply_key in reply:
        return msgspec.json.encode(reply)
    return render_reply(answer.text if reply is None else reply, dialect, wanted)


def render_reply(what: Any, dialect: Dialect, wanted: ReplyContext) -> bytes:
    """Return a policy's result, a text, a message or a `chat.completion`, as a reply."""
    try:
        return dialect.reply_from_chat(make_completion(what, wanted.model or "policy"), wanted)
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
