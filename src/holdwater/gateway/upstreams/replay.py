"""Answers from the record: a reply that was paid for is given again, whole or in events, as it is asked for.

`Nothing` is the upstream of a replay, where what is not in the record gets an error. Whose reply answers a
request is decided in `ledger/recording.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from enum import StrEnum

from msgspec import Raw
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import Failure
from ..dialects import Dialect, Place
from ..recorder import UNREADABLE
from . import Answer, Call

UNRECORDED = "unrecorded"  # the kind of the failure
_METHOD = ":streamGenerateContent"


class Manner(StrEnum):
    """How a reply is told."""

    WHOLE = "whole"
    EVENTS = "events"
    ARRAY = "array"  # Google's chunks, without server-sent events


class Replayed:
    """Implements `Answer`."""

    status = 200
    failure: Failure | None = None

    def __init__(self, reply: bytes, dialect: Dialect, manner: Manner) -> None:
        events = manner is Manner.EVENTS
        self.headers = CIMultiDict({"Content-Type": "text/event-stream" if events else "application/json"})
        if manner is Manner.ARRAY:
            reply = b"[" + reply + b"]"
        try:
            self._pieces = dialect.told(reply) if events else [reply]
        except UNREADABLE as error:
            raise ModelFailed(f"the recorded reply cannot be read: {error}", kind="garbage") from None

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


class Nothing:
    """Implements `Upstream`: has no answer of its own to any call."""

    def __init__(self, dialects: frozenset[str]) -> None:
        self.dialects = dialects

    def send(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        raise ModelFailed(
            "the request is not in the record that is replayed",
            "compare the last turn of both runs with `holdwater transcript`",
            kind=UNRECORDED,
            again=False,
        )


def manner(head: Mapping[str, Raw], place: Place) -> Manner:
    """How a request wants its reply."""
    if _METHOD in place.path:
        return Manner.EVENTS if "alt=sse" in place.query.split("&") else Manner.ARRAY
    return Manner.EVENTS if bytes(head.get("stream", b"")) == b"true" else Manner.WHOLE
