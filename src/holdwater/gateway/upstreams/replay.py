"""The upstreams that have no answer: of a replay, where what is not in the record gets an error; of no model.

Whose recorded reply answers a request is decided in `ledger/recording.py`, how it is told in `whole.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from msgspec import Raw

from ...core.errors import ModelFailed
from ..dialects import Manner, Place
from . import Answer, Call
from .http import DIALECTS

UNRECORDED = "unrecorded"  # the kind of the failure
_METHOD = ":streamGenerateContent"


class Nothing:
    """Implements `Upstream`: has no answer of its own to any call."""

    dialects = DIALECTS
    counts = False

    def send(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        raise ModelFailed(
            "the request is not in the record that is replayed",
            "compare the last turn of both runs with `holdwater transcript`",
            kind=UNRECORDED,
            again=False,
        )


class Absent:
    """Implements `Upstream`: a run has no model of its own, and nobody else is behind a session."""

    dialects = DIALECTS
    counts = False

    def send(self, call: Call) -> AbstractAsyncContextManager[Answer]:
        raise ModelFailed(
            "the server has no model of its own",
            "start it with one, steer it to one, or order with another source",
            kind="absent",
            again=False,
        )


def manner(head: Mapping[str, Raw], place: Place) -> Manner:
    """How a request wants its reply."""
    if _METHOD in place.path:
        return Manner.EVENTS if "alt=sse" in place.query.split("&") else Manner.ARRAY
    return Manner.EVENTS if bytes(head.get("stream", b"")) == b"true" else Manner.WHOLE
