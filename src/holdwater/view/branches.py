"""Renders the branches of a forked attempt as a tree, with the share of branches that pass."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from ..conversation.branches import read_branch_tree
from ..core.branch_tree import BranchEnd, BranchNode, BranchTree
from ..core.errors import HoldwaterError
from ..ledger.reader import LedgerReader
from .formatting import line, outcome_name, style_of

MOST_WAYS = 40  # of one node


def render_fork(reader: LedgerReader) -> RenderableType:
    """Return the tree of a fork and its origin, or the reason why there is none."""
    try:
        return render_branches(read_branch_tree([reader]))
    except HoldwaterError as error:
        return Text(f"the branches cannot be shown: {line(error.message)}", "dim")


def render_branches(tree: BranchTree) -> RenderableType:
    title = Text(f"{line(tree.origin.instance)}: {tree.passed} of {tree.scored} branches pass", "bold")
    if tree.interval is not None:
        low, high = tree.interval
        title.append(f", 95 % interval {low:.3f} to {high:.3f} ({tree.method})", "not bold")
    root = Tree(describe_node(tree.root))
    add_ways(root, tree.root)
    return Group(title, root)


def add_ways(place: Tree, node: BranchNode) -> None:
    for end in node.ends:
        place.add(describe_end(end))
    for way in node.ways[:MOST_WAYS]:
        branch = place.add(describe_node(way))
        add_ways(branch, way)
    if len(node.ways) > MOST_WAYS:
        place.add(Text(f"... and {len(node.ways) - MOST_WAYS} more", "dim"))


def describe_node(node: BranchNode) -> Text:
    if node.last < node.first:
        return Text("start")
    turns = f"turn {node.first}" if node.first == node.last else f"turns {node.first} to {node.last}"
    text = Text(turns)
    if node.scored > 1:
        text.append(f"  {node.passed} of {node.scored} pass", "dim")
    return text.append(f"  {line(node.text)}", "dim") if node.text else text


def describe_end(end: BranchEnd) -> Text:
    kind = Text(outcome_name(end.kind) if end.kind else "running", style_of(end.kind))
    name = "the recorded attempt" if end.recorded else f"sample {end.sample}"
    return kind.append(f"  {name} of {line(end.directory, 60)}, attempt {end.attempt}", "default")
