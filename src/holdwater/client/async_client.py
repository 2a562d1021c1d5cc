"""The client for async code: sends orders, follows them, resends them after a lost connection, cancels them.

`server_connection.py` makes single requests, `policy.py` runs a trainer's own policy, and
`blocking_client.py` is the client for code without `await`.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import resource
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import msgspec

from ..core.errors import BadInput, HoldwaterError
from ..core.groups import GroupTerms
from ..core.records import Instance, LimitOverrides
from ..core.serving_protocol import (
    AnyOrderEvent,
    CallAnswer,
    Finished,
    ModelChoice,
    ModelSource,
    Order,
    OrderResult,
    Rollout,
    ServerHealth,
    ServerStats,
    StaleAction,
    SteerRequest,
    TrajectoryForm,
)
from .policy import Policy, PolicyErrors, PolicyRunner, RunnerSettings
from .server_connection import (
    ConnectionLost,
    InvalidReply,
    ReconnectBackoff,
    ServerBusy,
    ServerConnection,
    ServerGone,
    ServerReply,
    ServerRequest,
    decode_reply,
    order_path,
)

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

URL = "http://127.0.0.1:8400"
LEAVE_SECONDS = 5.0  # seconds for the request that cancels an abandoned order
STEADY_SECONDS = 1.0  # after so many seconds a connection counts as good, and resets the back-off
SHORTEST_WAIT = 0.1  # seconds before a request to a busy server is repeated
LONGEST_WAIT = 30.0
SPARE_FILES = 128  # file descriptors left for everything else in this process

UNFINISHED = 202  # the status of an order that is not over
MODEL_KEY = "X-Holdwater-Model-Key"
HAVE = "X-Holdwater-Have"

_pack = msgspec.msgpack.Encoder().encode


class ClientSettings(TypedDict, total=False):
    """The settings of a client; each comment begins with the default."""

    patience: float  # 60: seconds without any progress before a server counts as gone
    at_once: int  # 1024: orders in flight, each with a connection; fewer if the limit on open files is lower
    calls_at_once: int  # 256: policy calls that run at once, over all orders
    policy_errors: PolicyErrors  # raise: whether an error of a policy is raised, or fails the agent's call
    connections: int  # 64: connections for requests other than orders
    busy: Literal["wait", "raise"]  # wait: whether a busy server makes the client wait or raise `ServerBusy`
    tls: ssl.SSLContext  # for servers with a certificate that the system's authorities did not sign


class OrderOptions(TypedDict, total=False):
    """The options of an order beside its instance; `Order` has the defaults."""

    key: str  # idempotency: the same key is the same order; by default a new key
    model: ModelChoice
    model_key: str  # the API key of the endpoint in `model`
    sampling: dict[str, Any]
    limits: LimitOverrides
    trajectory: TrajectoryForm
    detached: bool
    turns: bool  # by default True if there is an `on_event`
    max_staleness: int | None
    when_stale: StaleAction
    policy: Policy | None  # answers the agent's model calls, in this process
    on_event: Callable[[AnyOrderEvent], Any] | None  # plain or async; the client waits for it


class AsyncClient:
    """Orders rollouts from a server: `async with AsyncClient() as client`. Safe for many tasks at once.

    `key` is an API key of the server. Without one, the client finds the token of a server that this user runs
    on this machine.
    """

    def __init__(self, url: str = URL, key: str | None = None, **settings: Unpack[ClientSettings]) -> None:
        connections = settings.get("connections", 64)
        self._server = ServerConnection(url, key, connections, settings.get("tls"))
        self._patience = settings.get("patience", 60.0)
        self._waits = settings.get("busy", "wait") == "wait"
        self._orders = asyncio.Semaphore(_cap_orders(settings.get("at_once", 1024), connections))
        slots = asyncio.Semaphore(settings.get("calls_at_once", 256))
        self._answering = RunnerSettings(slots, settings.get("policy_errors", "raise"))
        self.leaving: set[asyncio.Task[None]] = set()  # that cancel orders; bound: orders in flight

    async def __aenter__(self) -> AsyncClient:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            if self.leaving:
                await asyncio.wait(self.leaving)  # each takes at most `LEAVE_SECONDS`
        finally:
            await self._server.__aexit__(*error)

    async def run(self, instance: str | Instance, **wishes: Unpack[OrderOptions]) -> Rollout:
        """Run one rollout and return it. A failed rollout is returned too, not raised."""
        result = await self._run_order(instance, 1, None, wishes)
        return result.rollouts[0]

    async def run_group(
        self,
        instance: str | Instance,
        n: int,
        *,
        group: GroupTerms | None = None,
        **wishes: Unpack[OrderOptions],
    ) -> OrderResult:
        """Run a group of `n` rollouts that are scored together; return its result."""
        return await self._run_order(instance, n, group or GroupTerms(), wishes)

    async def order(
        self,
        order: Order,
        *,
        policy: Policy | None = None,
        on_event: Callable[[AnyOrderEvent], Any] | None = None,
        model_key: str | None = None,
    ) -> OrderResult:
        """Send an order and return its result. Cancelling this call cancels the order.

        A `policy` answers the agent's model calls in this process, in place of the server's model.
        """
        if policy is not None:
            order = _set_trainer(order)
        answering = (
            PolicyRunner(order, policy, self._answering, self._make_poster(order.key)) if policy else None
        )
        async with answering or nullcontext(), self._open_stream(order, model_key, answering) as events:
            async for event in events:
                if on_event is not None:
                    told = on_event(event)
                    if inspect.isawaitable(told):
                        await told
                if isinstance(event, Finished):
                    return event.result
        raise AssertionError("a stream ends with its result, or raises")

    async def gather(
        self,
        orders: Iterable[Order],
        *,
        policy: Policy | None = None,
        on_event: Callable[[AnyOrderEvent], Any] | None = None,
        model_key: str | None = None,
    ) -> list[OrderResult]:
        """Send all orders and return their results in the order of `orders`. An error cancels the others."""
        tasks = [
            asyncio.create_task(self.order(order, policy=policy, on_event=on_event, model_key=model_key))
            for order in orders
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stream(self, order: Order, *, model_key: str | None = None) -> OrderStream:
        """Send an order; return the stream of its events, up to `Finished`. Leaving early cancels the order.

        After a lost connection the stream starts again with `Accepted` and repeats some events. Model calls
        for the trainer arrive as `Called` events: reply to them with `answer`.
        """
        return self._open_stream(order, model_key, None)

    async def answer(self, key: str, answer: CallAnswer) -> None:
        """Answer a model call of an order; raise `OrderRefused` (`gone`) if the call is over."""
        await self._make_poster(key)(_pack(answer))

    async def cancel(self, key: str) -> None:
        """Cancel an order: its unfinished rollouts get the verdict `cancelled`."""
        await self._ask(ServerRequest("DELETE", order_path(key)))

    async def result(self, key: str) -> OrderResult | None:
        """Return the result of an order, or None while it is not over."""
        reply = await self._ask(ServerRequest("GET", order_path(key)))
        return None if reply.status == UNFINISHED else self._read(reply, OrderResult)

    async def steer(
        self, url: str, name: str | None = None, version: str = "", key: str | None = None
    ) -> None:
        """Replace the server's own model from now on, for running rollouts too."""
        headers = {MODEL_KEY: key} if key is not None else {}
        await self._ask(ServerRequest("POST", "/v1/model", _pack(SteerRequest(url, name, version)), headers))

    async def health(self) -> ServerHealth:
        """Return the server's health. Tries once: raises `ServerGone` if the server does not answer."""
        try:
            return self._read(
                await self._server.ask(ServerRequest("GET", "/v1/health", accepted=(503,))), ServerHealth
            )
        except ConnectionLost as lost:
            raise ServerGone(f"the server at `{self._server.name}` does not answer: {lost}") from lost

    async def stats(self) -> ServerStats:
        return self._read(await self._ask(ServerRequest("GET", "/v1/stats")), ServerStats)

    async def drain(self) -> None:
        """Make the server refuse new orders and exit when the open orders are over."""
        await self._ask(ServerRequest("POST", "/v1/drain"))

    async def blob(self, name: str) -> bytes:
        """Return the content of a blob that a message refers to, such as an image."""
        return (await self._ask(ServerRequest("GET", f"/v1/blobs/{quote(name, safe='')}"))).body

    async def _run_order(
        self, instance: str | Instance, n: int, group: GroupTerms | None, wishes: OrderOptions
    ) -> OrderResult:
        asked: dict[str, Any] = dict(wishes)
        policy, on_event = asked.pop("policy", None), asked.pop("on_event", None)
        model_key = asked.pop("model_key", None)
        asked.setdefault("turns", on_event is not None)
        asked.setdefault("key", uuid.uuid4().hex)
        order = Order(instance=instance, size=n, group=group, **asked)
        return await self.order(order, policy=policy, on_event=on_event, model_key=model_key)

    def _open_stream(
        self, order: Order, model_key: str | None, answering: PolicyRunner | None
    ) -> OrderStream:
        return OrderStream(self._attend_order(order, model_key, answering))

    async def _attend_order(
        self, order: Order, model_key: str | None, answering: PolicyRunner | None
    ) -> AsyncGenerator[AnyOrderEvent, None]:
        """Yield the order's events; cancel the order if the consumer leaves before the last one."""
        over = False
        async with self._orders:
            try:
                async with aclosing(self._receive_events(order, model_key, answering)) as events:
                    async for event in events:
                        over = isinstance(event, Finished)
                        yield event
            except HoldwaterError:
                raise  # the server refused the order or is gone: there is nothing to cancel
            except BaseException:  # boundary: cancelled or left early; raised again
                if not over and not order.detached:
                    await self._leave(order.key)
                raise

    async def _receive_events(
        self, order: Order, model_key: str | None, answering: PolicyRunner | None
    ) -> AsyncGenerator[AnyOrderEvent, None]:
        """Yield the order's events, over as many connections as needed."""
        patience = ReconnectBackoff(self._server.name, self._patience)
        clock = asyncio.get_running_loop().time
        while True:
            headers = {MODEL_KEY: model_key} if model_key is not None else {}
            if answering is not None:
                headers[HAVE] = answering.conversations.render_known()
            try:
                async with self._server.open_stream(_pack(order), headers) as frames:
                    began = clock()
                    while True:
                        event = await frames.next()
                        if clock() - began > STEADY_SECONDS:
                            patience.reset()
                        if event is None:
                            continue
                        if answering is not None:
                            await answering.handle_event(event)
                        yield event
                        if isinstance(event, Finished):
                            return
            except (ServerBusy, ConnectionLost) as trouble:
                if isinstance(trouble, ServerBusy) and not self._waits:
                    raise
                await self._wait_retry(trouble, patience)

    def _read(self, reply: ServerReply, kind: type[T]) -> T:
        try:
            return decode_reply(reply.body, kind)
        except InvalidReply as garbled:
            raise ServerGone(
                f"invalid reply from the server at `{self._server.name}`: {garbled}"
            ) from garbled

    async def _ask(self, request: ServerRequest) -> ServerReply:
        """Send a request until the server answers it. All these requests are idempotent."""
        patience = ReconnectBackoff(self._server.name, self._patience)
        while True:
            try:
                return await self._server.ask(request)
            except (ServerBusy, ConnectionLost) as trouble:
                await self._wait_retry(trouble, patience)

    async def _wait_retry(self, trouble: ServerBusy | ConnectionLost, patience: ReconnectBackoff) -> None:
        """Sleep until the next retry; raise `ServerGone` when the time for retries is used up."""
        if isinstance(trouble, ConnectionLost):
            return await patience.wait(trouble)
        patience.reset()  # a server that answers `busy` is alive
        wait = min(max(trouble.after, SHORTEST_WAIT), LONGEST_WAIT)
        return await asyncio.sleep(wait * random.uniform(1.0, 1.5))

    async def _leave(self, key: str) -> None:
        """Leave an order, also while the caller is cancelled. It runs again if its key comes again."""
        task = asyncio.create_task(self._give_up(key))
        self.leaving.add(task)
        task.add_done_callback(self.leaving.discard)
        await asyncio.shield(task)

    async def _give_up(self, key: str) -> None:
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._server.ask(ServerRequest("DELETE", order_path(key, "?left")))
        except (HoldwaterError, ConnectionLost, TimeoutError):
            pass  # the order's connection is closed: the server cancels the order after its grace period

    def _make_poster(self, key: str) -> Callable[[bytes], Any]:
        async def post(answers: bytes) -> None:
            await self._ask(ServerRequest("POST", order_path(key, "/answers"), answers))

        return post


class OrderStream:
    """The events of an order. Leaving its `async with` block early cancels the order at once."""

    def __init__(self, events: AsyncGenerator[AnyOrderEvent, None]) -> None:
        self._events = events

    async def __aenter__(self) -> OrderStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._events.aclose()

    def __aiter__(self) -> OrderStream:
        return self

    async def __anext__(self) -> AnyOrderEvent:
        return await anext(self._events)

    async def aclose(self) -> None:
        await self._events.aclose()


def _set_trainer(order: Order) -> Order:
    """Return the order with the trainer as the source of its model calls."""
    if order.model.source not in (ModelSource.RUN, ModelSource.TRAINER):
        raise BadInput(
            f"a policy and another model cannot both answer the order: `{order.model.source}`",
            "leave out `model`, or `policy`",
        )
    return msgspec.structs.replace(
        order, model=msgspec.structs.replace(order.model, source=ModelSource.TRAINER)
    )


def _cap_orders(at_once: int, connections: int) -> int:
    """Return how many connections for orders this process can open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return at_once
    return max(1, min(at_once, files - connections - SPARE_FILES))
