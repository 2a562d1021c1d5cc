"""Converts requests to Chat Completions, for policies and for servers that support it alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from ...core.errors import ModelFailed
from ...dialect import DIALECTS
from ...dialect.conversion import ReplyContext
from ...dialect.message import SHAPE_ERRORS
from ..recorder import RequestDelta
from . import UpstreamCall

LARGE_BODY = 256 * 1024  # bytes; a larger request is converted in a thread

ReadConversation = Callable[[int, RequestDelta], list[Any]]
"""Returns all messages of an attempt's request, decoded. It reads files: do not call it on the event loop."""


async def convert_request(
    call: UpstreamCall, wanted: ReplyContext, read_conversation: ReadConversation | None
) -> dict[str, Any]:
    """Return the request of a call in Chat Completions."""
    linked = call.delta is not None and call.delta.linked and read_conversation is not None
    if not linked and call.body.size <= LARGE_BODY:
        return _convert(call, wanted, None)
    read = read_conversation if linked else None
    return await asyncio.get_running_loop().run_in_executor(None, _convert, call, wanted, read)


def _convert(call: UpstreamCall, wanted: ReplyContext, read: ReadConversation | None) -> dict[str, Any]:
    dialect = DIALECTS[call.dialect]
    try:
        request = msgspec.json.decode(call.body.to_bytes())
        if read is not None and call.delta is not None:  # the server does not store replies
            request[dialect.key] = read(call.attempt, call.delta)
        if dialect.model_in_path:
            request["model"] = wanted.model
        return dialect.request_to_chat(request)
    except SHAPE_ERRORS as error:
        message = f"the request cannot be converted to Chat Completions: {error}"
        raise ModelFailed(message, kind="invalid", again=False) from None
