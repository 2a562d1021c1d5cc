"""Rebuilds the model calls that the trainer answers: each from its new messages and the calls before it.

`async_client.py` reads the stream of events, and `policy_runner.py` answers the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.serving_protocol import KEPT_CALLS, Called
from ..dialect import DIALECTS
from .backoff import ConnectionLost, InvalidReply

LONGEST_HAVE = 4000  # bytes of the header; a call that continues one not listed there is sent whole


class PolicyCall(NamedTuple):
    """A model call that an agent waits for. Calls share their contents, so a policy must not change them."""

    order: str  # the order's key
    member: int  # which rollout of the order
    id: str
    dialect: str  # `chat`, `responses`, `messages` or `gemini`
    messages: list[Any]  # as the agent sent them
    head: Mapping[str, Any]  # every other key of the request
    streamed: bool = False  # the agent requested a streamed reply; the policy returns a whole one in any case

    @property
    def request(self) -> dict[str, Any]:
        """The whole request, in its dialect."""
        whole = dict(self.head)
        if self.messages:
            key = DIALECTS[self.dialect].key if self.dialect in DIALECTS else "messages"
            whole[key] = list(self.messages)
        return whole

    @property
    def chat(self) -> dict[str, Any]:
        """The request, converted to Chat Completions."""
        return DIALECTS[self.dialect].request_to_chat(self.request)


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
            head = _decode_head(event.head) if event.head is not None or parent is None else parent.head
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidReply(f"cannot decode a model call: {error}") from error
        messages = [*parent.messages[: event.keep], *append] if parent is not None else append
        call = PolicyCall(
            self._order, event.member, event.call, event.dialect, messages, head, event.streamed
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
