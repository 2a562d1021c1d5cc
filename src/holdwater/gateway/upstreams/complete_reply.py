"""Complete replies: sent in the requested format, and made from the answers of policies and trainers.

A reply goes out in one piece, in events, or as Google's JSON array. An answer may be a text, a Chat
Completions message, a `chat.completion`, or a reply of the call's dialect itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import Raw
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import AttemptFailure
from ...core.serving_protocol import CallAnswer
from ...dialect import DIALECTS
from ...dialect.conversion import ReplyContext
from ...dialect.interface import Dialect, ReplyFormat
from ...dialect.message import DECODE_ERRORS, SHAPE_ERRORS, as_dict, as_list
from ...dialect.sse import render_event
from . import UpstreamCall


class CompleteReply:
    """Implements `UpstreamAnswer`."""

    status = 200
    failure: AttemptFailure | None = None
    waits = False
    original: bytes | None = None

    def __init__(
        self,
        reply: bytes,
        dialect: Dialect,
        manner: ReplyFormat,
        version: str | None = None,
        chunks: bytes | None = None,
    ) -> None:
        self.headers = CIMultiDict({"Content-Type": content_type(manner)})
        self.version = version
        try:
            if manner is ReplyFormat.ARRAY:
                self._pieces = [chunks or b"[" + reply + b"]"]
            elif manner is ReplyFormat.EVENTS:
                self._pieces = dialect.render_stream(reply) if chunks is None else _render_events(chunks)
            else:
                self._pieces = [reply]
        except SHAPE_ERRORS as error:
            raise ModelFailed(f"cannot render the reply: {error}", kind="garbage") from None

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def _render_events(chunks: bytes) -> list[bytes]:
    """Return each chunk of a JSON array as an event."""
    return [
        render_event(chunk)
        for chunk in msgspec.json.decode(msgspec.json.format(chunks, indent=-1), type=list[Raw])
    ]


def content_type(manner: ReplyFormat) -> str:
    return "text/event-stream" if manner is ReplyFormat.EVENTS else "application/json"


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
