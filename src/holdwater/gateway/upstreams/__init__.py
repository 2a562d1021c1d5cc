"""The interface between the gateway and the model behind it, and the upstreams without a model.

Start at `http.py`, the main upstream.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import NamedTuple, Protocol

from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.failures import UNRECORDED
from ...core.records import AttemptFailure
from ...dialect import DIALECTS
from ...dialect.interface import ReplyFormat
from ..body import RequestBody
from ..recorder import RequestDelta


class UpstreamCall(NamedTuple):
    """One request on its way upstream."""

    path: str  # below the dialect's base URL, for example `chat/completions`; with the query
    headers: Mapping[str, str]  # the client's, without its key and without connection headers
    body: RequestBody
    waiting: Callable[[], AbstractContextManager[None]]  # entered while waiting for the upstream's rate limit
    dialect: str = "chat"
    attempt: int = 0
    reply_format: ReplyFormat = ReplyFormat.WHOLE
    delta: RequestDelta | None = None  # the new part of the request; None: not a turn
    model: str | None = None  # the requested model, as it goes upstream
    conversation: object | None = None  # the same for all calls that continue each other
    trial: bool = False  # the server may not have the path, which is no failure of the server


class UpstreamAnswer(Protocol):
    """The answer of an upstream, available from its first byte on."""

    status: int
    headers: CIMultiDict[str]  # headers to forward to the client
    failure: (
        AttemptFailure | None
    )  # the failure of the attempt that the status means; later, that of the content
    version: str | None  # of the policy, if the answer names it; known once the body is
    waits: bool  # the body may start late: send keep-alive events to a streaming client
    original: bytes | None  # the reply as the upstream sent it, if it was translated; known once the body is

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; raise `ModelFailed` if it breaks off."""


class Upstream(Protocol):
    """Answers calls."""

    @property
    def dialects(self) -> frozenset[str]:
        """The names of the supported dialects."""

    @property
    def counting(self) -> frozenset[str]:
        """The names of the dialects in which it may count the tokens of a request."""

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """Send `call`; raise `ModelFailed` if there is no answer. Leaving the context cancels the call."""


class AbsentModel:
    """Implements `Upstream` without a model: fails every call."""

    message: str
    hint: str
    kind: str
    counting: frozenset[str] = frozenset()

    @property
    def dialects(self) -> frozenset[str]:
        return frozenset(DIALECTS)

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        raise ModelFailed(self.message, self.hint, kind=self.kind, again=False)


class ReplayOnly(AbsentModel):
    """For a replay, whose record does not have the reply."""

    message = "the request is not in the record of the replayed run"
    hint = "compare the last turn of both runs with `holdwater transcript`"
    kind = UNRECORDED


class NoModel(AbsentModel):
    """For a session without a route in a run without a model."""

    message = "the server has no model of its own"
    hint = "start it with a model, steer it to one, or use another model source in the order"
    kind = "absent"
