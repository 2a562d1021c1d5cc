"""The upstream that is a Python function: it is given each request and answers. For training, and for tests.

It speaks Chat Completions alone, plain and streaming. What comes back is passed on as it is: token ids and
log probabilities in it are kept in the record.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from multidict import CIMultiDict

from ...core.errors import ModelFailed, RunFailed
from ...core.records import Failure
from ..dialects.chat import Chat
from ..dialects.sse import MISSHAPEN
from . import Call

Policy = Callable[[dict[str, Any]], Any]
"""Takes a decoded request; returns the text of the reply, its message, or the whole `chat.completion`.

`async def` runs on the loop; a plain function gets a thread of its own.
"""


class PolicyUpstream:
    """Implements `Upstream`."""

    dialects = frozenset({"chat"})

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[PolicyAnswer]:
        request = msgspec.json.decode(call.body.taken())
        call.body.free()
        asked = msgspec.convert(request, _Asked)
        completion = _completion(await self._answered(request), asked)
        yield PolicyAnswer(*_spoken(completion, asked))

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


class PolicyAnswer:
    """Implements `Answer`."""

    status = 200
    failure: Failure | None = None

    def __init__(self, kind: str, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.headers = CIMultiDict({"Content-Type": kind})

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


class _Asked(msgspec.Struct):
    model: str = "policy"
    stream: bool | None = None


def _completion(answer: Any, asked: _Asked) -> dict[str, Any]:
    """What the policy returned, as a `chat.completion`."""
    if isinstance(answer, dict) and "choices" in answer:
        return answer
    if isinstance(answer, str):
        answer = {"content": answer}
    if not isinstance(answer, dict):
        raise ModelFailed(f"the policy returned {type(answer).__name__}, not a str or a dict", kind="policy")
    message = {"role": "assistant", "content": None, **answer}
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "chatcmpl-policy",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
    }


def _spoken(completion: dict[str, Any], asked: _Asked) -> tuple[str, list[bytes]]:
    """The type and the pieces of the body: the completion as it is, or told as a stream."""
    try:
        if not asked.stream:
            return "application/json", [msgspec.json.encode(completion)]
        choices = [
            {**choice, "finish_reason": choice.get("finish_reason") or "stop"}  # clients wait for one
            for choice in completion["choices"]
        ]
        return "text/event-stream", Chat().told(msgspec.json.encode({**completion, "choices": choices}))
    except MISSHAPEN as error:
        raise ModelFailed(f"the policy returned no completion: {error}", kind="policy") from error


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
