"""Converts requests to Chat Completions, for policies and for servers that support it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ...core.errors import ModelFailed
from ...dialect import DIALECTS
from ...dialect.conversion import ReplyContext
from ...dialect.message import SHAPE_ERRORS
from ..recorder import RequestDelta
from . import UpstreamCall

LARGE_BODY = 256 * 1024  # bytes; a larger request is converted in a thread

CheckRequest = Callable[[dict[str, Any]], None]
"""Raises `ModelFailed` for a request that cannot be converted, with all its messages, in its own dialect."""
ReadConversation = Callable[[int, RequestDelta], list[Any]]
"""Returns all messages of an attempt's request, decoded. It reads files: do not call it on the event loop."""


class ConvertedRequest(NamedTuple):
    """A request in Chat Completions."""

    request: dict[str, Any]
    context: ReplyContext


async def convert_request(
    call: UpstreamCall,
    read_conversation: ReadConversation | None,
    check: CheckRequest | None = None,
) -> ConvertedRequest:
    """Return the request of a call in Chat Completions, and what its reply depends on."""
    body = call.body.to_bytes()
    read = read_conversation if _refers(call, body) else None
    if read is None and len(body) <= LARGE_BODY:
        return _convert(call, body, read, check)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, _convert, call, body, read, check)


def _refers(call: UpstreamCall, body: bytes) -> bool:
    """Return whether the record has messages that the request only names."""
    chaining = DIALECTS[call.dialect].chaining
    if call.delta is None or chaining is None:
        return False
    return call.delta.linked or chaining.reference_mark in body


def _convert(
    call: UpstreamCall,
    body: bytes,
    read: ReadConversation | None,
    check: CheckRequest | None,
) -> ConvertedRequest:
    dialect = DIALECTS[call.dialect]
    try:
        request = msgspec.json.decode(body, type=dict[str, Any])
        context = dialect.make_context(request, call.path)
        if read is not None and call.delta is not None:  # the server does not store replies
            request[dialect.key] = read(call.attempt, call.delta)
            if call.delta.linked and dialect.chaining is not None:
                request.pop(dialect.chaining.key, None)
        if dialect.model_in_path:
            request["model"] = context.model
        if check is not None:
            check(request)
        return ConvertedRequest(dialect.request_to_chat(request), context)
    except SHAPE_ERRORS as error:
        message = f"the request cannot be converted to Chat Completions: {error}"
        raise ModelFailed(message, kind="invalid", again=False) from None
