"""The rows of orders from clients of a server: an order, and the samples that are its rollouts.

The functions run in the writer's thread and transaction, like `statements.py`. A key identifies one row
forever. `run/orders/order_service.py` accepts the orders.
"""

from __future__ import annotations

import sqlite3

from ..core.errors import HoldwaterError
from ..core.records import Record
from .record_encoding import pack, unpack
from .resume_state import OpenSample, read_open_sample

PAGE = 64  # orders in memory at a time
_COLUMNS = "id, key, asked, at, instance, delivered, owner"


class KeyTaken(HoldwaterError):
    """The order key is already used by a different request."""


class OrderRow(Record, frozen=True):
    """A stored order."""

    id: int
    key: str
    asked: bytes  # the `Order`, as msgpack
    at: float
    instance: int
    samples: tuple[int, ...]  # of its members, in order; replacements come last
    delivered: bool = False
    known: bool = False  # it existed before
    owner: str = ""  # identifies the API key of the client; empty: clients are not distinguished


class ClosedRollout(Record, frozen=True):
    """A finished rollout."""

    sample: int
    kind: str
    score: float | None


def place_order(connection: sqlite3.Connection, row: OrderRow, size: int) -> OrderRow:
    """Write an order and its rollouts, or return the order that has its key."""
    found = find_order(connection, row.key)
    if found is not None:
        if (found.asked, found.owner) != (row.asked, row.owner):
            raise KeyTaken(f"order key `{row.key}` is already used by a different request")
        return found
    order = connection.execute(
        "INSERT INTO orders (key, asked, at, instance, owner) VALUES (?, ?, ?, ?, ?)",
        (row.key, pack(row.asked), row.at, row.instance, row.owner),
    ).lastrowid
    assert order is not None
    samples = tuple(add_member(connection, order, row.instance, member) for member in range(size))
    return OrderRow(order, row.key, row.asked, row.at, row.instance, samples, owner=row.owner)


def add_member(connection: sqlite3.Connection, order: int, instance: int, member: int) -> int:
    """Add a rollout to an order; return its sample."""
    sample: int = connection.execute(
        "SELECT coalesce(max(sample) + 1, 0) FROM rollout WHERE instance = ?", (instance,)
    ).fetchone()[0]
    connection.execute(
        "INSERT INTO rollout (instance, sample, orders, member) VALUES (?, ?, ?, ?)",
        (instance, sample, order, member),
    )
    return sample


def find_order(connection: sqlite3.Connection, key: str) -> OrderRow | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM orders WHERE key = ?", (key,)).fetchone()
    return None if row is None else _make_row(connection, row)


def open_orders(connection: sqlite3.Connection, after: int) -> list[OrderRow]:
    """Return the next orders after `after` that have a rollout without an outcome."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM orders o WHERE id > ? AND EXISTS"
        " (SELECT 1 FROM rollout r LEFT JOIN outcome c ON c.instance = r.instance AND c.sample = r.sample"
        "  WHERE r.orders = o.id AND c.sample IS NULL) ORDER BY id LIMIT ?",
        (after, PAGE),
    ).fetchall()
    return [_make_row(connection, row) for row in rows]


def list_closed(connection: sqlite3.Connection, order: int) -> list[ClosedRollout]:
    """Return the finished rollouts of an order."""
    rows = connection.execute(
        "SELECT r.sample, c.kind, c.score FROM rollout r"
        " JOIN outcome c ON c.instance = r.instance AND c.sample = r.sample WHERE r.orders = ?",
        (order,),
    )
    return [ClosedRollout(*row) for row in rows]


def list_open(connection: sqlite3.Connection, row: OrderRow) -> list[OpenSample]:
    """Return the unfinished rollouts of an order, each with its attempts and retries so far."""
    over = {one.sample for one in list_closed(connection, row.id)}
    return [
        read_open_sample(connection, row.instance, sample) for sample in row.samples if sample not in over
    ]


def list_outcomes(connection: sqlite3.Connection, order: int) -> list[tuple[int, int, str]]:
    """Return instance, sample and outcome kind of the finished rollouts."""
    return connection.execute(
        "SELECT instance, sample, kind FROM rollout JOIN outcome USING (instance, sample) WHERE orders = ?",
        (order,),
    ).fetchall()


def mark_delivered(connection: sqlite3.Connection, order: int, at: float) -> None:
    connection.execute("UPDATE orders SET delivered = coalesce(delivered, ?) WHERE id = ?", (at, order))


def withdraw_delivery(connection: sqlite3.Connection, order: int) -> None:
    """Mark an order as not delivered: the result that a client has received is void, and another follows."""
    connection.execute("UPDATE orders SET delivered = NULL WHERE id = ?", (order,))


def _make_row(
    connection: sqlite3.Connection, row: tuple[int, str, bytes, float, int, float | None, str]
) -> OrderRow:
    order, key, asked, at, instance, delivered, owner = row
    members = connection.execute("SELECT sample FROM rollout WHERE orders = ? ORDER BY member", (order,))
    samples = tuple(sample for (sample,) in members)
    return OrderRow(order, key, unpack(asked), at, instance, samples, delivered is not None, True, owner)
