"""Counts the tokens of delivered rollouts and their breaks, and measures how stale rollouts are.

It reads results as they are delivered and keeps counts alone. `core/staleness.py` defines staleness,
`core/token_sequences.py` the reasons for which sequences begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from ...core.exchange import SCORING_BORROWERS
from ...core.serving_protocol import Order, OrderResult, Rollout, TokenFigures
from ...core.staleness import list_versions, parse_version, rate_rollout
from ...core.token_sequences import SequenceStart
from .stats import RecentValues

_OPENINGS = (SequenceStart.FIRST, SequenceStart.CHILD)  # they could not continue a sequence


class TokenStatistics:
    """The tokens and versions of one server's rollouts."""

    def __init__(self) -> None:
        self._newest: int | None = None
        self._starts: Counter[SequenceStart] = Counter()  # bound: the reasons
        self._replies = self._unknown = self._sampled = self._stale = 0
        self._staleness = RecentValues()

    def note_version(self, version: str) -> None:
        """Record the version of a policy that answers from now on."""
        number = parse_version(version)
        if number is not None:
            self._newest = max(number, self._newest or 0)

    def rate_result(self, order: Order, result: OrderResult, *, first: bool) -> OrderResult:
        """Return the result with the staleness of its rollouts; count it when it is read the `first` time."""
        for rollout in (*result.rollouts, *result.replaced):
            for number in list_versions(rollout):
                self._newest = max(number, self._newest or 0)
        rollouts = tuple(rate_rollout(rollout, order, self._newest) for rollout in result.rollouts)
        replaced = tuple(rate_rollout(rollout, order, self._newest) for rollout in result.replaced)
        if first:
            for before, after in zip(
                (*result.rollouts, *result.replaced), (*rollouts, *replaced), strict=True
            ):
                self._count(before, after)
        return msgspec.structs.replace(result, rollouts=rollouts, replaced=replaced)

    def _count(self, before: Rollout, rated: Rollout) -> None:
        """Count a rollout; `before` has the tokens of one that is dropped."""
        self._unknown += before.unknown_replies
        for start, tokens in _list_replies(before):
            self._replies += 1
            self._sampled += tokens
            if start is not None:
                self._starts[start] += 1
        if rated.staleness is not None:
            self._staleness.add(rated.staleness)
            self._stale += rated.stale

    def snapshot(self) -> TokenFigures:
        could = self._replies - sum(self._starts[start] for start in _OPENINGS)
        breaks = sum(count for start, count in self._starts.items() if start.is_break)
        return TokenFigures(
            replies=self._replies,
            unknown=self._unknown,
            sampled=self._sampled,
            starts={str(start): count for start, count in self._starts.items()},
            breaks=breaks / could if could else 0.0,
            version=self._newest,
            staleness=self._staleness.percentiles(),
            stale=self._stale,
        )


def _list_replies(rollout: Rollout) -> Iterator[tuple[SequenceStart | None, int]]:
    """Yield each reply with ids: the reason for which a sequence begins with it, and its tokens."""
    for packed in rollout.tokens or ():
        start: SequenceStart | None = packed.reason
        for span in packed.spans:
            if span.sampled:
                yield start, span.stop - span.start
                start = None
    for node in rollout.trajectory or ():
        if node.prompt_delta is not None and node.by not in SCORING_BORROWERS:
            yield node.sequence_start, len(node.tokens or ())
