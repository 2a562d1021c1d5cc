"""A door before a desk in memory, and a client that speaks every form of its protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec

from holdwater.core.serving_protocol import AnyOrderEvent, Order
from holdwater.serve import RolloutServer, ServerSettings
from holdwater.testing.fake_orders import FakeActiveOrder, FakeOrderService

JSON, MSGPACK = "application/json", "application/msgpack"
EVENTS, FRAMES = "text/event-stream", "application/x-msgpack-stream"


class Scene(NamedTuple):
    desk: FakeOrderService
    door: RolloutServer
    http: aiohttp.ClientSession
    notes: list[tuple[str, str]]

    @property
    def url(self) -> str:
        return f"{self.door.address}/v1"

    def post(self, order: Order, accept: str = JSON, packed: bool = False, **headers: str) -> Any:
        body = msgspec.msgpack.encode(order) if packed else msgspec.json.encode(order)
        kind = MSGPACK if packed else JSON
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(
            f"{self.url}/orders", data=body, headers={"Content-Type": kind, "Accept": accept, **named}
        )


@asynccontextmanager
async def scene(queue: int = 1000, http: dict[str, Any] | None = None, **terms: Any) -> AsyncIterator[Scene]:
    notes: list[tuple[str, str]] = []
    desk = FakeOrderService(queue)
    given = {"listen": "127.0.0.1:0", "note": lambda kind, message: notes.append((kind, message)), **terms}
    session = {"headers": {"Content-Type": JSON}, **(http or {})}
    async with (
        RolloutServer(desk, ServerSettings(**given)) as door,
        aiohttp.ClientSession(**session) as client,
    ):
        yield Scene(desk, door, client, notes)


class Reading:
    """The events of a stream, in either form; None is a keep-alive."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._packed = response.content_type == FRAMES

    async def next(self) -> AnyOrderEvent | None:
        content = self._response.content
        if self._packed:
            length = int.from_bytes(await content.readexactly(4), "big")
            return (
                msgspec.msgpack.decode(await content.readexactly(length), type=AnyOrderEvent)
                if length
                else None
            )
        first = (await content.readuntil(b"\n\n")).decode()
        if first.startswith(":"):
            return None
        event, data = first.strip().split("\n")
        told = msgspec.json.decode(data.removeprefix("data: "), type=AnyOrderEvent)
        assert event == f"event: {told.__struct_config__.tag}"
        return told

    async def all(self) -> list[AnyOrderEvent]:
        found = []
        while not self._response.content.at_eof():
            try:
                found.append(await self.next())
            except asyncio.IncompleteReadError:
                break
        return [event for event in found if event is not None]


async def attended(ticket: FakeActiveOrder, clients: int = 1) -> None:
    """Until so many clients wait for it."""
    while ticket.followers != clients:
        await ticket.wait_for_change(ticket.version)
