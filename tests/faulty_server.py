"""A server that plays faults: real HTTP on a real port, and a rollout that it begins once for each key."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import unquote

import msgspec
from aiohttp import web

from holdwater.core.serving_protocol import (
    Accepted,
    CallAnswer,
    Called,
    Finished,
    Order,
    OrderEvent,
    OrderResult,
    ProblemDetails,
    Rollout,
    ServerHealth,
    Started,
)

STREAM = "application/x-msgpack-stream"
pack = msgspec.msgpack.encode


class Connection:
    """One that owns an order, as the server sees it."""

    def __init__(self, stage: Stage, request: web.BaseRequest, order: Order) -> None:
        self.stage = stage
        self.request = request
        self.order = order
        self.have = set(request.headers.get("X-Holdwater-Have", "").split(",")) - {""}
        self._response: web.StreamResponse | None = None

    async def tell(self, *events: OrderEvent) -> None:
        for event in events:
            body = pack(event)
            await self.write(len(body).to_bytes(4, "big") + body)

    async def write(self, content: bytes) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers={"Content-Type": STREAM})
            await self._response.prepare(self.request)
        await self._response.write(content)

    async def finish(self) -> web.StreamResponse:
        await self.tell(Finished(result=result_of(self.order)))
        assert self._response is not None
        await asyncio.sleep(0.002)  # the end comes in a packet of its own
        await self._response.write_eof()
        return self._response

    async def hang(self) -> web.StreamResponse:
        """Say that it has begun, and then nothing until the client goes away."""
        await self.tell(Accepted(order=1), Started(member=0, attempt=1))
        self.stage.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stage.left.set()
        raise AssertionError

    async def answer(self, call: str) -> CallAnswer:
        """The client's answer to that call."""
        while call not in self.stage.answers:
            await self.stage.answered.wait()
            self.stage.answered.clear()
        return self.stage.answers.pop(call)


Play = Callable[[Connection], Awaitable[web.StreamResponse]]


class Stage:
    """Plays one act for each connection, then finishes every order at once."""

    def __init__(self, *acts: Play, otherwise: Play | None = None) -> None:
        self.acts = deque(acts)
        self.otherwise = otherwise or finish
        self.posts: list[str] = []  # keys, as often as they came
        self.begun: Counter[str] = Counter()
        self.connections: list[Connection] = []
        self.deleted: asyncio.Queue[str] = asyncio.Queue()
        self.answers: dict[str, CallAnswer] = {}
        self.answered = asyncio.Event()
        self.gone: set[str] = set()  # calls whose answer nobody wants
        self.hanging = asyncio.Event()
        self.left = asyncio.Event()
        self.key: str | None = None
        self.now = self.most = 0
        self.peers: set[object] = set()
        self.url = ""
        self._port = 0
        self._runner: web.ServerRunner | None = None

    async def start(self, socket: Path | None = None) -> None:
        """Listen; after `stop`, on the same port."""
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.05)
        await self._runner.setup()
        if socket is not None:
            await web.UnixSite(self._runner, str(socket)).start()
            self.url = f"unix:{socket}"
            return
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return refusal(401, ProblemDetails(code="unauthorized", message="missing API key"))
        path = request.rel_url.raw_path
        if path == "/v1/orders":
            return await self._post(request)
        if path == "/v1/health":
            return web.Response(status=503, body=pack(ServerHealth(ok=False, state="draining")))
        key = unquote(path.split("/")[3])
        if path.endswith("/answers"):
            return self._answer(msgspec.msgpack.decode(await request.read(), type=CallAnswer))
        if request.method == "DELETE":
            self.deleted.put_nowait(key)
            return web.Response(status=202)
        return web.Response(status=202, body=pack(Accepted(order=1)))

    async def _post(self, request: web.BaseRequest) -> web.StreamResponse:
        order = msgspec.msgpack.decode(await request.read(), type=Order)
        self.posts.append(order.key)
        connection = Connection(self, request, order)
        self.connections.append(connection)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await (self.acts.popleft() if self.acts else self.otherwise)(connection)
        finally:
            self.now -= 1

    def _answer(self, answer: CallAnswer) -> web.Response:
        if answer.call in self.gone:
            return refusal(409, ProblemDetails(code="gone", message="nobody waits for it"))
        self.answers[answer.call] = answer
        self.answered.set()
        return web.Response(status=204)


@asynccontextmanager
async def playing(*acts: Play, otherwise: Play | None = None) -> AsyncIterator[Stage]:
    stage = Stage(*acts, otherwise=otherwise)
    await stage.start()
    try:
        yield stage
    finally:
        await stage.stop()


async def finish(connection: Connection) -> web.StreamResponse:
    begun = connection.stage.begun
    new = not begun[connection.order.key]
    begun[connection.order.key] = 1
    await connection.tell(Accepted(order=1, new=new), Started(member=0, attempt=1))
    return await connection.finish()


async def hang(connection: Connection) -> web.StreamResponse:
    return await connection.hang()


def cut(connection: Connection) -> web.StreamResponse:
    """Break the connection, as a killed server does."""
    transport = connection.request.transport
    assert transport is not None
    transport.abort()
    raise ConnectionResetError


def refusing(status: int, problem: ProblemDetails) -> Play:
    async def refuse(connection: Connection) -> web.StreamResponse:
        return refusal(status, problem)

    return refuse


def refusal(status: int, problem: ProblemDetails) -> web.Response:
    return web.Response(status=status, body=pack(problem), content_type="application/msgpack")


def result_of(order: Order) -> OrderResult:
    instance = order.instance if isinstance(order.instance, str) else order.instance.id
    rollouts = tuple(
        Rollout(instance=instance, sample=n, member=n, outcome="passed", attempt=n + 1, reward=1.0)
        for n in range(order.size)
    )
    return OrderResult(key=order.key, order=1, rollouts=rollouts, together=order.group is not None)


def called(call: str, *messages: str, parent: str | None = None, keep: int = 0, member: int = 0) -> Called:
    """A chat call; one with a parent has its head."""
    append = tuple(msgspec.json.encode({"role": "user", "content": text}).decode() for text in messages)
    head = '{"model":"m"}' if parent is None else None
    return Called(
        member=member, call=call, dialect="chat", append=append, parent=parent, keep=keep, head=head
    )
