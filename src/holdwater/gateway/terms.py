"""What all calls of a worker are subject to: a price, a rate, imposed parameters, a record, shared means."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.prices import Price
from .body import Admission
from .rate import Rate


class Terms(NamedTuple):
    price: Price | None = None  # None: unknown
    rate: Rate | None = None  # None: as fast as the upstream allows
    replays: bool = False  # there is a record and nobody else to ask
    sampling: Mapping[str, Any] = MappingProxyType({})  # imposed on every request
    shared: bool = True  # all have the same upstream: what would ail every attempt ails the run


class SharedMeans(NamedTuple):
    """What all sessions of a gateway use together."""

    executor: Executor
    admission: Admission
