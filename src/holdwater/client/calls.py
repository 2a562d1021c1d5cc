"""Calls that the trainer itself answers: each put together from what is new in it and what is known.

It neither reads a stream nor answers: `client.py` and `answering.py` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.serving import KEPT_CALLS, Called
from .patience import Garbled, Lost

LONGEST_HAVE = 4000  # bytes of a header; what is not named in it comes whole

_MESSAGES = {"chat": "messages", "messages": "messages", "responses": "input", "gemini": "contents"}


class Call(NamedTuple):
    """A model call that an agent waits for. What it holds is shared: it must not be changed."""

    order: str  # its key
    member: int  # which rollout of the order
    id: str
    dialect: str  # `chat`, `responses`, `messages` or `gemini`
    messages: list[Any]  # as the agent sent them
    head: Mapping[str, Any]  # every other key of the request
    streamed: bool = False  # the agent's wish; the answer is given whole in any case

    @property
    def request(self) -> dict[str, Any]:
        """The whole request, in its dialect."""
        whole = dict(self.head)
        if self.messages:
            whole[_MESSAGES.get(self.dialect, "messages")] = list(self.messages)
        return whole

    @property
    def chat(self) -> dict[str, Any]:
        """The request as Chat Completions would have it."""
        if self.dialect == "chat":
            return self.request
        from ..gateway.dialects.asking import as_chat  # here: in most clients it is never needed

        return as_chat(self.dialect, self.request)


class Unknown(Lost):
    """A call goes on with one that is not known here: the server says it whole when it is asked anew."""


class Conversations:
    """What is known of the calls of one order."""

    def __init__(self, order: str) -> None:
        self._order = order
        # By rollout, then by call, the newest last; bound: the order's size, and KEPT_CALLS.
        self._members: dict[int, dict[str, Call]] = {}

    def take(self, event: Called) -> Call:
        """The whole call; raises `Unknown`."""
        calls = self._members.setdefault(event.member, {})
        parent = _parent(calls, event)
        try:
            append = [msgspec.json.decode(message) for message in event.append]
            head = _head(event.head) if event.head is not None or parent is None else parent.head
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Garbled(f"a call cannot be read: {error}") from error
        messages = [*parent.messages[: event.keep], *append] if parent is not None else append
        call = Call(self._order, event.member, event.call, event.dialect, messages, head, event.streamed)
        calls.pop(call.id, None)
        calls[call.id] = call
        if len(calls) > KEPT_CALLS:
            del calls[next(iter(calls))]
        return call

    def forget(self, member: int) -> None:
        """It is over: nothing refers to its calls any more."""
        self._members.pop(member, None)

    def have(self) -> str:
        """The ids of the calls that later ones may go on with, the newest of each rollout first."""
        newest = [list(reversed(calls)) for calls in self._members.values()]
        told: list[str] = []
        room = LONGEST_HAVE
        for call in (ids[depth] for depth in range(KEPT_CALLS) for ids in newest if depth < len(ids)):
            room -= len(call) + 1
            if room < 0:
                break
            told.append(call)
        return ",".join(told)


def _parent(calls: Mapping[str, Call], event: Called) -> Call | None:
    if event.parent is None:
        return None
    known = calls.get(event.parent)
    if known is None or event.keep > len(known.messages):
        raise Unknown(f"a call goes on with one that is not known: `{event.parent}`")
    return known


def _head(text: str | None) -> dict[str, Any]:
    return msgspec.json.decode(text or "null", type=dict[str, Any])
