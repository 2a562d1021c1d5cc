"""Finds where a request of a replay differs from the recorded request whose reply it received.

The gateway decides which requests are compared. Parts that do not count for a request's identity do not count
here either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec

from ..core.errors import HoldwaterError
from ..core.exchange import DriftedCall
from ..dialect import find_dialect
from ..dialect.interface import VOLATILE_KEYS
from ..dialect.message import decode_foreign
from ..ledger.directory import RunDirectory
from .trajectory import ExchangeTree

MOST_PLACES = 8  # differences described per attempt
EXCERPT_LENGTH = 30  # characters shown from the first difference of two texts


def describe_drift(
    directory: RunDirectory, recorded: RunDirectory, attempt: int, drifts: Sequence[DriftedCall]
) -> str:
    """Describe how an attempt's requests differ from those of the run that it replays. Reads both runs."""
    try:
        reader = RequestComparison(
            ExchangeTree(directory, attempt), lambda before: ExchangeTree(recorded, before)
        )
        return reader.describe(drifts)
    except HoldwaterError as error:
        return f"the requests cannot be compared: {error.message}"


class RequestDifference(NamedTuple):
    """The first difference of two requests."""

    place: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"{self.place}: recorded `{self.recorded}`, now `{self.now}`"


class RequestComparison:
    """Compares the requests of two attempts, each read from its own exchanges."""

    def __init__(self, now: ExchangeTree, recorded: Callable[[int], ExchangeTree]) -> None:
        self._now = now
        self._recorded = recorded

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
            found = find_dialect(dialect)
            yield found.strip_generated(found.strip_transient(bytes(raw)))

    def _head(self, tree: ExchangeTree, number: int) -> dict[str, Any]:
        return {key: value for key, value in tree.head(number).items() if key not in VOLATILE_KEYS}


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
