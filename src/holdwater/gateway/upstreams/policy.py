"""The upstream that calls a Python function for each request. For training, and for tests.

The function gets Chat Completions requests, for agents of any dialect. Its reply is passed on unchanged: the
record keeps its token ids, its log probabilities and its key `policy_version`.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ...core.authoring import Policy
from ...core.errors import ModelFailed, RunFailed
from ...dialect import DIALECTS, list_conversations
from . import UpstreamCall
from .complete_reply import CompleteReply, render_reply
from .request_conversion import ReadConversation, convert_request


class PolicyUpstream:
    """Implements `Upstream`."""

    counting: frozenset[str] = frozenset()

    def __init__(self, policy: Policy, conversation: ReadConversation | None = None) -> None:
        self._policy = policy
        self._conversation = conversation

    @property
    def dialects(self) -> frozenset[str]:
        return list_conversations()

    @asynccontextmanager
    async def send(self, call: UpstreamCall) -> AsyncIterator[CompleteReply]:
        assert call.delta is not None, "the policy answers only turns"
        request, context = await convert_request(call, self._conversation)
        call.body.free()
        answer = await self._call_policy(request)
        dialect = DIALECTS[call.dialect]
        reply = render_reply(answer, dialect, context)
        version = answer.get("policy_version") if isinstance(answer, dict) else None
        yield CompleteReply(reply, dialect, call.reply_format, None if version is None else str(version))

    async def _call_policy(self, request: dict[str, Any]) -> Any:
        try:
            if inspect.iscoroutinefunction(self._policy):
                return await self._policy(request)
            answer = await _run_in_thread(self._policy, request)
            return await answer if inspect.isawaitable(answer) else answer
        except (ModelFailed, RunFailed):
            raise
        except Exception as error:  # boundary: user code
            raise ModelFailed(f"the policy raised {type(error).__name__}: {error}", kind="policy") from error


async def _run_in_thread(function: Policy, request: dict[str, Any]) -> Any:
    """Run in a separate thread: one that hangs blocks no other call, and exit does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.done():
            return  # the call was cancelled
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def body() -> None:
        result, error = None, None
        try:
            result = context.run(function, request)
        except BaseException as raised:  # boundary: raised again in the awaiting task  # noqa: BLE001
            error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:
            pass  # the loop is closed, so no task waits for the result

    threading.Thread(target=body, name="policy", daemon=True).start()
    return await done
