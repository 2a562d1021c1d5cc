"""The client for blocking code: runs an `AsyncClient` on a thread of its own and adds no behaviour to it."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from functools import wraps
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import uvloop

from ..core.errors import BadInput
from ..core.serving_protocol import (
    AnyOrderEvent,
    Order,
    OrderResult,
)
from .async_client import LEAVE_SECONDS, URL, AsyncClient, ClientSettings, OrderStream
from .policy import Policy
from .server_connection import ServerGone

P = ParamSpec("P")
T = TypeVar("T")


def _mirror(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """Make the blocking form of a method: it has the same arguments and waits for the result."""

    @wraps(method)
    def blocking(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._wait(method(self._client, *args, **kwargs))

    return blocking


class Client:
    """Orders rollouts from a server: `with Client() as client`. Safe for many threads at once.

    An exception that interrupts a call, such as Ctrl-C, cancels the order that the call waits for. Callbacks
    (`policy`, `on_event`) do not run in the caller's thread.
    """

    def __init__(self, url: str = URL, key: str | None = None, **settings: Unpack[ClientSettings]) -> None:
        self._client = AsyncClient(url, key, **settings)
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="holdwater-client", daemon=True
        )
        self._thread.start()
        self._closing = weakref.finalize(self, _end, self._client, self._loop, self._thread)
        self._wait(self._client.__aenter__())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all calls in flight and end the client's thread."""
        self._closing()

    run = _mirror(AsyncClient.run)
    run_group = _mirror(AsyncClient.run_group)
    order = _mirror(AsyncClient.order)
    gather = _mirror(AsyncClient.gather)
    answer = _mirror(AsyncClient.answer)
    cancel = _mirror(AsyncClient.cancel)
    result = _mirror(AsyncClient.result)
    steer = _mirror(AsyncClient.steer)
    health = _mirror(AsyncClient.health)
    stats = _mirror(AsyncClient.stats)
    drain = _mirror(AsyncClient.drain)
    blob = _mirror(AsyncClient.blob)

    def map(
        self,
        orders: Iterable[Order],
        *,
        at_once: int = 64,
        policy: Policy | None = None,
        on_event: Callable[[AnyOrderEvent], Any] | None = None,
        model_key: str | None = None,
    ) -> Iterator[OrderResult]:
        """Yield the results of `orders` as they finish. This thread pulls from `orders` when there is room.

        A `policy` answers the model calls of all orders, in place of the server's model.
        Leaving the iterator early cancels the running orders; so does a refused order, which raises.
        """
        source = iter(orders)
        running: set[Future[OrderResult]] = set()  # bound: `at_once`, including results not taken yet
        done: SimpleQueue[Future[OrderResult]] = SimpleQueue()  # bound: the running orders
        try:
            while True:
                while len(running) < at_once and (order := next(source, None)) is not None:
                    begun = self._begin(
                        self._client.order(order, policy=policy, on_event=on_event, model_key=model_key)
                    )
                    running.add(begun)
                    begun.add_done_callback(done.put)
                if not running:
                    return
                finished = done.get()
                running.discard(finished)
                yield _wait_result(finished)
        finally:
            for left in running:
                left.cancel()

    def stream(self, order: Order, *, model_key: str | None = None) -> Iterator[AnyOrderEvent]:
        """Send an order and yield its events, up to `Finished`. Leaving early cancels the order."""
        events = self._client.stream(order, model_key=model_key)
        try:
            while (event := self._wait(_next_event(events))) is not None:
                yield event
        finally:
            if self._closing.alive:
                self._wait(events.aclose())

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        ended = threading.Event()
        waited = self._begin(work, ended)
        try:
            return _wait_result(waited)
        except BaseException:  # boundary: Ctrl-C, for example; raised again
            if waited.cancel():
                ended.wait(LEAVE_SECONDS)  # meanwhile the async client cancels the order on the server
            raise

    def _begin(self, work: Coroutine[Any, Any, T], ended: threading.Event | None = None) -> Future[T]:
        own = threading.current_thread() is self._thread
        if own or not self._closing.alive:
            work.close()
            raise BadInput(
                "a blocking call cannot run on the client's own thread" if own else "the client is closed"
            )
        return asyncio.run_coroutine_threadsafe(_run_marked(work, ended or threading.Event()), self._loop)


async def _next_event(events: OrderStream) -> AnyOrderEvent | None:
    return await anext(events, None)


async def _run_marked(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


def _wait_result(future: Future[T]) -> T:
    try:
        return future.result()
    except CancelledError as error:
        raise ServerGone("the client was closed in the meantime") from error


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if threading.current_thread() is thread:  # ended by garbage collection: it cannot wait for itself
        return loop.stop()
    asyncio.run_coroutine_threadsafe(_close(client), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


async def _close(client: AsyncClient) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()} - client.leaving
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=LEAVE_SECONDS)
    await client.__aexit__(None, None, None)
