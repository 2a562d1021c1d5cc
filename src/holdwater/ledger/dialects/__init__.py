"""What the gateway's dialects say, as common messages: requests, replies, system prompts and tools.

Pure functions over decoded JSON. They never raise: what they do not know is shown as it is. The records are
in `message.py`; which exchange continues which is in `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...core.errors import LedgerCorrupt
from ..message import Message, merged, said
from .chat import CHAT
from .counting import count_of
from .form import Dialect, Reply, Tokens
from .gemini import GEMINI
from .messages import MESSAGES
from .plain import COMPLETIONS, EMBEDDINGS
from .responses import RESPONSES

__all__ = ["Dialect", "Reply", "Tokens", "dialect", "has_conversations", "messages"]

_CONVERSATIONS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "gemini": GEMINI}
_BESIDE = {
    "completions": COMPLETIONS,
    "embeddings": EMBEDDINGS,
    "messages_count": count_of(MESSAGES),
    "gemini_count": count_of(GEMINI),
}
_DIALECTS = {**_CONVERSATIONS, **_BESIDE}


def has_conversations(name: str) -> bool:
    """Whether calls in this dialect are turns; others stand beside the trajectory."""
    return name not in _BESIDE


def dialect(name: str) -> Dialect:
    if name not in _DIALECTS:
        message = f"an exchange is in an unknown dialect: `{name}`"
        raise LedgerCorrupt(message, "was it made by a newer version?")
    return _DIALECTS[name]


def messages(name: str, given: list[Any]) -> list[Message]:
    """The decoded messages of a request."""
    speaks = dialect(name)
    found = [message for item in given for message in _messages(speaks, item)]
    return list(merged(found)) if name == "responses" else found


def _messages(speaks: Dialect, item: Any) -> Iterator[Message]:
    if isinstance(item, dict):
        yield from speaks.messages(item)
    else:
        yield Message(role="unknown", parts=(said(item),))
