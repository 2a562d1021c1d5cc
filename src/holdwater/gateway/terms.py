"""The terms that apply to all calls of a worker: price, rate, sampling, replay, and shared resources."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.prices import ModelPrice
from .body import ByteAdmission
from .rate import RateLimiter


class CallTerms(NamedTuple):
    price: ModelPrice | None = None  # None: unknown
    rate: RateLimiter | None = None  # None: as fast as the upstream allows
    replays: bool = False  # the run only replays a record, without an upstream
    sampling: Mapping[str, Any] = MappingProxyType({})  # imposed on every request
    shared: bool = True  # all attempts share the upstream: a failure common to all of them fails the run


class SharedResources(NamedTuple):
    """The resources that all sessions of a gateway share."""

    executor: Executor
    admission: ByteAdmission
