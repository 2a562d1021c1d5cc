"""Lists the orders of a server for people, and sums up their rewards and latencies, for any number of them.

A page of orders begins below the last one of the page before. `orders.py` writes the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ..core.errors import BadInput
from ..core.serving_protocol import Order
from .listing import LONGEST_PATTERN
from .reader import LedgerReader
from .record_encoding import unpack
from .schema import ANSWER_VERSION

STATES = ("open", "finished", "delivered")
BUCKETS = 120  # points of a chart over time
RECENT = 1000  # rollouts of the percentiles
MOST_VERSIONS = 100
PERCENTILES = (50, 90, 99)


class ListedOrder(NamedTuple):
    """One order of a list."""

    id: int
    key: str
    instance: str
    row: int  # the instance's
    at: float
    delivered: float | None
    rollouts: int
    closed: int
    scored: int
    reward: float | None  # the mean over scored rollouts
    least: float | None
    most: float | None
    last: float | None  # when its last rollout was closed
    versions: str  # of the policy, in no order
    order: Order | None  # None: it cannot be read

    @property
    def state(self) -> str:
        return "open" if self.closed < self.rollouts else "delivered" if self.delivered else "finished"

    @property
    def is_group(self) -> bool:
        return self.order is not None and self.order.group is not None

    @property
    def latency(self) -> float | None:
        """Seconds from the order to its last result."""
        return None if self.last is None or self.state == "open" else max(0.0, self.last - self.at)


class ListedRollout(NamedTuple):
    """One rollout of an order."""

    member: int
    sample: int
    kind: str | None
    reward: float | None
    attempt: int | None
    tries: int
    version: str
    waited: float | None  # seconds from the order to its first attempt
    latency: float | None  # seconds from the order to its outcome


class OrderCounts(NamedTuple):
    """The number of orders."""

    orders: int
    open: int
    delivered: int


def count_orders(reader: LedgerReader) -> OrderCounts:
    query = (
        "SELECT count(*), coalesce(sum(delivered IS NOT NULL), 0), (SELECT count(DISTINCT r.orders)"
        " FROM rollout r WHERE NOT EXISTS (SELECT 1 FROM outcome o WHERE o.instance = r.instance"
        " AND o.sample = r.sample)) FROM orders"
    )
    orders, delivered, open_ = reader.rows(query)[0]
    return OrderCounts(orders, open_, delivered)


def list_orders(
    reader: LedgerReader, size: int, below: int | None = None, *, state: str = "", find: str = ""
) -> list[ListedOrder]:
    """Return the newest orders; `find` is a part of the key or of the instance."""
    if state and state not in STATES:
        raise BadInput(f"unknown state of an order: `{state[:100]}`", f"one of {', '.join(STATES)}")
    conditions = {
        "open": f"EXISTS ({_OPEN})",
        "finished": f"s.delivered IS NULL AND NOT EXISTS ({_OPEN})",
        "delivered": "s.delivered IS NOT NULL",
    }
    query = _ORDERS.format(condition=conditions.get(state, "true"), version=_find_version(reader))
    about = {"below": below if below is not None else 1 << 62, "find": find[:LONGEST_PATTERN], "size": size}
    rows = reader.rows(query, about)
    return [ListedOrder._make((*row[:-2], row[-2] or "", _decode_order(row[-1]))) for row in rows]


def list_rollouts(reader: LedgerReader, order: int) -> list[ListedRollout]:
    query = _ROLLOUTS.format(version=_find_version(reader))
    return [ListedRollout(*row) for row in reader.rows(query, (order,))]


def list_versions(reader: LedgerReader) -> list[tuple[str, int, float, float]]:
    """Return version of the policy, scored rollouts, mean reward, and time of the last, oldest first."""
    if reader.version < ANSWER_VERSION:
        return []
    rows = reader.rows(_VERSIONS, (MOST_VERSIONS,))
    return [(version, count, reward, last) for version, count, reward, last in reversed(rows)]


def sum_over_time(reader: LedgerReader) -> list[tuple[float, int, float | None, float, float | None]]:
    """Return time, rollouts, mean reward, mean latency and mean wait, from the first to the last outcome."""
    rows = reader.rows(_OVER_TIME, {"buckets": BUCKETS})
    return [(at, count, reward, latency, waited) for at, count, reward, latency, waited in rows]


def compute_latencies(reader: LedgerReader) -> dict[str, dict[str, float]]:
    """Return the percentiles of latency and wait, in seconds, over the rollouts of the newest orders."""
    rows = reader.rows(_RECENT, (RECENT,))
    columns = {"latency": [row[0] for row in rows], "wait": [row[1] for row in rows if row[1] is not None]}
    return {name: _rank(sorted(values)) for name, values in columns.items() if values}


def _rank(values: list[float]) -> dict[str, float]:
    return {f"p{p}": values[-(-len(values) * p // 100) - 1] for p in PERCENTILES}


def _decode_order(packed: bytes) -> Order | None:
    try:
        return _orders.decode(unpack(packed))
    except Exception:  # boundary: damaged bytes can make the decoders raise anything  # noqa: BLE001
        return None


def _find_version(reader: LedgerReader) -> str:
    return "coalesce(a.version, '')" if reader.version >= ANSWER_VERSION else "''"


_orders = msgspec.msgpack.Decoder(Order)
_OPEN = """
    SELECT 1 FROM rollout m LEFT JOIN outcome c ON c.instance = m.instance AND c.sample = m.sample
    WHERE m.orders = s.id AND c.sample IS NULL
"""
_BEGUN = """
    (SELECT min(started) FROM attempt WHERE instance = r.instance AND sample = r.sample AND number = 1)
"""
_ORDERS = """
    SELECT s.id, s.key, i.name, i.id, s.at, s.delivered, count(*), count(o.sample), count(o.score),
        avg(o.score), min(o.score), max(o.score), max(o.closed),
        group_concat(DISTINCT nullif({version}, '')), s.asked
    FROM (
        SELECT s.* FROM orders s JOIN instance i ON i.id = s.instance WHERE s.id < :below AND {condition}
            AND (:find = '' OR instr(lower(s.key), lower(:find)) OR instr(lower(i.name), lower(:find)))
        ORDER BY s.id DESC LIMIT :size
    ) s
    JOIN instance i ON i.id = s.instance
    JOIN rollout r ON r.orders = s.id
    LEFT JOIN outcome o ON o.instance = r.instance AND o.sample = r.sample
    LEFT JOIN attempt a ON a.id = o.attempt
    GROUP BY s.id ORDER BY s.id DESC
"""
_ROLLOUTS = f"""
    SELECT r.member, r.sample, o.kind, o.score, coalesce(o.attempt, (SELECT max(id) FROM attempt
        WHERE instance = r.instance AND sample = r.sample)),
        (SELECT count(*) FROM attempt WHERE instance = r.instance AND sample = r.sample),
        {{version}}, {_BEGUN} - s.at, o.closed - s.at
    FROM rollout r JOIN orders s ON s.id = r.orders
    LEFT JOIN outcome o ON o.instance = r.instance AND o.sample = r.sample
    LEFT JOIN attempt a ON a.id = o.attempt
    WHERE r.orders = ? ORDER BY r.member LIMIT 1000
"""
_VERSIONS = """
    SELECT coalesce(a.version, '') AS version, count(*), avg(o.score), max(o.closed)
    FROM outcome o JOIN attempt a ON a.id = o.attempt WHERE o.score IS NOT NULL
    GROUP BY 1 ORDER BY max(o.closed) DESC LIMIT ?
"""
_OVER_TIME = f"""
    WITH span AS (SELECT min(closed) AS first, max(closed) AS last FROM outcome)
    SELECT max(o.closed), count(*), avg(o.score), avg(o.closed - s.at), avg({_BEGUN} - s.at)
    FROM rollout r JOIN orders s ON s.id = r.orders
    JOIN outcome o ON o.instance = r.instance AND o.sample = r.sample, span
    GROUP BY CAST((o.closed - first) * :buckets / max(last - first, 0.001) AS INTEGER) ORDER BY 1
"""
_RECENT = f"""
    SELECT o.closed - s.at, {_BEGUN} - s.at
    FROM rollout r JOIN orders s ON s.id = r.orders
    JOIN outcome o ON o.instance = r.instance AND o.sample = r.sample
    ORDER BY r.orders DESC, r.member DESC LIMIT ?
"""
