"""What became of an order, read from the ledger: its rollouts with their grades and what was said.

A few rows for each rollout, and its segment where its nodes are asked for. Blocks: for threads. Who delivers
it is `run/desk.py`.
"""

from __future__ import annotations

import msgspec

from ..core.policy import stands
from ..core.records import Verdict, Where
from ..core.serving import Node, Order, Reference, Result, Rollout, Trajectories
from .directory import RunDirectory
from .files import answer_json
from .message import decoded
from .nodes import nodes_of
from .orders import OrderRow
from .reader import Reader
from .rollouts import find_rollout
from .trajectory import Tree

LARGEST_TRAJECTORY = 8 << 20  # bytes of encoded nodes of one rollout ...
LARGEST_RESULT = 32 << 20  # ... and of a whole result; beyond, a reference stands in their place


def result_of(reader: Reader, order: OrderRow, how: Trajectories) -> Result:
    """What became of an order whose rollouts are all over."""
    rollouts: list[Rollout] = []
    together: list[bool] = []  # of those that could be scored
    room = LARGEST_RESULT
    for member, sample in enumerate(order.samples):
        rollout, verdict, taken = _read(
            reader, (order.instance, sample, member), how, min(room, LARGEST_TRAJECTORY)
        )
        rollouts.append(rollout)
        if stands(verdict.failure, verdict.grade):
            together.append(verdict.together)
        room -= taken
    replaced = _replaced(reader, order, rollouts)
    return Result(
        key=order.key,
        order=order.id,
        rollouts=tuple(rollout for rollout in rollouts if rollout.member not in replaced),
        together=bool(together) and all(together),
        new=not order.delivered,
        replaced=tuple(replaced.values()),
    )


def _replaced(reader: Reader, order: OrderRow, rollouts: list[Rollout]) -> dict[int, Rollout]:
    """The members whose places others took, by their numbers: those that failed for good first."""
    count = len(rollouts) - _orders.decode(order.asked).size
    if count <= 0:
        return {}
    query = "SELECT sample, closed FROM rollout JOIN outcome USING (instance, sample) WHERE orders = ?"
    closed = dict(reader.rows(query, (order.id,)))
    kept = ("passed", "failed", str(Where.CANCELLED))
    failed = [rollout for rollout in rollouts if rollout.outcome not in kept]
    failed.sort(key=lambda rollout: closed[rollout.sample])
    return {rollout.member: rollout for rollout in failed[:count]}


def rollout_of(reader: Reader, instance: int, sample: int, member: int, how: Trajectories) -> Rollout:
    """What became of one sample."""
    return _read(reader, (instance, sample, member), how, LARGEST_TRAJECTORY)[0]


def _read(
    reader: Reader, which: tuple[int, int, int], how: Trajectories, room: int
) -> tuple[Rollout, Verdict, int]:
    """A rollout, the verdict behind it, and the bytes that its nodes take up."""
    instance, sample, member = which
    row = find_rollout(reader, instance, sample)
    verdict = reader.whole_verdict(row.attempt)
    trajectory, reference, taken = _conversation(reader, row.attempt, how, room)
    rollout = Rollout(
        instance=row.instance,
        sample=sample,
        member=member,
        outcome=row.kind,
        attempt=row.attempt,
        reward=row.score,
        failure=verdict.failure,
        metrics=verdict.grade.metrics if verdict.grade else {},
        detail=verdict.grade.detail if verdict.grade else "",
        answer=answer_of(reader.directory, verdict),
        usage=verdict.usage,
        saved=verdict.saved,
        times=verdict.times,
        exchanges=verdict.exchanges,
        children=verdict.children,
        trajectory=trajectory,
        reference=reference,
    )
    return rollout, verdict, taken


def answer_of(directory: RunDirectory, verdict: Verdict) -> object:
    """What the agent returned."""
    text = answer_json(directory, verdict)
    return None if text is None else decoded(text.encode())


def _conversation(
    reader: Reader, attempt: int, how: Trajectories, room: int
) -> tuple[tuple[Node, ...] | None, Reference | None, int]:
    """Its nodes if they fit, else where they are; neither where it is not kept, or was not begun."""
    if how is Trajectories.NONE or not attempt:
        return None, None, 0
    spoke = reader.acting_attempt(attempt)
    found: tuple[list[Node], int] | None = None
    try:
        if how is Trajectories.NODES:
            found = _fitting(Tree(reader.directory, spoke), room)
    except FileNotFoundError:  # dropped while it was read
        pass
    if reader.unrecorded((spoke,)) is not None:
        return None, None, 0
    if found is None:
        where = reader.directory.path.absolute()
        return None, Reference(directory=str(where), attempt=attempt), 0
    return tuple(found[0]), None, found[1]


def _fitting(tree: Tree, room: int) -> tuple[list[Node], int] | None:
    """The nodes and their bytes; None as soon as they are too many."""
    kept: list[Node] = []  # bound: `room`
    taken = 0
    for node in nodes_of(tree):
        taken += len(_encode(node))
        if taken > room:
            return None
        kept.append(node)
    return kept, taken


_encode = msgspec.msgpack.Encoder().encode
_orders = msgspec.msgpack.Decoder(Order)
