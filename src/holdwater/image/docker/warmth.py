"""Which idle bases stay on the daemon for the layers that others share with them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from hashlib import sha256

from ...core.records import Record


class Holding(Record, frozen=True):
    """A base on the daemon that is ours."""

    reference: str  # `repository@sha256:...`
    chain: tuple[str, ...] = ()  # a short name for each layer together with all below it
    size: int = 0  # bytes, unpacked
    used: float = 0.0  # when last, in seconds since the epoch
    warm: bool = False  # an earlier run kept it


def chain_of(diff_ids: Iterable[str]) -> tuple[str, ...]:
    """Names of what a layer is together with all below it."""
    found: list[str] = []
    for diff_id in diff_ids:
        below = found[-1] if found else ""
        found.append(sha256(f"{below} {diff_id}".encode()).hexdigest()[:16])
    return tuple(found)


def holders(idle: Collection[Holding], busy: Iterable[Holding], planned: Counter[str], cap: int) -> set[str]:
    """The idle bases to keep: one for each chain that more than one image is planned on, within the cap.

    A busy base holds its chain already. Of two that hold the same the smaller stays. What an earlier run kept
    stays as far as there is room.
    """
    held = {link for base in busy for link in base.chain}
    kept: set[str] = set()
    worth = [(base, shared) for base in idle if (shared := _shared(base, planned))]
    for base, shared in sorted(worth, key=lambda one: (-len(one[1]), one[0].size, one[0].reference)):
        if shared[-1] not in held and base.size <= cap:
            kept.add(base.reference)
            held.update(base.chain)
            cap -= base.size
    for base in sorted(idle, key=lambda one: -one.used):
        if base.warm and base.reference not in kept and base.size <= cap:
            kept.add(base.reference)
            cap -= base.size
    return kept


def _shared(base: Holding, planned: Counter[str]) -> tuple[str, ...]:
    return tuple(link for link in base.chain if planned[link] > 1)
