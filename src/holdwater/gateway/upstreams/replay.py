"""Answers from the record: a reply that was paid for is given again, whole or in events, as it is asked for.

`Nothing` is the upstream of a replay, where what is not in the record gets an error. Whose reply answers a
request is decided in `ledger/recording.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager

from msgspec import Raw
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import Failure
from ..dialects import Dialect, Place
from . import Answer, Call

UNRECORDED = "unrecorded"  # the kind of the failure
_METHOD = ":streamGenerateContent"


class Replayed:
    """Implements `Answer`."""

    status = 200
    failure: Failure | None = None

    def __init__(self, reply: bytes, dialect: Dialect, streams: bool) -> None:
        self._reply = reply
        self._dialect = dialect
        self._streams = streams
        self.headers = CIMultiDict({"Content-Type": "text/event-stream" if streams else "application/json"})

    async def pieces(self) -> AsyncIterator[bytes]:
        if not self._streams:
            yield self._reply
            return
        for event in self._dialect.told(self._reply):
            yield event


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


def streams(head: Mapping[str, Raw], place: Place) -> bool:
    """Whether a request asks for its reply in events."""
    if _METHOD in place.path:
        return "alt=sse" in place.query.split("&")
    return bytes(head.get("stream", b"")) == b"true"
