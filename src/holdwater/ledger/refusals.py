"""Requests that a gateway refused and that belong to no attempt: those of an attempt are its own events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.summary import RefusedRequests

if TYPE_CHECKING:
    from .reader import Reader

KIND = "gateway.refused"
LAST = 3  # that are told in words


def unowned_refusals(reader: Reader) -> RefusedRequests | None:
    """How many there were, and the last ones; None: none."""
    of = "FROM event WHERE attempt IS NULL AND kind = ?"
    [(count,)] = reader.rows(f"SELECT COUNT(*) {of}", (KIND,))
    if not count:
        return None
    rows = reader.rows(f"SELECT message {of} ORDER BY id DESC LIMIT ?", (KIND, LAST))
    return RefusedRequests(events=count, last=tuple(message for (message,) in reversed(rows)))
