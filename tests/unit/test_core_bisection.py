"""The search for the turn at which an attempt was lost: its probes, its end, and the most that it costs."""

from __future__ import annotations

import math

import pytest

from holdwater.core.bisection import (
    SearchResult,
    TurnProbe,
    choose_probe,
    conclude_search,
    list_costliest_search,
)


def search(turns: list[int], last: int) -> dict[int, TurnProbe]:
    """The probes of a search whose branches pass up to the turn `last`."""
    probes: dict[int, TurnProbe] = {}
    while (turn := choose_probe(turns, {turn: probe.passes for turn, probe in probes.items()})) is not None:
        assert turn not in probes
        probes[turn] = TurnProbe(turn=turn, passed=4 if turn <= last else 1, scored=4)
    return probes


@pytest.mark.parametrize("count", [2, 3, 4, 9, 50])
def test_every_planted_turn_is_found_within_the_printed_cost(count: int) -> None:
    turns = [3 * n for n in range(count)]  # side threads take the numbers between them
    calls = [count - place for place in range(count)]
    most = sum(calls[turns.index(turn)] for turn in list_costliest_search(turns, calls))
    for place in range(count - 1):
        probes = search(turns, turns[place])
        result, turn, statement = conclude_search(turns, probes)
        assert (result, turn) == (SearchResult.LOST, turns[place])
        assert f"lost in turn {turns[place + 1]}:" in statement
        assert len(probes) <= 2 + math.ceil(math.log2(count))
        assert sum(calls[turns.index(turn)] for turn in probes) <= most


def test_a_search_ends_at_once_if_the_last_turn_passes() -> None:
    result, turn, statement = conclude_search([0, 1, 2], search([0, 1, 2], 2))

    assert (result, turn) == (SearchResult.NEVER_LOST, 2)
    assert statement == "4 of 4 branches pass even from the last turn, 2"


def test_a_search_ends_if_the_start_fails() -> None:
    probes = search([0, 1, 2], -1)

    assert list(probes) == [2, 0]
    assert conclude_search([0, 1, 2], probes)[:2] == (SearchResult.NEVER_WON, None)


def test_a_search_without_all_its_probes_is_open() -> None:
    assert conclude_search([0, 1], {})[0] is SearchResult.OPEN


def test_half_of_the_branches_is_enough_and_none_is_not() -> None:
    assert TurnProbe(turn=1, passed=2, scored=4).passes
    assert not TurnProbe(turn=1, passed=1, scored=3).passes
    assert not TurnProbe(turn=1, passed=0, scored=0).passes
