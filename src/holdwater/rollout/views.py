"""What suites and agents are handed: the attempt's sandbox and model, as long as the attempt lives.

`async def` code gets the views; `def` code, in its own thread, the same methods without `await`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..core.authoring import Model, Sandbox
from ..core.errors import AttemptOver, ModelFailed
from ..core.records import CommandResult

T = TypeVar("T")


class SandboxView:
    """The sandbox of a living attempt; its commands' whole output goes to the attempt's own files."""

    def __init__(self, sandbox: Sandbox, logs: Callable[[], Path]) -> None:
        self._sandbox: Sandbox | None = sandbox
        self._logs = logs

    @property
    def workdir(self) -> str:
        return self._alive().workdir

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        log: Path | None = None,
    ) -> CommandResult:
        return await self._alive().run(command, env=env, timeout=timeout, log=log or self._logs())

    async def read(self, path: str) -> bytes:
        return await self._alive().read(path)

    async def write(self, path: str, content: str | bytes) -> None:
        await self._alive().write(path, content)

    def end(self) -> None:
        """From now on every call raises `AttemptOver`: late threads touch nothing."""
        self._sandbox = None

    def _alive(self) -> Sandbox:
        if self._sandbox is None:
            raise AttemptOver("the attempt is over, its sandbox is closed")
        return self._sandbox


class ModelView:
    """The model of a living attempt; `seed` differs from one attempt of a sample to the next."""

    def __init__(self, model: Model | None, seed: int) -> None:
        self._model = model
        self._over = False
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

    def end(self) -> None:
        self._over = True

    def _present(self) -> Model:
        if self._model is None:
            raise ModelFailed("this run has no model", "give one with `--model`", kind="none", again=False)
        return self._model


class BlockingSandbox:
    """A `SandboxView` for a thread."""

    def __init__(self, view: SandboxView, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    @property
    def workdir(self) -> str:
        return self._view.workdir

    def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        return _wait(self._view.run(command, env=env, timeout=timeout), self._loop)

    def read(self, path: str) -> bytes:
        return _wait(self._view.read(path), self._loop)

    def write(self, path: str, content: str | bytes) -> None:
        _wait(self._view.write(path, content), self._loop)


class BlockingModel:
    """A `ModelView` for a thread."""

    def __init__(self, view: ModelView, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        return _wait(self._view.chat(messages, **options), self._loop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def for_caller(function: Callable[..., Any], *views: Any) -> list[Any]:
    """The arguments as `function` wants them: views for `async def`, blocking ones for `def`."""
    if is_async(function):
        return list(views)
    loop = asyncio.get_running_loop()
    blocking = {SandboxView: BlockingSandbox, ModelView: BlockingModel}
    return [blocking[type(v)](v, loop) if type(v) in blocking else v for v in views]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; an object with an `async` `__call__` counts."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _wait(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    try:
        future = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # the loop is closed: the thread outlived the whole run
        work.close()
        raise AttemptOver("the attempt is over, and so is its run") from None
    return future.result()
