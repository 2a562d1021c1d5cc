"""The trainer's own policy at work: each call is given to it, and what it says goes back as an `Answer`.

Many calls at once, within bounds. The policy is foreign code: what it raises is an answer too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import msgspec
from msgspec.structs import replace

from ..core.errors import ModelFailed, as_failure
from ..core.records import Phase
from ..core.serving import Answer, AnyEvent, Called, Dropped, Order, Settled
from .calls import Call, Conversations
from .errors import OrderRefused, ServerGone

CALLS_AN_ORDER = 64  # that wait or are being answered; with so many its stream is not read
BEGUN = 1024  # newest calls of an order that are not begun again
CANCELLING = 2.0  # seconds for a policy whose answer nobody wants any more

_ENCODE = msgspec.msgpack.Encoder().encode

Policy = Callable[[Call], Any]
"""Takes a `Call`; returns a text, a message, a `chat.completion`, a reply in its dialect, or an `Answer`.

`async def` runs on the client's loop; a plain function gets a thread of its own.
"""


class Answering:
    """Answers the calls of one order while it is open: used with `async with`."""

    def __init__(
        self, order: Order, policy: Policy, slots: asyncio.Semaphore, post: Callable[[bytes], Awaitable[None]]
    ) -> None:
        from ..rollout.calls import Calls  # here: a client without a policy needs nothing of a worker

        self.conversations = Conversations(order.key)
        self._version = order.model.version
        self._policy = policy
        self._foreign = Calls("policy")
        self._slots = slots
        self._post = post
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by call; bound: CALLS_AN_ORDER
        self._room = asyncio.Semaphore(CALLS_AN_ORDER)
        self._begun: dict[str, None] = {}  # calls, the newest last; bound: BEGUN

    async def __aenter__(self) -> Answering:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCELLING)

    async def hear(self, event: AnyEvent) -> None:
        """Do what the event asks for; of a new call: begin, and wait while there are too many."""
        if isinstance(event, Called):
            # One that is told again, after a connection was lost, is being answered, or just was.
            if event.call not in self._begun:
                await self._begin(self.conversations.take(event))
        elif isinstance(event, Dropped) and event.call in self._tasks:
            self._tasks[event.call].cancel()
        elif isinstance(event, Settled):
            self.conversations.forget(event.member)

    async def _begin(self, call: Call) -> None:
        await self._room.acquire()
        task = asyncio.create_task(self._answer(call))
        self._tasks[call.id] = task
        self._begun[call.id] = None
        if len(self._begun) > BEGUN:
            del self._begun[next(iter(self._begun))]
        task.add_done_callback(lambda done: self._ended(call.id))

    def _ended(self, call: str) -> None:
        del self._tasks[call]
        self._room.release()

    async def _answer(self, call: Call) -> None:
        async with self._slots:
            answer = await self._asked(call)
        try:
            await self._post(answer)
        except OrderRefused as refused:
            if refused.code not in ("gone", "unknown"):
                await self._fail(call, f"its answer was refused: {refused}")
        except ServerGone:
            pass  # whoever reads the order's stream finds out, and says so

    async def _asked(self, call: Call) -> bytes:
        """The answer, as it goes to the server: what cannot be sent is found out here."""
        try:
            said = _as_answer(call.id, await self._foreign.call(self._policy, call))
            return _ENCODE(said if said.version else replace(said, version=self._version))
        except Exception as error:  # boundary: what the trainer's author wrote  # noqa: BLE001
            text = as_failure(error, ModelFailed, Phase.ACTING).message
            return _ENCODE(Answer(call=call.id, error=f"the policy failed: {text}", version=self._version))

    async def _fail(self, call: Call, message: str) -> None:
        """Say so in its place: otherwise the agent would wait until its time is over."""
        try:
            await self._post(_ENCODE(Answer(call=call.id, error=message)))
        except (OrderRefused, ServerGone):
            pass  # nobody waits for it any more, or whoever reads the order's stream finds out


def _as_answer(call: str, said: Any) -> Answer:
    if isinstance(said, Answer):
        return replace(said, call=call)
    if isinstance(said, str):
        return Answer(call=call, text=said)
    if isinstance(said, dict):
        return Answer(call=call, reply=said)
    raise TypeError(f"it returned {type(said).__name__}, not a str, a dict or an `Answer`")
