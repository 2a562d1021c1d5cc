"""The tree of branches: common turns, the turns at which branches part, and the share that passes."""

from __future__ import annotations

from holdwater.core.branch_tree import BranchEnd, BranchPath, grow_tree
from holdwater.core.fork_origin import ForkOrigin

ORIGIN = ForkOrigin(directory="/a", run="r", instance="i", sample=0, number=1, attempt=1, turn=1)


def branch(keys: str, kind: str, *, recorded: bool = False) -> BranchPath:
    end = BranchEnd(directory="d", attempt=1, sample=0, kind=kind, turns=len(keys), recorded=recorded)
    return BranchPath(end, [key.encode() for key in keys], list(keys))


def test_branches_part_where_a_turn_differs() -> None:
    tree = grow_tree(
        ORIGIN,
        [
            branch("abcd", "failed", recorded=True),
            branch("abx", "passed"),
            branch("abxy", "failed"),
            branch("abcd", "model"),
        ],
    )

    assert (tree.root.first, tree.root.last, tree.root.text) == (1, 2, "a")
    same, other = tree.root.ways
    assert (same.first, same.last, len(same.ends), same.scored) == (3, 4, 2, 0)
    assert (other.first, other.last, other.passed, other.scored) == (3, 3, 1, 2)
    assert [end.kind for end in other.ends] == ["passed"]
    assert [(way.first, way.last, way.text) for way in other.ways] == [(4, 4, "y")]
    assert (tree.passed, tree.scored, tree.branches) == (1, 2, 3)
    assert tree.interval is not None and tree.interval[0] < 0.5 < tree.interval[1]


def test_branches_without_a_score_have_no_interval() -> None:
    tree = grow_tree(ORIGIN, [branch("a", ""), branch("b", "model")])

    assert tree.interval is None and (tree.root.first, tree.root.last) == (1, 0)
    assert len(tree.root.ways) == 2
