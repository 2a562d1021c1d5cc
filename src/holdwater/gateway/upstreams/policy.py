"""The upstream that is a Python function: it is given each request and answers. For training, and for tests.

It is asked in Chat Completions, whatever the agent speaks. What comes back is passed on as it is: token ids
and log probabilities in it are kept in the record, and its key `policy_version`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec

from ...core.errors import ModelFailed, RunFailed
from ..dialects.asking import as_chat
from ..recorder import Delta
from ..routes import DIALECTS
from . import Call
from .spoken import said, wanted_by
from .whole import Whole

Policy = Callable[[dict[str, Any]], Any]
"""Takes a decoded request; returns the text of the reply, its message, or the whole `chat.completion`.

`async def` runs on the loop; a plain function gets a thread of its own.
"""


Conversation = Callable[[int, Delta], list[Any]]
"""All messages of an attempt's request, decoded. It reads files: not for the event loop."""


class PolicyUpstream:
    """Implements `Upstream`."""

    dialects = frozenset(DIALECTS)
    counts = False

    def __init__(self, policy: Policy, conversation: Conversation | None = None) -> None:
        self._policy = policy
        self._conversation = conversation

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[Whole]:
        assert call.delta is not None, "the policy is asked for turns alone"
        wanted = wanted_by(call)
        request = msgspec.json.decode(call.body.taken())
        call.body.free()
        if call.delta.linked and self._conversation is not None:  # the policy keeps no replies
            read = partial(self._conversation, call.attempt, call.delta)
            loop = asyncio.get_running_loop()
            request[DIALECTS[call.dialect].form.key] = await loop.run_in_executor(None, read)
        if call.dialect == "gemini":  # whose requests have it in their path
            request["model"] = wanted.model
        answer = await self._answered(as_chat(call.dialect, request))
        reply = said(answer, call.dialect, wanted)
        yield Whole(reply, DIALECTS[call.dialect], call.manner, _version(answer))

    async def _answered(self, request: dict[str, Any]) -> Any:
        try:
            if inspect.iscoroutinefunction(self._policy):
                return await self._policy(request)
            answer = await _in_thread(self._policy, request)
            return await answer if inspect.isawaitable(answer) else answer
        except (ModelFailed, RunFailed):
            raise
        except Exception as error:  # boundary: what the policy's author wrote
            raise ModelFailed(f"the policy raised {type(error).__name__}: {error}", kind="policy") from error


def _version(answer: Any) -> str | None:
    version = answer.get("policy_version") if isinstance(answer, dict) else None
    return None if version is None else str(version)


async def _in_thread(function: Policy, request: dict[str, Any]) -> Any:
    """A thread of its own: one that hangs takes nobody's place, and nobody waits for it at exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.done():
            return  # nobody waits any more
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def body() -> None:
        result, error = None, None
        try:
            result = context.run(function, request)
        except BaseException as raised:  # boundary: raised again where it is awaited  # noqa: BLE001
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:
            pass  # the loop is gone, and everybody who waited

    threading.Thread(target=body, name="policy", daemon=True).start()
    return await done
