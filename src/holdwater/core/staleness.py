"""The staleness of a rollout: by how many versions its oldest reply is behind the newest policy.

Versions are ordered by the number at their end; without one a version has no staleness.
`run/orders/token_statistics.py` knows the newest version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from .exchange import SCORING_BORROWERS
from .serving_protocol import Order, Rollout, StaleAction

_NUMBER = re.compile(r"[0-9]{1,18}$")


def parse_version(version: str) -> int | None:
    """Return the number at the end of a version, by which versions are ordered; None: it has none."""
    match = _NUMBER.search(version)
    return int(match[0]) if match else None


def list_versions(rollout: Rollout) -> Iterator[int]:
    """Yield the versions of the policy that sampled the replies of a rollout."""
    names = {span.version for packed in rollout.tokens or () for span in packed.spans if span.sampled}
    for node in rollout.trajectory or ():
        if node.sampled and node.by not in SCORING_BORROWERS:
            names.add(node.version)
    yield from (number for number in map(parse_version, names) if number is not None)


def rate_rollout(rollout: Rollout, order: Order, newest: int | None) -> Rollout:
    """Return the rollout with its staleness, and without its reward and tokens if the order drops it."""
    oldest = min(list_versions(rollout), default=None)
    if oldest is None or newest is None:
        return rollout
    staleness = max(0, newest - oldest)
    stale = order.max_staleness is not None and staleness > order.max_staleness
    rated = replace(rollout, staleness=staleness, stale=stale)
    if stale and order.when_stale is StaleAction.DROP:
        return replace(rated, reward=None, trajectory=None, tokens=None)
    return rated
