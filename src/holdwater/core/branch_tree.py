"""The branches of a forked attempt as a tree: they share turns, and part where one differs.

Pure: a branch comes as one key for each of its turns. `conversation/branches.py` reads the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .fork_origin import ForkOrigin
from .record import Record
from .summary import WILSON, wilson_interval


class BranchEnd(Record, frozen=True):
    """One attempt of the tree."""

    directory: str  # of its run
    attempt: int  # its id
    sample: int
    kind: str  # its outcome; empty: it has none yet
    turns: int  # on its main thread
    recorded: bool = False  # it is the forked attempt itself


class BranchNode(Record, frozen=True):
    """Turns that some branches have in common, and the ways in which these go on."""

    first: int  # turn, counted on the main thread from 1
    last: int
    text: str  # the beginning of the first of these replies
    passed: int  # of the branches below, without the forked attempt
    scored: int
    ends: tuple[BranchEnd, ...] = ()  # branches that end with the last of these turns
    ways: tuple[BranchNode, ...] = ()


class BranchTree(Record, frozen=True):
    """All branches of one attempt, and the share that passes."""

    origin: ForkOrigin
    root: BranchNode
    passed: int
    scored: int
    branches: int  # without the forked attempt
    interval: tuple[float, float] | None = None  # of the share of passed branches; None: none is scored
    method: str = WILSON


class BranchPath(NamedTuple):
    """A branch, with a key and a text for each turn."""

    end: BranchEnd
    keys: Sequence[bytes]
    texts: Sequence[str]


def grow_tree(origin: ForkOrigin, branches: Sequence[BranchPath]) -> BranchTree:
    """Return the tree of the branches; one of them may be the forked attempt."""
    root = _grow_node(branches, 0)
    count = sum(not branch.end.recorded for branch in branches)
    interval = wilson_interval(root.passed / root.scored, root.scored) if root.scored else None
    return BranchTree(
        origin=origin,
        root=root,
        passed=root.passed,
        scored=root.scored,
        branches=count,
        interval=interval,
    )


def _grow_node(branches: Sequence[BranchPath], begin: int) -> BranchNode:
    """Return the node of branches that are equal before the turn at place `begin`."""
    end = begin
    shortest = min(len(branch.keys) for branch in branches)
    while end < shortest and len({branch.keys[end] for branch in branches}) == 1:
        end += 1
    ways: dict[bytes, list[BranchPath]] = {}
    for branch in branches:
        if len(branch.keys) > end:
            ways.setdefault(branch.keys[end], []).append(branch)
    kinds = [branch.end.kind for branch in branches if not branch.end.recorded]
    texts = branches[0].texts
    return BranchNode(
        first=begin + 1,
        last=end,
        text=texts[begin] if begin < len(texts) else "",
        passed=kinds.count("passed"),
        scored=kinds.count("passed") + kinds.count("failed"),
        ends=tuple(branch.end for branch in branches if len(branch.keys) == end),
        ways=tuple(_grow_node(way, end) for way in ways.values()),
    )
