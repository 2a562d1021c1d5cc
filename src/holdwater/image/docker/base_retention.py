"""Choose the idle bases that stay on the daemon because other images share their layers. Pure.

The janitor (`janitor.py`) removes the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from hashlib import sha256

from ...core.records import Record


class OwnedBase(Record, frozen=True):
    """A base image on the daemon that a run of holdwater pulled."""

    reference: str  # `repository@sha256:...`
    chain: tuple[str, ...] = ()  # a short hash for each layer together with all layers below it
    size: int = 0  # bytes, unpacked
    used: float = 0.0  # time of the last use, in seconds since the epoch
    warm: bool = False  # an earlier run retained it


def chain_of(diff_ids: Iterable[str]) -> tuple[str, ...]:
    """Return one hash per layer, each of the layer together with all layers below it."""
    found: list[str] = []
    for diff_id in diff_ids:
        below = found[-1] if found else ""
        found.append(sha256(f"{below} {diff_id}".encode()).hexdigest()[:16])
    return tuple(found)


def choose_kept_bases(
    idle: Collection[OwnedBase], busy: Iterable[OwnedBase], planned: Counter[str], cap: int
) -> set[str]:
    """Return the idle bases to keep: one for each chain that several planned images share, within the cap.

    A busy base holds its chain already. Of two bases that hold the same chain, the smaller one stays. Bases
    that an earlier run retained stay as far as the cap allows.
    """
    held = {link for base in busy for link in base.chain}
    kept: set[str] = set()
    worth = [(base, shared) for base in idle if (shared := _shared_links(base, planned))]
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


def _shared_links(base: OwnedBase, planned: Counter[str]) -> tuple[str, ...]:
    return tuple(link for link in base.chain if planned[link] > 1)
