"""The client for async code: orders are sent, attended, sent again when the connection breaks, and cancelled.

How a server is reached: `server.py`; a trainer's own policy: `answering.py`; for plain code: `plain.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import resource
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from ..core.errors import BadInput, HoldwaterError
from ..core.groups import GroupTerms
from ..core.records import Ask, Instance
from ..core.serving import (
    Answer,
    AnyEvent,
    Finished,
    Health,
    ModelChoice,
    Order,
    Result,
    Rollout,
    Source,
    Stats,
    Steer,
    Trajectories,
)
from .answering import Answering, Policy
from .errors import Busy, ServerGone
from .patience import Garbled, Lost, Patience
from .server import Reply, Request, Server, decoded, order_path

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

URL = "http://127.0.0.1:8400"
LEAVING = 5.0  # seconds for telling a server that an order is not wanted any more
STEADY = 1.0  # a connection that has held for so many seconds is a good one
SHORTEST_WAIT = 0.1  # seconds before a busy server is asked again
LONGEST_WAIT = 30.0
SPARE_FILES = 128  # descriptors that are left for everything else in this process

UNFINISHED = 202  # the status of an order that is not over
MODEL_KEY = "X-Holdwater-Model-Key"
HAVE = "X-Holdwater-Have"

_pack = msgspec.msgpack.Encoder().encode


class Settings(TypedDict, total=False):
    """How a client behaves; what is left out is as said here."""

    patience: float  # 60: seconds without any progress before a server counts as gone
    at_once: int  # 1024: orders in flight, each with a connection; fewer where fewer files may be open
    calls_at_once: int  # 256: calls that a policy is given at once, over all orders
    connections: int  # 64: those for everything but orders
    busy: Literal["wait", "raise"]  # wait: what happens when a server is busy
    tls: ssl.SSLContext  # for servers whose certificate the system's authorities do not vouch for


class Wishes(TypedDict, total=False):
    """What is wanted of an order beside its instance; what is left out is as `Order` says."""

    key: str  # idempotency: the same key is the same order; a new one otherwise
    model: ModelChoice
    model_key: str  # of the endpoint in `model`
    sampling: dict[str, Any]
    limits: Ask
    trajectory: Trajectories
    detached: bool
    turns: bool  # True where there is an `on_event`
    policy: Policy | None  # answers the agent's model calls, in this process
    on_event: Callable[[AnyEvent], Any] | None  # plain or async; waited for


class AsyncClient:
    """Asks a server for rollouts: `async with AsyncClient() as client`. Safe for many tasks at once.

    `key` is one of the server's. Without one, the token of a server of this user on this machine is found.
    """

    def __init__(self, url: str = URL, key: str | None = None, **settings: Unpack[Settings]) -> None:
        connections = settings.get("connections", 64)
        self._server = Server(url, key, connections, settings.get("tls"))
        self._patience = settings.get("patience", 60.0)
        self._waits = settings.get("busy", "wait") == "wait"
        self._orders = asyncio.Semaphore(_affordable(settings.get("at_once", 1024), connections))
        self._calls = asyncio.Semaphore(settings.get("calls_at_once", 256))
        self.leaving: set[asyncio.Task[None]] = set()  # of cancelled orders; bound: those in flight

    async def __aenter__(self) -> AsyncClient:
        await self._server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.leaving:
                await asyncio.wait(self.leaving)  # each is bounded by `LEAVING`
        finally:
            await self._server.__aexit__(kind, error, trace)

    async def run(self, instance: str | Instance, **wishes: Unpack[Wishes]) -> Rollout:
        """One rollout. One that failed is data like any other."""
        result = await self._wished(instance, 1, None, wishes)
        return result.rollouts[0]

    async def run_group(
        self, instance: str | Instance, n: int, *, group: GroupTerms | None = None, **wishes: Unpack[Wishes]
    ) -> Result:
        """A group of `n` that are scored together."""
        return await self._wished(instance, n, group or GroupTerms(), wishes)

    async def order(
        self,
        order: Order,
        *,
        policy: Policy | None = None,
        on_event: Callable[[AnyEvent], Any] | None = None,
        model_key: str | None = None,
    ) -> Result:
        """What becomes of the order. When this is cancelled, so is the order.

        A `policy` answers the agent's model calls in this process, in the place of the server's model.
        """
        if policy is not None:
            order = _answered_here(order)
        answering = Answering(order, policy, self._calls, self._poster(order.key)) if policy else None
        async with answering or nullcontext(), self._events(order, model_key, answering) as events:
            async for event in events:
                if on_event is not None:
                    told = on_event(event)
                    if inspect.isawaitable(told):
                        await told
                if isinstance(event, Finished):
                    return event.result
        raise AssertionError("a stream ends with its result, or raises")

    def stream(self, order: Order, *, model_key: str | None = None) -> Events:
        """Everything that is told of the order, up to `Finished`. Leaving it early cancels the order.

        After a lost connection it begins anew with `Accepted`, and some of it is told again. Calls that the
        trainer is to answer are told as they come: `answer` answers them.
        """
        return self._events(order, model_key, None)

    async def answer(self, key: str, answer: Answer) -> None:
        """Answer a call of an order; `OrderRefused` (`gone`) if nobody waits for that any more."""
        await self._poster(key)(_pack(answer))

    async def cancel(self, key: str) -> None:
        """End an order: what is not over of it gets the verdict `cancelled`."""
        await self._ask(Request("DELETE", order_path(key)))

    async def result(self, key: str) -> Result | None:
        """What became of an order; None: it is not over."""
        reply = await self._ask(Request("GET", order_path(key)))
        return None if reply.status == UNFINISHED else self._read(reply, Result)

    async def steer(
        self, url: str, name: str | None = None, version: str = "", key: str | None = None
    ) -> None:
        """From now on the server's own model is this one, also for rollouts that are running."""
        headers = {MODEL_KEY: key} if key is not None else {}
        await self._ask(Request("POST", "/v1/model", _pack(Steer(url, name, version)), headers))

    async def health(self) -> Health:
        """How the server is now. It is asked once: raises `ServerGone` if it does not answer."""
        try:
            return self._read(await self._server.ask(Request("GET", "/v1/health", fine=(503,))), Health)
        except Lost as lost:
            raise ServerGone(f"the server at `{self._server.name}` does not answer: {lost}") from lost

    async def stats(self) -> Stats:
        return self._read(await self._ask(Request("GET", "/v1/stats")), Stats)

    async def drain(self) -> None:
        """The server takes no more orders, and ends when those that are open are over."""
        await self._ask(Request("POST", "/v1/drain"))

    async def blob(self, name: str) -> bytes:
        """What a message refers to: an image, for example."""
        return (await self._ask(Request("GET", f"/v1/blobs/{quote(name, safe='')}"))).body

    async def _wished(
        self, instance: str | Instance, n: int, group: GroupTerms | None, wishes: Wishes
    ) -> Result:
        asked: dict[str, Any] = dict(wishes)
        policy, on_event = asked.pop("policy", None), asked.pop("on_event", None)
        model_key = asked.pop("model_key", None)
        asked.setdefault("turns", on_event is not None)
        asked.setdefault("key", uuid.uuid4().hex)
        order = Order(instance=instance, size=n, group=group, **asked)
        return await self.order(order, policy=policy, on_event=on_event, model_key=model_key)

    def _events(self, order: Order, model_key: str | None, answering: Answering | None) -> Events:
        return Events(self._attended(order, model_key, answering))

    async def _attended(
        self, order: Order, model_key: str | None, answering: Answering | None
    ) -> AsyncGenerator[AnyEvent, None]:
        """The order's events; it is cancelled when somebody leaves before the last."""
        over = False
        async with self._orders:
            try:
                async with aclosing(self._told(order, model_key, answering)) as events:
                    async for event in events:
                        over = isinstance(event, Finished)
                        yield event
            except HoldwaterError:
                raise  # the server refuses it, or is gone: there is nobody to tell
            except BaseException:  # boundary: cancelled, or left; raised again
                if not over and not order.detached:
                    await self._leave(order.key)
                raise

    async def _told(
        self, order: Order, model_key: str | None, answering: Answering | None
    ) -> AsyncGenerator[AnyEvent, None]:
        """The order's events, over as many connections as it takes."""
        patience = Patience(self._server.name, self._patience)
        clock = asyncio.get_running_loop().time
        while True:
            headers = {MODEL_KEY: model_key} if model_key is not None else {}
            if answering is not None:
                headers[HAVE] = answering.conversations.have()
            try:
                async with self._server.attended(_pack(order), headers) as frames:
                    began = clock()
                    while True:
                        event = await frames.next()
                        if clock() - began > STEADY:
                            patience.renew()
                        if event is None:
                            continue
                        if answering is not None:
                            await answering.hear(event)
                        yield event
                        if isinstance(event, Finished):
                            return
            except (Busy, Lost) as trouble:
                if isinstance(trouble, Busy) and not self._waits:
                    raise
                await self._again(trouble, patience)

    def _read(self, reply: Reply, kind: type[T]) -> T:
        try:
            return decoded(reply.body, kind)
        except Garbled as garbled:
            raise ServerGone(f"the server at `{self._server.name}` speaks otherwise: {garbled}") from garbled

    async def _ask(self, request: Request) -> Reply:
        """Ask until there is an answer. All that is asked can be asked twice."""
        patience = Patience(self._server.name, self._patience)
        while True:
            try:
                return await self._server.ask(request)
            except (Busy, Lost) as trouble:
                await self._again(trouble, patience)

    async def _again(self, trouble: Busy | Lost, patience: Patience) -> None:
        """Wait until it is worth trying again; raises `ServerGone` when it is not any more."""
        if isinstance(trouble, Lost):
            return await patience.wait(trouble)
        patience.renew()  # who says that it is busy is alive
        wait = min(max(trouble.after, SHORTEST_WAIT), LONGEST_WAIT)
        return await asyncio.sleep(wait * random.uniform(1.0, 1.5))

    async def _leave(self, key: str) -> None:
        """Tell the server, whatever happens to whoever waits for this."""
        task = asyncio.create_task(self._give_up(key))
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)
        await asyncio.shield(task)

    async def _give_up(self, key: str) -> None:
        try:
            async with asyncio.timeout(LEAVING):
                await self._server.ask(Request("DELETE", order_path(key)))
        except (HoldwaterError, Lost, TimeoutError):
            pass  # the connection is closed in any case: the server cancels the order when its grace is over

    def _poster(self, key: str) -> Callable[[bytes], Any]:
        async def post(answers: bytes) -> None:
            await self._ask(Request("POST", order_path(key, "/answers"), answers))

        return post


class Events:
    """An order's events. `async with` around it ends the order at once when it is left early."""

    def __init__(self, events: AsyncGenerator[AnyEvent, None]) -> None:
        self._events = events

    async def __aenter__(self) -> Events:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._events.aclose()

    def __aiter__(self) -> Events:
        return self

    async def __anext__(self) -> AnyEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        await self._events.aclose()


def _answered_here(order: Order) -> Order:
    """The order, with the client as its model."""
    if order.model.source not in (Source.RUN, Source.TRAINER):
        raise BadInput(
            f"a policy and another model cannot both answer the order: `{order.model.source}`",
            "leave out `model`, or `policy`",
        )
    return msgspec.structs.replace(order, model=msgspec.structs.replace(order.model, source=Source.TRAINER))


def _affordable(at_once: int, connections: int) -> int:
    """How many connections for orders this process can open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return at_once
    return max(1, min(at_once, files - connections - SPARE_FILES))
