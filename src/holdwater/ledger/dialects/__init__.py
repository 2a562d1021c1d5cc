"""Parses requests, replies, system prompts and tools of the gateway's dialects into common messages.

Pure functions over decoded JSON. They never raise on unknown content: it is shown as raw JSON. The records
are in `ledger/message.py`; `conversation/trajectory.py` finds which exchange continues which.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.errors import LedgerCorrupt
from ..message import CommonMessage, merge_messages, to_part
from .chat import CHAT
from .completions import COMPLETIONS, EMBEDDINGS
from .dialect_form import DialectForm, ModelReply, ReplyTokens
from .gemini import GEMINI
from .messages import MESSAGES
from .responses import RESPONSES
from .token_counts import make_count_form

__all__ = ["DialectForm", "ModelReply", "ReplyTokens", "find_dialect", "has_conversations", "parse_messages"]

_CONVERSATIONS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "gemini": GEMINI}
_AUXILIARY = {
    "completions": COMPLETIONS,
    "embeddings": EMBEDDINGS,
    "messages_count": make_count_form(MESSAGES),
    "gemini_count": make_count_form(GEMINI),
}
_DIALECTS = {**_CONVERSATIONS, **_AUXILIARY}


def has_conversations(name: str) -> bool:
    """Return whether calls in this dialect are turns; other calls are not part of the trajectory."""
    return name not in _AUXILIARY


def find_dialect(name: str) -> DialectForm:
    if name not in _DIALECTS:
        message = f"an exchange is in an unknown dialect: `{name}`"
        raise LedgerCorrupt(message, "was it made by a newer version?")
    return _DIALECTS[name]


def parse_messages(name: str, given: list[Any]) -> list[CommonMessage]:
    """Parse the decoded messages of a request."""
    speaks = find_dialect(name)
    found = [message for item in given for message in _parse_item(speaks, item)]
    return list(merge_messages(found)) if name == "responses" else found


def _parse_item(speaks: DialectForm, item: Any) -> Iterator[CommonMessage]:
    if isinstance(item, dict):
        yield from speaks.messages(item)
    else:
        yield CommonMessage(role="unknown", parts=(to_part(item),))
