"""Questions how many tokens a request has, as common messages. They are beside every conversation."""

from __future__ import annotations

from typing import Any

from ..message import Message
from .form import Dialect, Reply


def count_of(counted: Dialect) -> Dialect:
    """The dialect in which the tokens of requests in `counted` are counted."""
    return counted._replace(reply=_count)


def _count(reply: dict[str, Any]) -> Reply:
    tokens = reply.get("input_tokens", reply.get("totalTokens"))
    if not isinstance(tokens, int):
        return Reply()
    return Reply(message=Message(role="assistant", parts=(f"[{tokens} tokens]",)))
