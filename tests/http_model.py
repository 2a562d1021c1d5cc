"""A model over plain HTTP: for tests of agents that need no gateway in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp


class HttpModel:
    """The same seam as `core.authoring.Model`."""

    name = side_name = "scripted"
    key = "no-key"
    seed: int | None = None

    def __init__(self, url: str) -> None:
        self.url = self.sandbox_url = url

    async def __aenter__(self) -> HttpModel:
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.http.close()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        request = {"model": self.name, "messages": list(messages), **options}
        async with self.http.post(f"{self.url}/chat/completions", json=request) as response:
            reply: dict[str, Any] = await response.json(content_type=None)
            return reply
