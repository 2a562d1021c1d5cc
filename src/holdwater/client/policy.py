"""Runs the trainer's own policy: passes each model call to it and posts the result as a `CallAnswer`.

A call is rebuilt from its new messages and the calls before it. Many calls run at once, within bounds. The
policy is foreign code, so an exception is posted as an answer too. `async_client.py` reads the events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from ..core.errors import ModelFailed, as_failure
from ..core.records import AttemptPhase
from ..core.serving_protocol import KEPT_CALLS, AnyOrderEvent, CallAnswer, Called, Dropped, Order, Settled
from .server_connection import ConnectionLost, InvalidReply, OrderRefused, ServerGone

CALLS_AN_ORDER = 64  # calls that wait or run; at this number the order's stream is not read
REMEMBERED_CALLS = 1024  # newest calls of an order, which are not started twice
LONGEST_HAVE = 4000  # bytes of the header; a call that continues one not listed there is sent whole
CANCELLING = 2.0  # seconds for a policy to end after its call was cancelled

_ENCODE = msgspec.msgpack.Encoder().encode


class PolicyCall(NamedTuple):
    """A model call that an agent waits for. Calls share their contents, so a policy must not change them."""

    order: str  # the order's key
    member: int  # which rollout of the order
    id: str
    dialect: str  # `chat`, `responses`, `messages` or `gemini`
    messages: list[Any]  # as the agent sent them
    head: Mapping[str, Any]  # every other key of the request
    streamed: bool = False  # the agent requested a streamed reply; the policy returns a whole one in any case
    parent: str | None = None  # id of an earlier call of the rollout with the same first `keep` messages
    keep: int = 0

    @property
    def request(self) -> dict[str, Any]:
        """The whole request, in its dialect."""
        from ..dialect import DIALECTS  # here: most clients never need it

        whole = dict(self.head)
        if self.messages:
            key = DIALECTS[self.dialect].key if self.dialect in DIALECTS else "messages"
            whole[key] = list(self.messages)
        return whole

    @property
    def chat(self) -> dict[str, Any]:
        """The request, converted to Chat Completions."""
        from ..dialect import DIALECTS

        return DIALECTS[self.dialect].request_to_chat(self.request)


Policy = Callable[[PolicyCall], Any]
"""Takes a `PolicyCall`; returns a text, a message, a `chat.completion`, a reply in the call's dialect, or a
`CallAnswer`.

An `async def` policy, or an object with an `async` `__call__`, runs on the client's loop; a plain function
gets a thread of its own. If the policy has a method `end_member(order, member)`, the client calls it when a
rollout is over, also if the rollout is not over but its order has been left.
"""
PolicyErrors = Literal["raise", "fail"]
"""`raise`: an exception of the policy leaves its order and is raised to the order's caller. `fail`: it fails
the agent's call, so that the rollout has a model failure and no reward."""


class UnknownParent(ConnectionLost):
    """A call continues one that the client does not have. After a new request the server sends it whole."""


class CallHistory:
    """The recent calls of one order, on which later calls build."""

    def __init__(self, order: str) -> None:
        self._order = order
        # By rollout, then by call, the newest last; bound: the order's size, and KEPT_CALLS.
        self._members: dict[int, dict[str, PolicyCall]] = {}

    def rebuild_call(self, event: Called) -> PolicyCall:
        """Return the whole call; raise `UnknownParent` if the call that it continues is not known."""
        calls = self._members.setdefault(event.member, {})
        parent = _find_parent(calls, event)
        try:
            append = [msgspec.json.decode(message) for message in event.append]
            head = parent.head if event.head is None and parent is not None else _decode_head(event.head)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidReply(f"cannot decode a model call: {error}") from error
        messages = [*parent.messages[: event.keep], *append] if parent is not None else append
        call = PolicyCall(
            self._order,
            event.member,
            event.call,
            event.dialect,
            messages,
            head,
            event.streamed,
            event.parent,
            event.keep,
        )
        calls.pop(call.id, None)
        calls[call.id] = call
        if len(calls) > KEPT_CALLS:
            del calls[next(iter(calls))]
        return call

    def forget(self, member: int) -> None:
        """Forget the calls of a rollout that is over: no later call continues them."""
        self._members.pop(member, None)

    def render_known(self) -> str:
        """Return the ids of the calls that later calls may continue, the newest of each rollout first."""
        newest = [list(reversed(calls)) for calls in self._members.values()]
        told: list[str] = []
        room = LONGEST_HAVE
        for call in (ids[depth] for depth in range(KEPT_CALLS) for ids in newest if depth < len(ids)):
            room -= len(call) + 1
            if room < 0:
                break
            told.append(call)
        return ",".join(told)


def _find_parent(calls: Mapping[str, PolicyCall], event: Called) -> PolicyCall | None:
    if event.parent is None:
        return None
    known = calls.get(event.parent)
    if known is None or event.keep > len(known.messages):
        raise UnknownParent(f"a model call continues an unknown call: `{event.parent}`")
    return known


def _decode_head(text: str | None) -> dict[str, Any]:
    return msgspec.json.decode(text or "null", type=dict[str, Any])


class RunnerSettings(NamedTuple):
    """The settings of a client that all its policy runners share."""

    slots: asyncio.Semaphore  # for the calls of all orders
    errors: PolicyErrors


class PolicyRunner:
    """Answers the calls of one order inside of its `async with` block.

    With `errors="raise"` an error of the policy cancels the task of that block, which raises the error.
    """

    def __init__(
        self, order: Order, policy: Policy, settings: RunnerSettings, post: Callable[[bytes], Awaitable[None]]
    ) -> None:
        from ..rollout.user_calls import UserCalls  # here: a client without a policy needs no worker code

        self.conversations = CallHistory(order.key)
        self.error: Exception | None = None  # the first error to raise
        self._order = order
        self._policy = policy
        self._user_calls = UserCalls("policy")
        self._settings = settings
        self._post = post
        self._owner: asyncio.Task[Any] | None = None
        self._members: set[int] = set()  # that have called; bound: the order's size, and its replacements
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by call; bound: CALLS_AN_ORDER
        self._room = asyncio.Semaphore(CALLS_AN_ORDER)
        self._remembered: dict[str, None] = {}  # calls, the newest last; bound: REMEMBERED_CALLS

    async def __aenter__(self) -> PolicyRunner:
        self._owner = asyncio.current_task()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        owner, self._owner = self._owner, None
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        try:
            if left:
                await asyncio.wait(left, timeout=CANCELLING)
            for member in tuple(self._members):
                self._end_member(member)
        finally:
            # As in `asyncio.timeout`: if another party has cancelled the task too, the cancellation wins.
            if self.error is not None and owner is not None and owner.uncancel() == 0:
                raise self.error

    async def handle_event(self, event: AnyOrderEvent) -> None:
        """Start a new call, cancel a dropped one, forget a settled rollout. Wait while too many calls run."""
        if isinstance(event, Called):
            # After a lost connection the server sends calls again that run here or have just been answered.
            if event.call not in self._remembered:
                await self._begin(self.conversations.rebuild_call(event))
        elif isinstance(event, Dropped) and event.call in self._tasks:
            self._tasks[event.call].cancel()
        elif isinstance(event, Settled):
            self._end_member(event.member)

    def _end_member(self, member: int) -> None:
        self.conversations.forget(member)
        self._members.discard(member)
        if (end := getattr(self._policy, "end_member", None)) is not None:
            end(self._order.key, member)

    async def _begin(self, call: PolicyCall) -> None:
        await self._room.acquire()
        self._members.add(call.member)
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
        async with self._settings.slots:
            try:
                answer = await self._ask_policy(call)
            except Exception as error:  # boundary: the policy is foreign code  # noqa: BLE001
                text = as_failure(error, ModelFailed, AttemptPhase.ACTING).message
                return await self._fail(call, error, f"the policy failed: {text}")
        try:
            return await self._post(answer)
        except OrderRefused as refused:
            if refused.code not in ("gone", "unknown"):
                await self._fail(call, refused, f"the server refused the answer: {refused}")
        except ServerGone:
            pass  # the reader of the order's stream gets the same error, and raises it

    async def _ask_policy(self, call: PolicyCall) -> bytes:
        """Return the encoded answer. An answer that cannot be encoded is an error of the policy."""
        said = _as_answer(call.id, await self._user_calls.call(self._policy, call))
        return _ENCODE(said if said.version else replace(said, version=self._order.model.version))

    async def _fail(self, call: PolicyCall, error: Exception, message: str) -> None:
        """Raise the error to the caller of the order, or post it: otherwise the agent would wait."""
        if self._settings.errors == "raise":
            if self.error is None and self._owner is not None:
                self.error = error
                self._owner.cancel()
            return
        try:
            version = self._order.model.version
            await self._post(_ENCODE(CallAnswer(call=call.id, error=message, version=version)))
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
