"""The upstreams without a model: for a replay, where an unrecorded request fails, and for runs without one.

`conversation/earlier_replies.py` selects the recorded reply to a request, and `complete_reply.py` sends it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from ...core.errors import ModelFailed
from ...dialect import DIALECTS
from . import UpstreamAnswer, UpstreamCall

UNRECORDED = "unrecorded"  # the kind of the failure


class ReplayOnly:
    """Implements `Upstream`: fails every call, because the record does not have its reply."""

    counts = False

    @property
    def dialects(self) -> frozenset[str]:
        return frozenset(DIALECTS)

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        raise ModelFailed(
            "the request is not in the record of the replayed run",
            "compare the last turn of both runs with `holdwater transcript`",
            kind=UNRECORDED,
            again=False,
        )


class NoModel:
    """Implements `Upstream`: fails every call of a session without a route in a run without a model."""

    counts = False

    @property
    def dialects(self) -> frozenset[str]:
        return frozenset(DIALECTS)

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        raise ModelFailed(
            "the server has no model of its own",
            "start it with a model, steer it to one, or use another model source in the order",
            kind="absent",
            again=False,
        )
