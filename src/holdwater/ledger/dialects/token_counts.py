"""Parses token-count requests into common messages. They are not turns of a conversation."""

from __future__ import annotations

from typing import Any

from ..message import CommonMessage
from .dialect_form import DialectForm, ModelReply


def make_count_form(counted: DialectForm) -> DialectForm:
    """Return the dialect that counts tokens of requests in `counted`."""
    return counted._replace(reply=_parse_count)


def _parse_count(reply: dict[str, Any]) -> ModelReply:
    tokens = reply.get("input_tokens", reply.get("totalTokens"))
    if not isinstance(tokens, int):
        return ModelReply()
    return ModelReply(message=CommonMessage(role="assistant", parts=(f"[{tokens} tokens]",)))
