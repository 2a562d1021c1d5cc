"""The views of an attempt's sandbox and model that suites and agents get, valid until the attempt ends.

`async def` code gets the views; `def` code, in its own thread, gets the same methods without `await`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from ..core.authoring import Model, Sandbox, WholeSandbox
from ..core.errors import AttemptOver, ModelFailed, SandboxFailed
from ..core.records import CommandResult, Health, Network, SandboxSpec, SkippedEntry
from ..governor.disks import DiskFaults
from .attempt_services import AttemptPaths

T = TypeVar("T")
V = TypeVar("V", bound="AttemptView")
P = ParamSpec("P")

LOOK_SECONDS = 1.0  # how often a waiting thread checks that its loop is still open
QUIET_SECONDS = 5.0  # for cancelled calls to end


class AttemptView:
    """The base of all views. Its end cancels the calls of threads, like those of a cancelled task."""

    def __init__(self) -> None:
        self._over = False
        self._calls: set[asyncio.Task[Any]] = set()  # bound: one per thread of the attempt

    async def run_for_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` for a thread; raise `AttemptOver` if the attempt is over."""
        if self._over:
            work.close()
            raise AttemptOver("the attempt is over")
        # Not in a local: an error keeps the frames that it passes through, and with them their task.
        self._calls.add(_current_task())
        try:
            return await work
        finally:
            self._calls.discard(_current_task())

    def end(self) -> None:
        """Make every later call raise `AttemptOver`, so that late threads change nothing."""
        self._over = True
        for task in self._calls:
            task.cancel()

    async def wait_quiet(self) -> None:
        """Wait up to `QUIET_SECONDS` for the calls that `end` has cancelled."""
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=QUIET_SECONDS)

    def as_blocking(self, loop: asyncio.AbstractEventLoop) -> Any:
        """Return the view for a thread: the same methods without `await`."""
        raise NotImplementedError


Renew = Callable[[SandboxSpec | None, "SandboxView"], Awaitable[None]]


class SandboxView(AttemptView):
    """The sandbox of a running attempt. The whole output of its commands goes to the attempt's files."""

    def __init__(
        self,
        sandbox: WholeSandbox,
        paths: AttemptPaths,
        disk_faults: DiskFaults,
        renew: Renew,
        variables: Mapping[str, str] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),  # default variables of every command
        health: Health | None = None,
    ) -> None:
        super().__init__()
        self._sandbox: WholeSandbox | None = sandbox
        self.env = env
        self._health = health
        self.variables = variables
        self._paths = paths
        self._disk_faults = disk_faults
        self._renew = renew

    @property
    def workdir(self) -> str:
        return self._require_sandbox().workdir

    @property
    def private(self) -> str:
        return self._require_sandbox().private

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
        env, log = {**self.env, **(env or {})}, log or self._paths.output()
        with self._disk_faults.watch():
            return await self._require_sandbox().run(
                command, env=env, timeout=timeout, user=user, workdir=workdir, log=log
            )

    async def read(self, path: str) -> bytes:
        return await self._require_sandbox().read(path)

    async def write(self, path: str, content: str | bytes) -> None:
        with self._disk_faults.watch():
            await self._require_sandbox().write(path, content)

    async def put(self, source: Path, path: str) -> None:
        with self._disk_faults.watch():
            await self._require_sandbox().put(source, path)

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[SkippedEntry, ...]:
        with self._disk_faults.watch():
            return await self._require_sandbox().take(path, into, exclude)

    async def renew(self, start: SandboxSpec | None = None) -> None:
        self._require_sandbox()
        with self._disk_faults.watch():
            await self._renew(start, self)

    async def set_network(self, network: Network | None) -> None:
        await self._require_sandbox().set_network(network)

    async def end_processes(self) -> bool:
        ended = await self._require_sandbox().end_processes()
        if self._health is not None:  # the image's services start again
            try:
                await wait_healthy(self, self._health)
            except SandboxFailed:
                return ended  # the agent may have broken the service: the suite decides
        return ended

    @property
    def artifacts(self) -> Path:
        self._require_sandbox()
        return self._paths.artifacts()

    def end(self) -> None:
        super().end()
        self._sandbox = None  # code that keeps this view keeps nothing of the attempt
        # The callback refers to this view: a cycle, which only a collection would free.
        self._renew = _refuse_renewal

    def as_blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingSandbox:
        return BlockingSandbox(self, loop)

    def _require_sandbox(self) -> WholeSandbox:
        if self._sandbox is None:
            raise AttemptOver("the attempt is over, its sandbox is closed")
        return self._sandbox


async def wait_healthy(sandbox: Sandbox, health: Health) -> None:
    """Run the health command until it succeeds.

    Raise `SandboxFailed` after `retries` failures past the start period.
    """
    begun = asyncio.get_running_loop().time()
    failures = 0
    while True:
        result = await sandbox.run(health.command, timeout=health.timeout)
        if result.ok:
            return
        failures += asyncio.get_running_loop().time() - begun >= health.start_period
        if failures >= max(1, health.retries):
            problem = "no answer in time" if result.timed_out else f"status {result.exit_code}"
            raise SandboxFailed(
                f"not healthy after {failures} checks: {problem}: {result.output.strip()[-500:]}",
                kind="health",
            )
        await asyncio.sleep(health.interval)


class ModelView(AttemptView):
    """The model of a running attempt; `seed` differs between the attempts of a sample."""

    def __init__(self, model: Model | None, seed: int) -> None:
        super().__init__()
        self._model = model
        self.seed = seed

    @property
    def name(self) -> str:
        return self._require_model().name

    @property
    def side_name(self) -> str:
        return self._require_model().side_name

    @property
    def url(self) -> str:
        return self._require_model().url

    @property
    def sandbox_url(self) -> str:
        return self._require_model().sandbox_url

    @property
    def key(self) -> str:
        return self._require_model().key

    async def chat(self, /, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        if self._over:
            raise AttemptOver("the attempt is over, its model is closed")
        return await self._require_model().chat(messages, **options)

    def as_blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingModel:
        return BlockingModel(self, loop)

    def _require_model(self) -> Model:
        if self._model is None:
            raise ModelFailed("this run has no model", "give one with `--model`", kind="none", again=False)
        return self._model


async def _refuse_renewal(start: SandboxSpec | None, view: SandboxView) -> None:
    raise AttemptOver("the attempt is over, its sandbox is closed")


class BlockingView(Generic[V]):
    """A view for a thread: its methods wait for those of the view, and its properties are the same."""

    def __init__(self, view: V, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def mirror(
    method: Callable[Concatenate[V, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingView[V], P], T]:
    """Make the blocking method of a view's `async` one."""

    @functools.wraps(method)
    def blocking(self: BlockingView[V], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return wait_for(self._view, method(self._view, *args, **kwargs), self._loop)

    return blocking


class BlockingSandbox(BlockingView[SandboxView]):
    """A `SandboxView` for a thread."""

    run = mirror(SandboxView.run)
    read = mirror(SandboxView.read)
    write = mirror(SandboxView.write)
    put = mirror(SandboxView.put)
    take = mirror(SandboxView.take)
    renew = mirror(SandboxView.renew)
    set_network = mirror(SandboxView.set_network)
    end_processes = mirror(SandboxView.end_processes)


class BlockingModel(BlockingView[ModelView]):
    """A `ModelView` for a thread."""

    chat = mirror(ModelView.chat)


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def adapt_arguments(function: Callable[..., Any], *views: Any) -> list[Any]:
    """Return the arguments for `function`: views for `async def`, blocking views for `def`."""
    if is_async(function):
        return list(views)
    loop = asyncio.get_running_loop()
    return [view.as_blocking(loop) if isinstance(view, AttemptView) else view for view in views]


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling `function` gives a coroutine; an object with an `async` `__call__` counts."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def wait_for(view: AttemptView, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run a view's `work` on the loop and wait for its result in this thread."""
    if asyncio._get_running_loop() is loop:  # waiting here would block the loop and every attempt on it
        work.close()
        raise RuntimeError("a blocking call on the event loop; a function that awaits has to be `async def`")
    call = view.run_for_thread(work)
    try:
        return _wait_result(asyncio.run_coroutine_threadsafe(call, loop), loop)
    except CancelledError:
        raise AttemptOver("the attempt is over") from None
    except RuntimeError:
        if not loop.is_closed():
            raise
        raise AttemptOver("the attempt is over, and so is its run") from None
    finally:
        for coroutine in (call, work):
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # the loop never started it


def _wait_result(future: Future[T], loop: asyncio.AbstractEventLoop) -> T:
    """Wait for the result; raise `AttemptOver` if the loop is closed, because it then never sets one."""
    while True:
        try:
            return future.result(LOOK_SECONDS)
        except TimeoutError:
            if future.done():
                raise
            if loop.is_closed():
                raise AttemptOver("the attempt is over, and so is its run") from None
