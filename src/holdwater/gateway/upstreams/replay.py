"""The upstreams without a model: for a replay, where an unrecorded request fails, and for runs without one.

`conversation/earlier_replies.py` selects the recorded reply to a request, and `complete_reply.py` sends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

from msgspec import Raw

from ...core.errors import ModelFailed
from ..dialects import ReplyFormat, RequestTarget
from . import UpstreamAnswer, UpstreamCall
from .http import HTTP_DIALECTS

UNRECORDED = "unrecorded"  # the kind of the failure
_STREAM_METHOD = ":streamGenerateContent"


class ReplayOnly:
    """Implements `Upstream`: fails every call, because the record does not have its reply."""

    dialects = HTTP_DIALECTS
    counts = False

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        raise ModelFailed(
            "the request is not in the record of the replayed run",
            "compare the last turn of both runs with `holdwater transcript`",
            kind=UNRECORDED,
            again=False,
        )


class NoModel:
    """Implements `Upstream`: fails every call of a session without a route in a run without a model."""

    dialects = HTTP_DIALECTS
    counts = False

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        raise ModelFailed(
            "the server has no model of its own",
            "start it with a model, steer it to one, or use another model source in the order",
            kind="absent",
            again=False,
        )


def read_format(head: Mapping[str, Raw], place: RequestTarget) -> ReplyFormat:
    """Return the reply format that a request asks for."""
    if _STREAM_METHOD in place.path:
        return ReplyFormat.EVENTS if "alt=sse" in place.query.split("&") else ReplyFormat.ARRAY
    return ReplyFormat.EVENTS if bytes(head.get("stream", b"")) == b"true" else ReplyFormat.WHOLE
