"""The search for the turn at which an attempt was lost: which turn to probe next, and what the probes say.

A probe is a fork from one turn with several branches. The search assumes that a turn which fails is followed
by turns that fail. `api/bisection.py` makes the forks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from .fork_origin import ForkOrigin
from .record import Record
from .records import NO_USAGE, ModelUsage


class TurnProbe(Record, frozen=True):
    """The branches from one turn."""

    turn: int
    passed: int
    scored: int
    unscored: int = 0  # branches that ended without a score: they do not count
    usage: ModelUsage = NO_USAGE
    directory: str = ""

    @property
    def passes(self) -> bool:
        """Whether at least half of the branches pass."""
        return 2 * self.passed >= self.scored and self.passed > 0


class SearchResult(StrEnum):
    """The end of a search."""

    LOST = "lost"  # there is a last turn from which at least half of the branches pass
    NEVER_LOST = "never-lost"  # they pass even from the last turn
    NEVER_WON = "never-won"  # they fail even from the start
    OPEN = "open"  # probes are missing


class SearchCost(Record, frozen=True):
    """The most that a search may need, by the usage of the recorded attempt."""

    probes: int
    usage: ModelUsage = NO_USAGE
    cost: float | None = None  # US dollars; None: unknown


class BisectReport(Record, frozen=True):
    """The output of `fork --bisect --json`."""

    directory: str
    origin: ForkOrigin  # its `turn` is the last one
    samples: int
    result: SearchResult
    turn: int | None  # the last turn from which at least half of the branches pass
    lost: int | None  # the turn after it
    statement: str
    probes: tuple[TurnProbe, ...] = ()  # in the order of their turns
    most: SearchCost = SearchCost(probes=0)
    usage: ModelUsage = NO_USAGE
    cost: float | None = None


def choose_probe(turns: Sequence[int], passes: Mapping[int, bool]) -> int | None:
    """Return the next of `turns`, which begin with 0, to probe; None: the search is over.

    The last turn comes first: it needs hardly a call, and nothing else matters if its branches pass.
    """
    if turns[-1] not in passes:
        return turns[-1]
    if passes[turns[-1]] or not passes.get(turns[0], True):
        return None
    if turns[0] not in passes:
        return turns[0]
    low, high = 0, len(turns) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if turns[middle] not in passes:
            return turns[middle]
        low, high = (middle, high) if passes[turns[middle]] else (low, middle)
    return None


def list_costliest_search(turns: Sequence[int], calls: Sequence[int]) -> list[int]:
    """Return the turns of the search that makes the most calls; `calls` has those of a probe of each turn."""

    def descend(low: int, high: int) -> tuple[int, list[int]]:
        if high - low <= 1:
            return 0, []
        middle = (low + high) // 2
        total, places = max(descend(low, middle), descend(middle, high))
        return calls[middle] + total, [middle, *places]

    _, places = descend(0, len(turns) - 1)
    return [turns[place] for place in (len(turns) - 1, 0, *places)]


def conclude_search(
    turns: Sequence[int], probes: Mapping[int, TurnProbe]
) -> tuple[SearchResult, int | None, str]:
    """Return the result of the probes, the last turn that passes, and a sentence about it."""
    passes = {turn: probe.passes for turn, probe in probes.items()}
    if choose_probe(turns, passes) is not None:
        return SearchResult.OPEN, None, "the search is not finished"
    first, last = turns[0], turns[-1]
    if passes[last]:
        counts = count_branches(probes[last])
        return SearchResult.NEVER_LOST, last, f"{counts} pass even from the last turn, {last}"
    if not passes[first]:
        counts = count_branches(probes[first])
        return SearchResult.NEVER_WON, None, f"{counts} pass even from the start: no turn lost the attempt"
    turn = max(turn for turn, passed in passes.items() if passed)
    lost = turns[turns.index(turn) + 1]
    statement = (
        f"the attempt was lost in turn {lost}: {count_branches(probes[turn])} pass from turn {turn},"
        f" {count_branches(probes[lost])} from turn {lost}"
    )
    return SearchResult.LOST, turn, statement


def count_branches(probe: TurnProbe) -> str:
    return f"{probe.passed} of {probe.scored} branches"
