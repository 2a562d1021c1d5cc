"""The small client for Python agents: one Chat Completions call at a time, through the gateway.

It implements `core.authoring.Model` and runs in the gateway's process, so its calls need no connection; the
gateway treats them like any other call. It does not retry: the gateway does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from ..core.errors import ModelFailed
from .in_process_request import InProcessRequest, MessageHistory
from .upstreams.retry import parse_error

RequestSender = Callable[[str, InProcessRequest], Awaitable[tuple[int, bytes]]]
"""Takes a key and a request; returns the status and body of the response: `Gateway.ask`."""

_encode = msgspec.json.Encoder().encode


class ChatClient:
    """One attempt's client for its model."""

    def __init__(self, ask: RequestSender, url: str, sandbox_url: str, key: str, name: str) -> None:
        self.url = url
        self.sandbox_url = sandbox_url
        self.key = key
        self.name = name
        self._ask = ask
        self._conversation = MessageHistory()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Return the reply's JSON; raise `ModelFailed` with the upstream's message if there is none."""
        if options.get("stream"):
            raise ValueError("`chat` does not support `stream`: it returns the whole reply")
        head = {name: Raw(_encode(value)) for name, value in {"model": self.name, **options}.items()}
        status, content = await self._ask(
            self.key, InProcessRequest(head, self._conversation.copy_messages(messages))
        )
        if status != 200:
            raise _make_error(status, content)
        reply = _decode_reply(content)
        if "choices" not in reply:
            raise _make_error(status, content)
        return reply


def _decode_reply(content: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelFailed(f"the model's reply is not valid JSON: {error}", kind="garbage") from None


def _make_error(status: int, content: bytes) -> ModelFailed:
    message = parse_error(content).message or "no message"
    again = status in (408, 409, 429) or status >= 500
    return ModelFailed(f"the model call failed with {status}: {message}", kind=str(status), again=again)
