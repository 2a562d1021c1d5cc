"""The small client that Python agents get: one Chat Completions call at a time, through the gateway.

It implements `core.authoring.Model`. It is in the gateway's process: its calls need no connection, and what
happens to them there is what happens to any call. Retries are the gateway's, not its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from ..core.errors import ModelFailed
from .near import Conversation, Near
from .upstreams.retry import error_in

Ask = Callable[[str, Near], Awaitable[tuple[int, bytes]]]
"""Takes a key and a request; gives the status and the body of the answer: `Gateway.ask`."""

_encode = msgspec.json.Encoder().encode


class ChatClient:
    """One attempt's way to its model."""

    def __init__(self, ask: Ask, url: str, sandbox_url: str, key: str, name: str) -> None:
        self.url = url
        self.sandbox_url = sandbox_url
        self.key = key
        self.name = name
        self._ask = ask
        self._conversation = Conversation()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The reply's JSON; raises `ModelFailed` with the upstream's message if there is none."""
        if options.get("stream"):
            raise ValueError("`stream` is for clients that read events: `chat` returns the whole reply")
        head = {name: Raw(_encode(value)) for name, value in {"model": self.name, **options}.items()}
        status, content = await self._ask(self.key, Near(head, self._conversation.said(messages)))
        if status != 200:
            raise _failed(status, content)
        reply = _decoded(content)
        if "choices" not in reply:
            raise _failed(status, content)
        return reply


def _decoded(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelFailed(f"the model's reply is no JSON: {error}", kind="garbage") from None


def _failed(status: int, content: bytes) -> ModelFailed:
    message = error_in(content).message or "no message"
    again = status in (408, 409, 429) or status >= 500
    return ModelFailed(f"the model call failed with {status}: {message}", kind=str(status), again=again)
