"""The small client that Python agents get: one Chat Completions call at a time, through the gateway.

It implements `core.authoring.Model`. Retries are the gateway's, not its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from ..core.errors import ModelFailed
from .body import Body, Payload
from .upstreams.retry import error_in

UNTIL_DONE = aiohttp.ClientTimeout(total=None)  # the gateway's own limits end a call


def connect(socket: Path) -> aiohttp.ClientSession:
    """Connections to the gateway at `socket`, for all clients of a worker; closed by whoever asked for it."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(socket), limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


class ChatClient:
    """One attempt's way to its model."""

    def __init__(self, http: aiohttp.ClientSession, url: str, sandbox_url: str, key: str, name: str) -> None:
        self.url = url
        self.sandbox_url = sandbox_url
        self.key = key
        self.name = name
        self._http = http
        self._target = URL(f"{url}/chat/completions")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The reply's JSON; raises `ModelFailed` with the upstream's message if there is none."""
        if options.get("stream"):
            raise ValueError("`stream` is for clients that read events: `chat` returns the whole reply")
        body = msgspec.json.encode({"model": self.name, "messages": messages, **options})
        payload = Payload(Body((body,)))
        del body  # gone once it is sent
        try:
            call = self._http.post(self._target, data=payload, headers=self._headers, timeout=UNTIL_DONE)
            async with call as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ModelFailed(f"the gateway cannot be reached: {error}", kind="gateway") from error
        if response.status != 200:
            raise _failed(response.status, content)
        reply = _decoded(content)
        if "choices" not in reply:
            raise _failed(response.status, content)
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
