"""Calls that the trainer itself answers: each put together from what is new in it and what is known.

It neither reads a stream nor answers: `client.py` and `answering.py` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from ..core.serving import Called
from .patience import Garbled, Lost

TIPS = 32  # conversations of a rollout that are remembered: as many as the gateway's recorder has
CONTINUED = 4  # calls that were gone on with: another one that was under way then may go on with them too
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
        convert = import_module("...gateway.dialects.convert", __name__)
        chat: dict[str, Any] = convert.as_chat(self.dialect, self.request)
        return chat


class Unknown(Lost):
    """A call goes on with one that is not known here: the server says it whole when it is asked anew."""


class Conversations:
    """What is known of the calls of one order."""

    def __init__(self, order: str) -> None:
        self._order = order
        self._members: dict[int, _Member] = {}  # bound: the order's size and what is replaced

    def take(self, event: Called) -> Call:
        """The whole call; raises `Unknown`."""
        member = self._members.setdefault(event.member, _Member())
        try:
            append = [msgspec.json.decode(message) for message in event.append]
            head = _head(event.head)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Garbled(f"a call cannot be read: {error}") from error
        kept: list[Any] = []
        if event.parent is not None:
            known = member.parent(event.parent, event.keep)
            kept = known.messages[: event.keep]
            head = known.head if head is None else head
        if head is None:
            raise Garbled("a call has neither a head nor a parent")
        call = Call(self._order, event.member, event.call, event.dialect, kept + append, head, event.streamed)
        member.keep(call)
        return call

    def forget(self, member: int) -> None:
        """It is over: nothing refers to its calls any more."""
        self._members.pop(member, None)

    def have(self) -> str:
        """The ids of the calls that later ones may go on with, the latest of each rollout first."""
        latest = [member.ids() for member in self._members.values()]
        deepest = max(map(len, latest), default=0)
        told: list[str] = []
        room = LONGEST_HAVE
        for call in (ids[depth] for depth in range(deepest) for ids in latest if depth < len(ids)):
            room -= len(call) + 1
            if room < 0:
                break
            told.append(call)
        return ",".join(told)


class _Member:
    """One rollout's calls, the latest last."""

    def __init__(self) -> None:
        self._tips: dict[str, Call] = {}  # bound: TIPS
        self._continued: dict[str, Call] = {}  # bound: CONTINUED

    def parent(self, call: str, keep: int) -> Call:
        known = self._tips.get(call) or self._continued.get(call)
        if known is None or keep > len(known.messages):
            raise Unknown(f"a call goes on with one that is not known: `{call}`")
        if keep == len(known.messages):
            self._tips.pop(call, None)
            _put(self._continued, known, CONTINUED)
        return known

    def keep(self, call: Call) -> None:
        _put(self._tips, call, TIPS)

    def ids(self) -> list[str]:
        return [*reversed(self._tips), *reversed(self._continued)]


def _head(text: str | None) -> Mapping[str, Any] | None:
    return None if text is None else msgspec.json.decode(text, type=dict[str, Any])


def _put(calls: dict[str, Call], call: Call, most: int) -> None:
    calls.pop(call.id, None)
    calls[call.id] = call
    if len(calls) > most:
        del calls[next(iter(calls))]
