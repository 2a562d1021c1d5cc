"""Chooses the endpoint of each call: that with the fewest outstanding requests by weight.

A conversation stays where it is, because the prefix cache of its server has it. It leaves an endpoint that is
down, that is full, or that failed its last call, and stays where it went. `http.py` sends the calls.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ...core.endpoints import EndpointState, EndpointUse
from ...core.errors import ModelFailed
from . import UpstreamCall
from .http_endpoint import HttpEndpoint

NoteChange = Callable[[str, str], None]
"""Receives the kind and the message of an event."""

FAILED, RETURNED = "endpoint.failed", "endpoint.returned"


class CallTry(NamedTuple):
    """The tries of one call at one endpoint."""

    number: int
    again_at: float  # when it may be tried again; infinity: not for this call
    limited: bool = False  # the endpoint asked for the delay: it is no working time


def ignore_change(kind: str, message: str) -> None:
    """Ignore an event: the default."""


class EndpointChoice:
    """The endpoints of one upstream, and the endpoint of each open conversation."""

    def __init__(self, endpoints: Sequence[HttpEndpoint], note: NoteChange) -> None:
        self._endpoints = endpoints
        self._note = note
        # Bound: the conversations of open attempts, each of which keeps its threads.
        self._homes: WeakKeyDictionary[object, HttpEndpoint] = WeakKeyDictionary()

    def list_serving(self, call: UpstreamCall) -> Sequence[HttpEndpoint]:
        """Return the endpoints for a call's model; those that name the model come before all others."""
        if len(self._endpoints) == 1 and not self._endpoints[0].terms.models:
            return self._endpoints
        named = [one for one in self._endpoints if any(_matches(call, name) for name in one.terms.models)]
        serving = named or [one for one in self._endpoints if not one.terms.models]
        if not serving:
            message = f"no server of `--base-url` serves the model: `{(call.model or '')[:200]}`"
            raise ModelFailed(message, "add it to the `models` of one", kind="model", again=False)
        return serving

    def choose(
        self,
        call: UpstreamCall,
        serving: Sequence[HttpEndpoint],
        tries: dict[HttpEndpoint, CallTry],
        now: float,
    ) -> HttpEndpoint:
        """Return the endpoint of the next try."""
        if len(serving) == 1:
            return serving[0]
        home = self._homes.get(call.conversation) if call.conversation is not None else None
        if fresh := [one for one in serving if one not in tries]:
            chosen = min(fresh, key=lambda one: _rank(one, home, now))
        else:
            chosen = min(serving, key=lambda one: tries[one].again_at)
        if chosen is not home:
            chosen.health.placed += 1
            if call.conversation is not None:
                self._homes[call.conversation] = chosen
        return chosen

    def record_success(self, endpoint: HttpEndpoint) -> None:
        if endpoint.health.record_success():
            self._on_change(RETURNED, f"`{endpoint.url}` answers again")

    def record_failure(
        self, call: UpstreamCall, endpoint: HttpEndpoint, error: str, entered: float, *, certain: bool = False
    ) -> None:
        """Record that the call failed here, where its conversation does not stay; see `EndpointHealth`."""
        now = asyncio.get_running_loop().time()
        if call.conversation is not None and self._homes.get(call.conversation) is endpoint:
            del self._homes[call.conversation]
        was_ok = endpoint.health.state is EndpointState.OK
        endpoint.health.record_failure(call.attempt, error, entered, now, certain=certain)
        if was_ok:
            self._on_change(FAILED, f"`{endpoint.url}`: {error}")

    def _on_change(self, kind: str, message: str) -> None:
        for endpoint in self._endpoints:
            endpoint.health.forget_placed()  # or one that returns would get every conversation for a while
        if len(self._endpoints) > 1:
            self._note(kind, message)

    def report_uses(self) -> tuple[EndpointUse, ...]:
        """Return the calls of each endpoint since the last report; nothing for a single endpoint."""
        several = len(self._endpoints) > 1
        return tuple(one.health.report_use(one.url) for one in self._endpoints) if several else ()


def has_other(serving: Sequence[HttpEndpoint], tries: dict[HttpEndpoint, CallTry], but: HttpEndpoint) -> bool:
    """Whether another endpoint may still be tried."""
    return any(one is not but and (one not in tries or tries[one].again_at < math.inf) for one in serving)


def _rank(
    endpoint: HttpEndpoint, home: HttpEndpoint | None, now: float
) -> tuple[bool, bool, bool, float, float]:
    """Return the order of preference, the best first."""
    health, weight = endpoint.health, endpoint.terms.weight
    fit = health.keeps_old(now) if endpoint is home else health.takes_new(now)
    return (
        not fit,
        endpoint.gate.is_full,
        endpoint is not home,
        (endpoint.gate.outstanding + 1) / weight,
        health.placed / weight,
    )


def _matches(call: UpstreamCall, pattern: str) -> bool:
    return call.model is not None and fnmatchcase(call.model, pattern)
