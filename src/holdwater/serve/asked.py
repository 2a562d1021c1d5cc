"""What clients may ask for, checked at the edge: what can never be, and what is none of a client's business.

Whoever brings an instance of his own gets nothing of the server's machine with it. The shape of an order is
checked when it is decoded; what there is room for is decided by the desk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ..core.endpoint import find_url_problem
from ..core.errors import Refused
from ..core.groups import GroupTerms
from ..core.records import Ask, Instance, Network, Start
from ..core.serving import Order, Steer
from ..core.start_paths import find_bad_paths

KEY_HINT = "the key of an endpoint is sent in the header `X-Holdwater-Model-Key`"


def check(order: Order) -> None:
    """Refused (`invalid`) names the field."""
    for field, problem in _problems(order):
        raise Refused("invalid", f"`{field}` {problem}", KEY_HINT if field == "model.url" else "")


def check_steer(to: Steer) -> None:
    """Refused (`invalid`) names the field."""
    if problem := find_url_problem(to.url):
        raise Refused("invalid", f"`url` {problem}", KEY_HINT)


def _problems(order: Order) -> Iterator[tuple[str, str]]:
    yield from _of_limits(order.limits, "limits")
    if order.group is not None:
        yield from _of_group(order.group)
    if order.model.url is not None and (problem := find_url_problem(order.model.url)):
        yield "model.url", problem
    try:
        msgspec.json.encode(order.sampling)
    except (TypeError, ValueError) as error:
        yield "sampling", f"cannot stand in a request: {error}"
    if isinstance(order.instance, Instance):
        yield from _of_instance(order.instance)


def _of_limits(ask: Ask, place: str) -> Iterator[tuple[str, str]]:
    for name in ask.__struct_fields__:
        value = getattr(ask, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{place}.{name}", f"must be more than 0: {value:g}"


def _of_group(terms: GroupTerms) -> Iterator[tuple[str, str]]:
    for name, lowest in {"replace": 0, "least": 0, "quorum": 1, "patience": 0}.items():
        value = getattr(terms, name)
        if value is not None and not (value >= lowest and math.isfinite(value)):
            yield f"group.{name}", f"must be at least {lowest}: {value:g}"


def _of_instance(instance: Instance) -> Iterator[tuple[str, str]]:
    yield from _of_limits(instance.limits, "instance.limits")
    if instance.directory is not None:
        yield "instance.directory", "is the server's: send `files`"
    for place, start in (("start", instance.start), ("grader", instance.grader)):
        if start is not None:
            yield from _of_start(start, f"instance.{place}")


def _of_start(start: Start, place: str) -> Iterator[tuple[str, str]]:
    for field, problem in find_bad_paths(start):
        yield f"{place}.{field}", problem
    if start.build is not None:
        yield f"{place}.build", "is a directory of the server: name an `image`"
    if start.network is Network.OPEN:
        yield f"{place}.network", "can be opened by the server alone: `--network open`"
    if any("${" in value for value in start.env.values()):
        yield f"{place}.env", "must not refer to variables of the server"
