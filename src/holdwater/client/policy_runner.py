"""Runs the trainer's own policy: passes each model call to it and posts the result as a `CallAnswer`.

Many calls run at once, within bounds. The policy is foreign code, so an exception is posted as an answer too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import msgspec
from msgspec.structs import replace

from ..core.errors import ModelFailed, as_failure
from ..core.records import AttemptPhase
from ..core.serving_protocol import AnyOrderEvent, CallAnswer, Called, Dropped, Order, Settled
from .errors import OrderRefused, ServerGone
from .policy_calls import CallHistory, PolicyCall

CALLS_AN_ORDER = 64  # calls that wait or run; at this number the order's stream is not read
REMEMBERED_CALLS = 1024  # newest calls of an order, which are not started twice
CANCELLING = 2.0  # seconds for a policy to end after its call was cancelled

_ENCODE = msgspec.msgpack.Encoder().encode

Policy = Callable[[PolicyCall], Any]
"""Takes a `PolicyCall`; returns a text, a message, a `chat.completion`, a reply in the call's dialect, or a
`CallAnswer`.

An `async def` policy runs on the client's loop; a plain function gets a thread of its own.
"""


class PolicyRunner:
    """Answers the calls of one order inside of its `async with` block."""

    def __init__(
        self, order: Order, policy: Policy, slots: asyncio.Semaphore, post: Callable[[bytes], Awaitable[None]]
    ) -> None:
        from ..rollout.user_calls import UserCalls  # here: a client without a policy needs no worker code

        self.conversations = CallHistory(order.key)
        self._version = order.model.version
        self._policy = policy
        self._user_calls = UserCalls("policy")
        self._slots = slots
        self._post = post
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by call; bound: CALLS_AN_ORDER
        self._room = asyncio.Semaphore(CALLS_AN_ORDER)
        self._remembered: dict[str, None] = {}  # calls, the newest last; bound: REMEMBERED_CALLS

    async def __aenter__(self) -> PolicyRunner:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCELLING)

    async def handle_event(self, event: AnyOrderEvent) -> None:
        """Start a new call, cancel a dropped one, forget a settled rollout. Wait while too many calls run."""
        if isinstance(event, Called):
            # After a lost connection the server sends calls again that run here or have just been answered.
            if event.call not in self._remembered:
                await self._begin(self.conversations.rebuild_call(event))
        elif isinstance(event, Dropped) and event.call in self._tasks:
            self._tasks[event.call].cancel()
        elif isinstance(event, Settled):
            self.conversations.forget(event.member)

    async def _begin(self, call: PolicyCall) -> None:
        await self._room.acquire()
        task = asyncio.create_task(self._answer(call))
        self._tasks[call.id] = task
        self._remembered[call.id] = None
        if len(self._remembered) > REMEMBERED_CALLS:
            del self._remembered[next(iter(self._remembered))]
        task.add_done_callback(lambda done: self._on_task_done(call.id))

    def _on_task_done(self, call: str) -> None:
        del self._tasks[call]
        self._room.release()

    async def _answer(self, call: PolicyCall) -> None:
        async with self._slots:
            answer = await self._ask_policy(call)
        try:
            await self._post(answer)
        except OrderRefused as refused:
            if refused.code not in ("gone", "unknown"):
                await self._fail(call, f"the server refused the answer: {refused}")
        except ServerGone:
            pass  # the reader of the order's stream gets the same error, and raises it

    async def _ask_policy(self, call: PolicyCall) -> bytes:
        """Return the encoded answer. An answer that cannot be encoded becomes an error here."""
        try:
            said = _as_answer(call.id, await self._user_calls.call(self._policy, call))
            return _ENCODE(said if said.version else replace(said, version=self._version))
        except Exception as error:  # boundary: the policy is foreign code  # noqa: BLE001
            text = as_failure(error, ModelFailed, AttemptPhase.ACTING).message
            return _ENCODE(
                CallAnswer(call=call.id, error=f"the policy failed: {text}", version=self._version)
            )

    async def _fail(self, call: PolicyCall, message: str) -> None:
        """Post an error in place of the answer: otherwise the agent would wait until its time limit."""
        try:
            await self._post(_ENCODE(CallAnswer(call=call.id, error=message)))
        except (OrderRefused, ServerGone):
            pass  # the call is over, or the reader of the order's stream gets the same error


def _as_answer(call: str, said: Any) -> CallAnswer:
    if isinstance(said, CallAnswer):
        return replace(said, call=call)
    if isinstance(said, str):
        return CallAnswer(call=call, text=said)
    if isinstance(said, dict):
        return CallAnswer(call=call, reply=said)
    raise TypeError(f"it returned {type(said).__name__}, not a str, a dict or a `CallAnswer`")
