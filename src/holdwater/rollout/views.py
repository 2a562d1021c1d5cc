"""What suites and agents are handed: the attempt's sandbox and model, as long as the attempt lives.

`async def` code gets the views; `def` code, in its own thread, the same methods without `await`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from ..core.authoring import Model, WholeSandbox
from ..core.errors import AttemptOver, ModelFailed, SandboxFailed
from ..core.records import CommandResult, Health, LeftOut, Network, Start
from .disks import Hurt
from .health import healthy
from .place import Paths

T = TypeVar("T")

LOOK_SECONDS = 1.0  # how often a waiting thread looks whether its loop is still there
QUIET_SECONDS = 5.0  # what calls that were ended get to be over


class View:
    """What all views have: an end, at which the calls of threads end too, as a cancelled task's would."""

    def __init__(self) -> None:
        self._over = False
        self._calls: set[asyncio.Task[Any]] = set()  # bound: one for each thread of the attempt

    async def on_behalf(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what a thread waits for, unless the attempt is over."""
        if self._over:
            work.close()
            raise AttemptOver("the attempt is over")
        self._calls.add(_current())  # not kept here: a frame that an error goes through is held by its task
        try:
            return await work
        finally:
            self._calls.discard(_current())

    def end(self) -> None:
        """From now on every call raises `AttemptOver`: late threads touch nothing."""
        self._over = True
        for task in self._calls:
            task.cancel()

    async def quiet(self) -> None:
        """Wait, for a while, until the calls that `end` has ended are over."""
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=QUIET_SECONDS)

    def blocking(self, loop: asyncio.AbstractEventLoop) -> Any:
        """The same for a thread: its methods without `await`."""
        raise NotImplementedError


Renew = Callable[[Start | None, "SandboxView"], Awaitable[None]]


class SandboxView(View):
    """The sandbox of a living attempt; its commands' whole output goes to the attempt's own files."""

    def __init__(
        self,
        sandbox: WholeSandbox,
        paths: Paths,
        hurt: Hurt,
        renew: Renew,
        variables: Mapping[str, str] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),  # of every command that says nothing else
        health: Health | None = None,
    ) -> None:
        super().__init__()
        self._sandbox: WholeSandbox | None = sandbox
        self._env = env
        self._health = health
        self.variables = variables
        self._paths = paths
        self._hurt = hurt
        self._renew = renew

    @property
    def workdir(self) -> str:
        return self._alive().workdir

    @property
    def private(self) -> str:
        return self._alive().private

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        workdir: str | None = None,
        log: Path | None = None,
    ) -> CommandResult:
        env, log = {**self._env, **(env or {})}, log or self._paths.output()
        with self._hurt.noticed():
            return await self._alive().run(
                command, env=env, timeout=timeout, user=user, workdir=workdir, log=log
            )

    async def read(self, path: str) -> bytes:
        return await self._alive().read(path)

    async def write(self, path: str, content: str | bytes) -> None:
        with self._hurt.noticed():
            await self._alive().write(path, content)

    async def put(self, source: Path, path: str) -> None:
        with self._hurt.noticed():
            await self._alive().put(source, path)

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[LeftOut, ...]:
        with self._hurt.noticed():
            return await self._alive().take(path, into, exclude)

    async def renew(self, start: Start | None = None) -> None:
        self._alive()
        with self._hurt.noticed():
            await self._renew(start, self)

    async def reach(self, network: Network | None) -> None:
        await self._alive().reach(network)

    async def end_processes(self) -> bool:
        ended = await self._alive().end_processes()
        if self._health is not None:  # services of the image start again
            try:
                await healthy(self, self._health)
            except SandboxFailed:
                return ended  # the agent may have broken it: that is for the suite to judge
        return ended

    @property
    def artifacts(self) -> Path:
        self._alive()
        return self._paths.artifacts()

    def end(self) -> None:
        super().end()
        self._sandbox = None  # whoever keeps this keeps nothing of the attempt
        self._renew = _over  # what renews it knows this view: a cycle, which only a collection would free

    def blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingSandbox:
        return BlockingSandbox(self, loop)

    def _alive(self) -> WholeSandbox:
        if self._sandbox is None:
            raise AttemptOver("the attempt is over, its sandbox is closed")
        return self._sandbox


class ModelView(View):
    """The model of a living attempt; `seed` differs from one attempt of a sample to the next."""

    def __init__(self, model: Model | None, seed: int) -> None:
        super().__init__()
        self._model = model
        self.seed = seed

    @property
    def name(self) -> str:
        return self._present().name

    @property
    def url(self) -> str:
        return self._present().url

    @property
    def sandbox_url(self) -> str:
        return self._present().sandbox_url

    @property
    def key(self) -> str:
        return self._present().key

    async def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        if self._over:
            raise AttemptOver("the attempt is over, its model is closed")
        return await self._present().chat(messages, **options)

    def blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingModel:
        return BlockingModel(self, loop)

    def _present(self) -> Model:
        if self._model is None:
            raise ModelFailed("this run has no model", "give one with `--model`", kind="none", again=False)
        return self._model


async def _over(start: Start | None, view: SandboxView) -> None:
    raise AttemptOver("the attempt is over, its sandbox is closed")


class BlockingSandbox:
    """A `SandboxView` for a thread."""

    def __init__(self, view: SandboxView, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    @property
    def workdir(self) -> str:
        return self._view.workdir

    @property
    def private(self) -> str:
        return self._view.private

    def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        workdir: str | None = None,
    ) -> CommandResult:
        work = self._view.run(command, env=env, timeout=timeout, user=user, workdir=workdir)
        return wait_for(self._view, work, self._loop)

    def read(self, path: str) -> bytes:
        return wait_for(self._view, self._view.read(path), self._loop)

    def write(self, path: str, content: str | bytes) -> None:
        wait_for(self._view, self._view.write(path, content), self._loop)

    def put(self, source: Path, path: str) -> None:
        wait_for(self._view, self._view.put(source, path), self._loop)

    def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[LeftOut, ...]:
        return wait_for(self._view, self._view.take(path, into, exclude), self._loop)

    def renew(self, start: Start | None = None) -> None:
        wait_for(self._view, self._view.renew(start), self._loop)

    def reach(self, network: Network | None) -> None:
        wait_for(self._view, self._view.reach(network), self._loop)

    def end_processes(self) -> bool:
        return wait_for(self._view, self._view.end_processes(), self._loop)

    @property
    def artifacts(self) -> Path:
        return self._view.artifacts

    @property
    def variables(self) -> Mapping[str, str]:
        return self._view.variables


class BlockingModel:
    """A `ModelView` for a thread."""

    def __init__(self, view: ModelView, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        return wait_for(self._view, self._view.chat(messages, **options), self._loop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def _current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def for_caller(function: Callable[..., Any], *views: Any) -> list[Any]:
    """The arguments as `function` wants them: views for `async def`, blocking ones for `def`."""
    if is_async(function):
        return list(views)
    loop = asyncio.get_running_loop()
    return [view.blocking(loop) if isinstance(view, View) else view for view in views]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; an object with an `async` `__call__` counts."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def wait_for(view: View, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Have the loop do a view's `work`, and wait for it in this thread."""
    if asyncio._get_running_loop() is loop:  # waiting here would stop the loop, and every attempt on it
        work.close()
        raise RuntimeError("a blocking call on the event loop; a function that awaits has to be `async def`")
    call = view.on_behalf(work)
    try:
        return _result(asyncio.run_coroutine_threadsafe(call, loop), loop)
    except CancelledError:
        raise AttemptOver("the attempt is over") from None
    except RuntimeError:
        if not loop.is_closed():
            raise
        raise AttemptOver("the attempt is over, and so is its run") from None
    finally:
        for coroutine in (call, work):
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # the loop never came to it


def _result(future: Future[T], loop: asyncio.AbstractEventLoop) -> T:
    """What the loop makes of the call; a loop that was closed before it came to it will never say."""
    while True:
        try:
            return future.result(LOOK_SECONDS)
        except TimeoutError:
            if future.done():
                raise
            if loop.is_closed():
                raise AttemptOver("the attempt is over, and so is its run") from None
