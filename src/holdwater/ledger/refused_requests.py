"""Summarizes requests that a gateway refused and that belong to no attempt.

Refused requests of an attempt are events of that attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.summary import RefusedRequests

if TYPE_CHECKING:
    from .reader import LedgerReader

REFUSAL_KIND = "gateway.refused"
MOST_SHOWN = 3  # refusals whose messages are shown


def summarize_refusals(reader: LedgerReader) -> RefusedRequests | None:
    """Return the number of refused requests and the last messages; None if there are none."""
    of = "FROM event WHERE attempt IS NULL AND kind = ?"
    [(count,)] = reader.rows(f"SELECT COUNT(*) {of}", (REFUSAL_KIND,))
    if not count:
        return None
    rows = reader.rows(f"SELECT message {of} ORDER BY id DESC LIMIT ?", (REFUSAL_KIND, MOST_SHOWN))
    return RefusedRequests(events=count, last=tuple(message for (message,) in reversed(rows)))
