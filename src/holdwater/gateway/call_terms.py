"""The terms of a session's calls: upstream, model, sampling, price, the run's own rate limit.

Each call resolves its route anew, so that a run can change its model while sessions continue. The upstream's
own rate limits are handled in `upstreams/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, asynccontextmanager
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.judge import JudgeModel
from ..core.prices import ModelPrice
from .body import ByteAdmission
from .recorder import RequestDelta
from .upstreams import Upstream

BURST = 2.0  # seconds' worth of the rate that may be used at once
LEARNING = 0.2  # the weight of the latest call in the expected tokens of a call
SIDE_NAME = "small"  # the name for which agents' side calls look in `ModelRoute.names`
NO_SAMPLING: Mapping[str, Any] = MappingProxyType({})
NO_NAMES: Mapping[str, str] = MappingProxyType({})
NO_PRICES: Mapping[str, ModelPrice | None] = MappingProxyType({})


class RateBucket:
    """A token bucket that fills at a rate up to its burst size; use beyond that is paid back first."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60.0
        self._most = max(1.0, self._rate * BURST)
        self._level = self._most
        self._at = now

    def delay(self, need: float, now: float) -> float:
        """Return the seconds until `need` is available; more than the burst size counts as a full bucket."""
        self._fill(now)
        return max(0.0, (min(need, self._most) - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def give(self, amount: float) -> None:
        """Return an amount that was taken and not used."""
        self._level += amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now


class RateLimiter:
    """Paces calls; create it in a running loop. None: no such limit."""

    def __init__(self, rpm: float | None, tpm: float | None, share: float = 1.0) -> None:
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._requests = RateBucket(rpm * share, now) if rpm is not None else None
        self._tokens = RateBucket(tpm * share, now) if tpm is not None else None
        self._expected = 1.0  # tokens of a call: the actual number is known only after it
        self._line = asyncio.Lock()  # first come, first served

    @asynccontextmanager
    async def turn(self, waiting: Callable[[], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """Run a call when the rate allows it; `waiting` is entered while the call waits."""
        if self._line.locked() or self._delay() > 0.0:
            with waiting():
                async with self._line:
                    await self._pause()
                    held = self._take()
        else:
            held = self._take()
        try:
            yield
        finally:
            if self._tokens is not None:
                self._tokens.give(held)

    def spend(self, tokens: int) -> None:
        """Count the tokens that a call used."""
        self._expected += (tokens - self._expected) * LEARNING
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    async def _pause(self) -> None:
        """Wait until the rate allows the first call in line; only that call gets here."""
        seconds = self._delay()
        while seconds > 0.0:
            await asyncio.sleep(seconds)
            seconds = self._delay()

    def _delay(self) -> float:
        now = self._clock()
        requests = self._requests.delay(1.0, now) if self._requests is not None else 0.0
        tokens = self._tokens.delay(self._expected, now) if self._tokens is not None else 0.0
        return max(requests, tokens)

    def _take(self) -> float:
        now, held = self._clock(), self._expected
        if self._requests is not None:
            self._requests.take(1.0, now)
        if self._tokens is not None:
            self._tokens.take(held, now)
        return held


class ModelRoute(NamedTuple):
    """Where a session's calls go. Fields that are not set come from the gateway's default route."""

    upstream: Upstream | None = None
    model: str | None = None  # imposed on every request; None: the agent's choice
    sampling: Mapping[str, Any] = NO_SAMPLING  # imposed in addition to the gateway's
    version: str = ""  # of the policy, if its answers do not name it
    on_written: Callable[[RequestDelta, int], None] | None = (
        None  # receives the number of each recorded exchange
    )
    sampled: bool = True  # the gateway's sampling parameters are imposed
    names: Mapping[str, str] = NO_NAMES  # patterns of requested names -> models that are imposed instead

    def choose_model(self, requested: str) -> str | None:
        """Return the model of a request that names `requested`; None: the agent's choice."""
        if requested == self.model or requested in self.names.values():
            return requested
        exact = self.names.get(requested)
        matching = (model for pattern, model in self.names.items() if fnmatchcase(requested, pattern))
        return exact or next(matching, self.model)

    def with_defaults(self, own: ModelRoute) -> ModelRoute:
        """Return this route, with the gateway's `own` values for fields that are not set."""
        sampling = {**own.sampling, **self.sampling} if self.sampled else self.sampling
        if self.upstream is not None:
            return self._replace(sampling=sampling)
        own = own if self.model is None else own._replace(model=self.model, names=NO_NAMES)
        version = own.version or self.version
        return self._replace(
            upstream=own.upstream, model=own.model, names=own.names, sampling=sampling, version=version
        )


class CallTerms(NamedTuple):
    price: ModelPrice | None = None  # None: unknown
    mapped_prices: Mapping[str, ModelPrice | None] = NO_PRICES  # of the models of `ModelRoute.names`
    rate: RateLimiter | None = None  # None: as fast as the upstream allows
    replays: bool = False  # the run only replays a record, without an upstream
    sampling: Mapping[str, Any] = MappingProxyType({})  # imposed on every request
    names: Mapping[str, str] = NO_NAMES  # of the route
    shared: bool = True  # all attempts share the upstream: a failure common to all of them fails the run


class JudgeRoute(NamedTuple):
    """Where the calls of judges go, if that is not where the calls of the scored attempt go."""

    upstream: Upstream | None  # None: the attempt's
    model: JudgeModel

    def derive_route(self, attempt: ModelRoute | None) -> ModelRoute:
        """Return the route for judges of an attempt. Sampling parameters are for the agent alone."""
        route = (attempt or ModelRoute())._replace(sampling=NO_SAMPLING, sampled=False, version="")
        if self.upstream is not None:  # a judge without an imposed model names its own
            route = route._replace(upstream=self.upstream, model=None, on_written=None)
        return route if self.model.name is None else route._replace(model=self.model.name)

    def derive_terms(self, attempt: CallTerms) -> CallTerms:
        """Return the terms for judges of an attempt: the rate is that of the run's server."""
        rate = attempt.rate if self.upstream is None else None
        return attempt._replace(price=self.model.price, mapped_prices=NO_PRICES, rate=rate)


class SharedResources(NamedTuple):
    """The resources that all sessions of a gateway share."""

    executor: Executor
    admission: ByteAdmission
