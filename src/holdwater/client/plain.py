"""The client for plain code: an `AsyncClient` on a thread of its own. It decides nothing itself."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar, Unpack

import uvloop

from ..core.errors import BadInput
from ..core.groups import GroupTerms
from ..core.records import Instance
from ..core.serving import Answer, AnyEvent, Health, Order, Result, Rollout, Stats
from .answering import Policy
from .client import LEAVING, URL, AsyncClient, Events, Settings, Wishes
from .errors import ServerGone

T = TypeVar("T")


class Client:
    """Asks a server for rollouts: `with Client() as client`. Safe for many threads at once.

    Whatever ends the waiting, such as Ctrl-C, cancels what was waited for. Functions that it is given
    (`policy`, `on_event`) are not called in the caller's thread.
    """

    def __init__(self, url: str = URL, key: str | None = None, **settings: Unpack[Settings]) -> None:
        self._client = AsyncClient(url, key, **settings)
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop,), name="holdwater-client", daemon=True
        )
        self._thread.start()
        self._closing = weakref.finalize(self, _end, self._client, self._loop, self._thread)
        self._wait(self._client.__aenter__())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End: what is in flight is cancelled, the thread is gone."""
        self._closing()

    def run(self, instance: str | Instance, **wishes: Unpack[Wishes]) -> Rollout:
        """One rollout. One that failed is data like any other."""
        return self._wait(self._client.run(instance, **wishes))

    def run_group(
        self, instance: str | Instance, n: int, *, group: GroupTerms | None = None, **wishes: Unpack[Wishes]
    ) -> Result:
        """A group of `n` that are scored together."""
        return self._wait(self._client.run_group(instance, n, group=group, **wishes))

    def order(
        self,
        order: Order,
        *,
        policy: Policy | None = None,
        on_event: Callable[[AnyEvent], Any] | None = None,
        model_key: str | None = None,
    ) -> Result:
        """What becomes of the order. A `policy` answers its model calls in place of the server's model."""
        return self._wait(self._client.order(order, policy=policy, on_event=on_event, model_key=model_key))

    def map(
        self,
        orders: Iterable[Order],
        *,
        at_once: int = 64,
        policy: Policy | None = None,
        model_key: str | None = None,
    ) -> Iterator[Result]:
        """The results of `orders` as they finish; these are pulled when there is room, in this thread.

        A `policy` answers the model calls of all of them, in the place of the server's model.
        Leaving it early cancels what runs. An order that is refused raises, which leaves it too.
        """
        source = iter(orders)
        running: set[Future[Result]] = set()  # bound: `at_once`, results that were not taken yet included
        done: SimpleQueue[Future[Result]] = SimpleQueue()  # bound: those that are running
        try:
            while True:
                while len(running) < at_once and (order := next(source, None)) is not None:
                    begun = self._begin(self._client.order(order, policy=policy, model_key=model_key))
                    running.add(begun)
                    begun.add_done_callback(done.put)
                if not running:
                    return
                finished = done.get()
                running.discard(finished)
                yield _result(finished)
        finally:
            for left in running:
                left.cancel()

    def stream(self, order: Order, *, model_key: str | None = None) -> Iterator[AnyEvent]:
        """Everything that is told of the order, up to `Finished`. Leaving it early cancels the order."""
        events = self._client.stream(order, model_key=model_key)
        try:
            while (event := self._wait(_next(events))) is not None:
                yield event
        finally:
            if self._closing.alive:
                self._wait(events.aclose())

    def answer(self, key: str, answer: Answer) -> None:
        """Answer a call of an order; `OrderRefused` (`gone`) if nobody waits for that any more."""
        self._wait(self._client.answer(key, answer))

    def cancel(self, key: str) -> None:
        """End an order: what is not over of it gets the verdict `cancelled`."""
        self._wait(self._client.cancel(key))

    def result(self, key: str) -> Result | None:
        """What became of an order; None: it is not over."""
        return self._wait(self._client.result(key))

    def steer(self, url: str, name: str | None = None, version: str = "", key: str | None = None) -> None:
        """From now on the server's own model is this one, also for rollouts that are running."""
        self._wait(self._client.steer(url, name, version, key))

    def health(self) -> Health:
        """How the server is now. It is asked once: raises `ServerGone` if it does not answer."""
        return self._wait(self._client.health())

    def stats(self) -> Stats:
        return self._wait(self._client.stats())

    def drain(self) -> None:
        """The server takes no more orders, and ends when those that are open are over."""
        self._wait(self._client.drain())

    def blob(self, name: str) -> bytes:
        """What a message refers to: an image, for example."""
        return self._wait(self._client.blob(name))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        ended = threading.Event()
        waited = self._begin(work, ended)
        try:
            return _result(waited)
        except BaseException:  # boundary: Ctrl-C, for example; raised again
            if waited.cancel():
                ended.wait(LEAVING)  # the server is being told
            raise

    def _begin(self, work: Coroutine[Any, Any, T], ended: threading.Event | None = None) -> Future[T]:
        own = threading.current_thread() is self._thread
        if own or not self._closing.alive:
            work.close()
            raise BadInput(
                "this thread is the client's own: it cannot wait" if own else "the client is closed"
            )
        return asyncio.run_coroutine_threadsafe(_marked(work, ended or threading.Event()), self._loop)


async def _marked(work: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    try:
        return await work
    finally:
        ended.set()


async def _next(events: Events) -> AnyEvent | None:
    return await anext(events, None)


def _result(future: Future[T]) -> T:
    try:
        return future.result()
    except CancelledError as error:
        raise ServerGone("the client was closed in the meantime") from error


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _end(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if threading.current_thread() is thread:
        return loop.stop()  # nobody had it any more: it cannot wait for itself
    asyncio.run_coroutine_threadsafe(_close(client), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


async def _close(client: AsyncClient) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()} - client.leaving
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=LEAVING)
    await client.__aexit__(None, None, None)
