"""Builds the result of an order from the ledger: its rollouts with grades and trajectories.

It reads a few rows per rollout, and its segment if nodes are requested. It blocks: call it in a thread.
`run/orders/order_service.py` delivers the result.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..core.exchange import SCORING_BORROWERS
from ..core.policy import grade_counts
from ..core.records import FailureOrigin, Verdict
from ..core.serving_protocol import (
    MessageNode,
    Order,
    OrderResult,
    Rollout,
    TrajectoryForm,
    TrajectoryReference,
)
from ..core.token_sequences import PackedSequence, SequencePacking
from ..dialect.message import decode_foreign
from ..ledger.attempt_files import read_answer_json
from ..ledger.directory import RunDirectory
from ..ledger.orders import OrderRow
from ..ledger.reader import LedgerReader
from ..ledger.rollouts import find_rollout
from .nodes import build_nodes
from .trajectory import ExchangeTree

LARGEST_TRAJECTORY = 8 << 20  # bytes of encoded nodes of one rollout ...
LARGEST_RESULT = 32 << 20  # ... and of a whole result; a larger trajectory becomes a reference


def build_result(reader: LedgerReader, order: OrderRow, how: TrajectoryForm) -> OrderResult:
    """Return the result of an order. All its rollouts must be finished."""
    rollouts: list[Rollout] = []
    together: list[bool] = []  # for each rollout with a valid grade
    room = LARGEST_RESULT
    for member, sample in enumerate(order.samples):
        rollout, verdict, taken = _read_with_verdict(
            reader, (order.instance, sample, member), how, min(room, LARGEST_TRAJECTORY)
        )
        rollouts.append(rollout)
        if grade_counts(verdict.failure, verdict.grade):
            together.append(verdict.group_scored)
        room -= taken
    replaced = _find_replaced(reader, order, rollouts)
    return OrderResult(
        key=order.key,
        order=order.id,
        rollouts=tuple(rollout for rollout in rollouts if rollout.member not in replaced),
        together=bool(together) and all(together),
        new=not order.delivered,
        replaced=tuple(replaced.values()),
    )


def _find_replaced(reader: LedgerReader, order: OrderRow, rollouts: list[Rollout]) -> dict[int, Rollout]:
    """Return the replaced rollouts by member number: the rollouts that failed first."""
    count = len(rollouts) - _orders.decode(order.asked).size
    if count <= 0:
        return {}
    query = "SELECT sample, closed FROM rollout JOIN outcome USING (instance, sample) WHERE orders = ?"
    closed = dict(reader.rows(query, (order.id,)))
    kept = ("passed", "failed", str(FailureOrigin.CANCELLED))
    failed = [rollout for rollout in rollouts if rollout.outcome not in kept]
    failed.sort(key=lambda rollout: closed[rollout.sample])
    return {rollout.member: rollout for rollout in failed[:count]}


def read_rollout(
    reader: LedgerReader, instance: int, sample: int, member: int, how: TrajectoryForm
) -> Rollout:
    """Return the rollout of one sample."""
    return _read_with_verdict(reader, (instance, sample, member), how, LARGEST_TRAJECTORY)[0]


def _read_with_verdict(
    reader: LedgerReader, which: tuple[int, int, int], how: TrajectoryForm, room: int
) -> tuple[Rollout, Verdict, int]:
    """Return a rollout, its verdict, and the encoded bytes of its nodes."""
    instance, sample, member = which
    row = find_rollout(reader, instance, sample)
    verdict = reader.whole_verdict(row.attempt)
    carried = _read_trajectory(reader, row.attempt, how, room)
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
        answer=read_answer(reader.directory, verdict),
        usage=verdict.usage,
        saved=verdict.replayed_usage,
        times=verdict.times,
        exchanges=verdict.exchanges,
        children=verdict.children,
        trajectory=carried.nodes,
        reference=carried.reference,
        tokens=carried.tokens,
        unknown_replies=carried.unknown,
    )
    return rollout, verdict, carried.size


def read_answer(directory: RunDirectory, verdict: Verdict) -> object:
    """Return the decoded answer of the agent; None if there is none."""
    text = read_answer_json(directory, verdict)
    return None if text is None else decode_foreign(text.encode())


class _CarriedTrajectory(NamedTuple):
    """The conversation of a rollout in the form that its result carries, and its encoded bytes."""

    nodes: tuple[MessageNode, ...] | None = None
    tokens: tuple[PackedSequence, ...] | None = None
    reference: TrajectoryReference | None = None
    unknown: int = 0  # replies that are in no token sequence
    size: int = 0


def _read_trajectory(
    reader: LedgerReader, attempt: int, how: TrajectoryForm, room: int
) -> _CarriedTrajectory:
    """Return a reference in place of what does not fit; nothing if the attempt is not kept or never began."""
    if how is TrajectoryForm.NONE or not attempt:
        return _CarriedTrajectory()
    spoke = reader.acting_attempt(attempt)
    found: _CarriedTrajectory | None = None
    try:
        if how is TrajectoryForm.NODES:
            found = _collect_nodes(ExchangeTree(reader.directory, spoke), room)
        elif how is TrajectoryForm.TOKENS:
            found = _pack_tokens(ExchangeTree(reader.directory, spoke), room)
    except FileNotFoundError:  # dropped during the read
        pass
    if reader.find_unrecorded_policy((spoke,)) is not None:
        return _CarriedTrajectory()
    if found is None:
        where = reader.directory.path.absolute()
        return _CarriedTrajectory(reference=TrajectoryReference(directory=str(where), attempt=attempt))
    return found


def _collect_nodes(tree: ExchangeTree, room: int) -> _CarriedTrajectory | None:
    """Return the nodes; None if they exceed `room`."""
    kept: list[MessageNode] = []  # bound: `room`
    taken = 0
    for node in build_nodes(tree):
        taken += len(_encode(node))
        if taken > room:
            return None
        kept.append(node)
    return _CarriedTrajectory(nodes=tuple(kept), unknown=sum(map(_lacks_ids, kept)), size=taken)


def _pack_tokens(tree: ExchangeTree, room: int) -> _CarriedTrajectory | None:
    """Return the token sequences; None if they exceed `room`."""
    packing, unknown = SequencePacking(), 0
    for node in build_nodes(tree):
        packing.add(node)
        unknown += _lacks_ids(node)
    packed = packing.build()
    size = len(_encode(packed))
    return _CarriedTrajectory(tokens=packed, unknown=unknown, size=size) if size <= room else None


def _lacks_ids(node: MessageNode) -> bool:
    return node.sampled and node.prompt_delta is None and node.by not in SCORING_BORROWERS


_encode = msgspec.msgpack.Encoder().encode
_orders = msgspec.msgpack.Decoder(Order)
