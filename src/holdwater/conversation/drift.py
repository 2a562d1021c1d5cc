"""Finds where a request differs from the recorded request whose reply it received. Pages and events show it.

The gateway decides which requests are compared; the caller defines which parts of a message are volatile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from ..core.exchange import DriftedCall
from ..dialect.message import decode_foreign
from .trajectory import ExchangeTree

MOST_PLACES = 8  # differences described per attempt
EXCERPT_LENGTH = 30  # characters shown from the first difference of two texts

MessageNormalizer = Callable[[str, bytes], bytes]
"""Takes a dialect and a message; returns the message without its volatile parts."""


class RequestDifference(NamedTuple):
    """The first difference of two requests."""

    place: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"{self.place}: recorded `{self.recorded}`, now `{self.now}`"


class RequestComparison:
    """Compares the requests of two attempts, each read from its own exchanges."""

    def __init__(
        self,
        now: ExchangeTree,
        recorded: Callable[[int], ExchangeTree],
        steady: MessageNormalizer,
        passing: Set[str],
    ) -> None:
        self._now = now
        self._recorded = recorded
        self._normalize = steady
        self._ignored_keys = passing  # request fields that do not count

    def describe(self, drifts: Sequence[DriftedCall]) -> str:
        """Describe where requests differ: each place once, with the requests whose first difference it is."""
        numbers = {self._now.exchange(number).identity: number for number in self._now.numbers()}
        places: dict[str, list[int]] = {}  # bound: the drifts that the gateway remembers
        for drift in drifts:
            number = numbers.get(drift.identity)
            if number is not None:
                found = self._compare(number, self._recorded(drift.attempt), drift.number)
                places.setdefault(str(found or "no difference is left in the record"), []).append(number)
        sentences = []
        for place, at in list(places.items())[:MOST_PLACES]:
            sentences.append(f"request{'s' * (len(at) > 1)} {', '.join(map(str, at))} at {place}")
        return "; ".join(sentences)

    def _compare(self, number: int, recorded: ExchangeTree, before: int) -> RequestDifference | None:
        pairs = zip_longest(self._messages(recorded, before), self._messages(self._now, number))
        for place, (then, now) in enumerate(pairs, 1):
            if then != now:
                return next(
                    _find_differences(
                        f"message {place}", decode_foreign(then or b""), decode_foreign(now or b"")
                    ),
                    None,
                )
        return next(_find_differences("", self._head(recorded, before), self._head(self._now, number)), None)

    def _messages(self, tree: ExchangeTree, number: int) -> Iterator[bytes]:
        for dialect, raw in tree.request(number):
            yield self._normalize(dialect, bytes(raw))

    def _head(self, tree: ExchangeTree, number: int) -> dict[str, Any]:
        return {key: value for key, value in tree.head(number).items() if key not in self._ignored_keys}


def _find_differences(place: str, then: Any, now: Any) -> Iterator[RequestDifference]:
    """Yield the places where two values differ, in order."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            yield from _find_differences(f"{place} `{key}`".strip(), then.get(key), now.get(key))
    elif isinstance(then, list) and isinstance(now, list):
        for number, (a, b) in enumerate(zip_longest(then, now), 1):
            yield from _find_differences(f"{place} {number}".strip(), a, b)
    elif isinstance(then, str) and isinstance(now, str):
        if then != now:
            at = next((n for n, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), None)
            at = min(len(then), len(now)) if at is None else at
            yield RequestDifference(
                f"{place} character {at + 1}", then[at : at + EXCERPT_LENGTH], now[at : at + EXCERPT_LENGTH]
            )
    elif then != now:
        yield RequestDifference(place, _render_value(then), _render_value(now))


def _render_value(value: Any) -> str:
    return "nothing" if value in (None, "") else msgspec.json.encode(value).decode()[:EXCERPT_LENGTH]
