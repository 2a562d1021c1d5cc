"""Validates requests at the edge: refuses impossible values, and values that only the server may set.

An instance that a client sends gets no access to the server's machine. `wire_format.py` checks the shape of
an order when it decodes it; `run/orders/order_admission.py` decides whether there is capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ..core.errors import RequestRefused
from ..core.groups import GroupTerms
from ..core.input_checks import find_bad_paths, find_url_problem
from ..core.records import Instance, LimitOverrides, Network, SandboxSpec
from ..core.serving_protocol import Order, SteerRequest

KEY_HINT = "the key of an endpoint is sent in the header `X-Holdwater-Model-Key`"


def check_order(order: Order) -> None:
    """Raise `RequestRefused` (`invalid`), which names the field, for the first invalid field of an order."""
    for field, problem in _find_problems(order):
        raise RequestRefused("invalid", f"`{field}` {problem}", KEY_HINT if field == "model.url" else "")


def check_steer(to: SteerRequest) -> None:
    """Raise `RequestRefused` (`invalid`) for an invalid URL."""
    if problem := find_url_problem(to.url):
        raise RequestRefused("invalid", f"`url` {problem}", KEY_HINT)


def _find_problems(order: Order) -> Iterator[tuple[str, str]]:
    yield from _check_limits(order.limits, "limits")
    if order.group is not None:
        yield from _check_group(order.group)
    if order.model.url is not None and (problem := find_url_problem(order.model.url)):
        yield "model.url", problem
    try:
        msgspec.json.encode(order.sampling)
    except (TypeError, ValueError) as error:
        yield "sampling", f"cannot be encoded as JSON: {error}"
    if isinstance(order.instance, Instance):
        yield from _check_instance(order.instance)


def _check_limits(ask: LimitOverrides, place: str) -> Iterator[tuple[str, str]]:
    for name in ask.__struct_fields__:
        value = getattr(ask, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{place}.{name}", f"must be more than 0: {value:g}"


def _check_group(terms: GroupTerms) -> Iterator[tuple[str, str]]:
    for name, lowest in {"replace": 0, "least": 0, "quorum": 1, "patience": 0}.items():
        value = getattr(terms, name)
        if value is not None and not (value >= lowest and math.isfinite(value)):
            yield f"group.{name}", f"must be at least {lowest}: {value:g}"


def _check_instance(instance: Instance) -> Iterator[tuple[str, str]]:
    yield from _check_limits(instance.limits, "instance.limits")
    if instance.directory is not None:
        yield "instance.directory", "is a path on the server: send `files`"
    for place, start in (("start", instance.start), ("grader", instance.grader)):
        if start is not None:
            yield from _check_start(start, f"instance.{place}")


def _check_start(start: SandboxSpec, place: str) -> Iterator[tuple[str, str]]:
    for field, problem in find_bad_paths(start):
        yield f"{place}.{field}", problem
    if start.build is not None:
        yield f"{place}.build", "is a directory on the server: name an `image`"
    if start.network is Network.OPEN:
        yield f"{place}.network", "can be opened only by the server: `--network open`"
    if any("${" in value for value in start.env.values()):
        yield f"{place}.env", "must not refer to variables of the server"
