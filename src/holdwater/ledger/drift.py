"""Where a request differs from the recorded one whose reply it was given. Pages and events show it.

The gateway decides which request is compared with which, the caller what of a message comes and goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import DriftedCall
from .message import decoded
from .trajectory import Tree

MOST_PLACES = 8  # that are told of an attempt
AROUND = 30  # characters that are shown from where two texts differ

Steady = Callable[[str, bytes], bytes]
"""Takes a dialect and a message; the message without what comes and goes in it."""


class Difference(NamedTuple):
    """The first place where two requests differ."""

    place: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"{self.place}: recorded `{self.recorded}`, now `{self.now}`"


class RequestReader:
    """Reads the requests of two attempts, each out of its own record."""

    def __init__(self, now: Tree, recorded: Callable[[int], Tree], steady: Steady, passing: Set[str]) -> None:
        self._now = now
        self._recorded = recorded
        self._steady = steady
        self._passing = passing  # keys beside the messages that do not count

    def describe(self, drifts: Sequence[DriftedCall]) -> str:
        """Where requests differ, each place once with the requests that differ there first."""
        numbers = {self._now.exchange(number).identity: number for number in self._now.numbers()}
        places: dict[str, list[int]] = {}  # bound: the drifts that the gateway remembers
        for drift in drifts:
            number = numbers.get(drift.identity)
            if number is not None:
                found = self._compare(number, self._recorded(drift.attempt), drift.number)
                places.setdefault(str(found or "no difference is left in the record"), []).append(number)
        told = [f"{_requests(found)} at {place}" for place, found in list(places.items())[:MOST_PLACES]]
        return "; ".join(told)

    def _compare(self, number: int, recorded: Tree, before: int) -> Difference | None:
        pairs = zip_longest(self._messages(recorded, before), self._messages(self._now, number))
        for place, (then, now) in enumerate(pairs, 1):
            if then != now:
                return next(_differences(f"message {place}", decoded(then or b""), decoded(now or b"")), None)
        return next(_differences("", self._head(recorded, before), self._head(self._now, number)), None)

    def _messages(self, tree: Tree, number: int) -> Iterator[bytes]:
        for dialect, raw in tree.request(number):
            yield self._steady(dialect, bytes(raw))

    def _head(self, tree: Tree, number: int) -> dict[str, Any]:
        return {key: value for key, value in tree.head(number).items() if key not in self._passing}


def _requests(numbers: list[int]) -> str:
    return f"request{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _differences(place: str, then: Any, now: Any) -> Iterator[Difference]:
    """The places where two values differ, the first one first."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            yield from _differences(f"{place} `{key}`".strip(), then.get(key), now.get(key))
    elif isinstance(then, list) and isinstance(now, list):
        for number, (a, b) in enumerate(zip_longest(then, now), 1):
            yield from _differences(f"{place} {number}".strip(), a, b)
    elif isinstance(then, str) and isinstance(now, str):
        if then != now:
            at = next((n for n, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), None)
            at = min(len(then), len(now)) if at is None else at
            yield Difference(f"{place} character {at + 1}", then[at : at + AROUND], now[at : at + AROUND])
    elif then != now:
        yield Difference(place, _shown(then), _shown(now))


def _shown(value: Any) -> str:
    return "nothing" if value in (None, "") else msgspec.json.encode(value).decode()[:AROUND]
