"""What clients of a server ordered, as rows: an order, and the samples that are its rollouts.

In the writer's thread and its transaction, as `book.py`. The same key is the same row for ever. Who takes
orders is `run/desk.py`.
"""

from __future__ import annotations

import sqlite3

from ..core.errors import HoldwaterError
from ..core.records import Record
from .compression import pack, unpack
from .standing import Standing, standing

PAGE = 64  # orders in memory at a time
_COLUMNS = "id, key, asked, at, instance, delivered, owner"


class KeyTaken(HoldwaterError):
    """The key belongs to an order that asked for something else."""


class OrderRow(Record, frozen=True):
    """An order as it was written."""

    id: int
    key: str
    asked: bytes  # the `Order`, as msgpack
    at: float
    instance: int
    samples: tuple[int, ...]  # of its members, in their order; replacements come last
    delivered: bool = False
    known: bool = False  # it was there before
    owner: str = ""  # stands for the key of the client that placed it; empty: all clients are one


class Closed(Record, frozen=True):
    """A rollout that is over."""

    sample: int
    kind: str
    score: float | None


def place(connection: sqlite3.Connection, row: OrderRow, size: int) -> OrderRow:
    """Write an order and its rollouts, or find the one that has its key."""
    found = find(connection, row.key)
    if found is not None:
        if (found.asked, found.owner) != (row.asked, row.owner):
            raise KeyTaken(f"the key belongs to an order that asks for something else: `{row.key}`")
        return found
    order = connection.execute(
        "INSERT INTO orders (key, asked, at, instance, owner) VALUES (?, ?, ?, ?, ?)",
        (row.key, pack(row.asked), row.at, row.instance, row.owner),
    ).lastrowid
    assert order is not None
    samples = tuple(add_member(connection, order, row.instance, member) for member in range(size))
    return OrderRow(order, row.key, row.asked, row.at, row.instance, samples, owner=row.owner)


def add_member(connection: sqlite3.Connection, order: int, instance: int, member: int) -> int:
    """One more rollout; its sample."""
    sample: int = connection.execute(
        "SELECT coalesce(max(sample) + 1, 0) FROM rollout WHERE instance = ?", (instance,)
    ).fetchone()[0]
    connection.execute(
        "INSERT INTO rollout (instance, sample, orders, member) VALUES (?, ?, ?, ?)",
        (instance, sample, order, member),
    )
    return sample


def find(connection: sqlite3.Connection, key: str) -> OrderRow | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM orders WHERE key = ?", (key,)).fetchone()
    return None if row is None else _row(connection, row)


def open_orders(connection: sqlite3.Connection, after: int) -> list[OrderRow]:
    """The next orders behind `after` of which a rollout has no outcome."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM orders o WHERE id > ? AND EXISTS"
        " (SELECT 1 FROM rollout r LEFT JOIN outcome c ON c.instance = r.instance AND c.sample = r.sample"
        "  WHERE r.orders = o.id AND c.sample IS NULL) ORDER BY id LIMIT ?",
        (after, PAGE),
    ).fetchall()
    return [_row(connection, row) for row in rows]


def closed(connection: sqlite3.Connection, order: int) -> list[Closed]:
    """Those of its rollouts that are over."""
    rows = connection.execute(
        "SELECT r.sample, c.kind, c.score FROM rollout r"
        " JOIN outcome c ON c.instance = r.instance AND c.sample = r.sample WHERE r.orders = ?",
        (order,),
    )
    return [Closed(*row) for row in rows]


def standings(connection: sqlite3.Connection, row: OrderRow) -> list[Standing]:
    """Those of its rollouts that are not over, and what each has used up."""
    over = {one.sample for one in closed(connection, row.id)}
    return [standing(connection, row.instance, sample) for sample in row.samples if sample not in over]


def outcomes(connection: sqlite3.Connection, order: int) -> list[tuple[int, int, str]]:
    """Instance, sample and kind of those that are over."""
    return connection.execute(
        "SELECT instance, sample, kind FROM rollout JOIN outcome USING (instance, sample) WHERE orders = ?",
        (order,),
    ).fetchall()


def deliver(connection: sqlite3.Connection, order: int, at: float) -> None:
    connection.execute("UPDATE orders SET delivered = coalesce(delivered, ?) WHERE id = ?", (at, order))


def withdraw_delivery(connection: sqlite3.Connection, order: int) -> None:
    """A result that a client had is void: another one follows."""
    connection.execute("UPDATE orders SET delivered = NULL WHERE id = ?", (order,))


def _row(
    connection: sqlite3.Connection, row: tuple[int, str, bytes, float, int, float | None, str]
) -> OrderRow:
    order, key, asked, at, instance, delivered, owner = row
    members = connection.execute("SELECT sample FROM rollout WHERE orders = ? ORDER BY member", (order,))
    samples = tuple(sample for (sample,) in members)
    return OrderRow(order, key, unpack(asked), at, instance, samples, delivered is not None, True, owner)
