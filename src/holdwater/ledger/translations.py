"""Reads which calls of a run are translated for its server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..core.summary import LEFT_OUT, TRANSLATED

if TYPE_CHECKING:
    from .reader import LedgerReader

MOST_TRANSLATIONS = 8  # sentences that are shown


def list_translations(reader: LedgerReader, counted: Iterable[str]) -> tuple[str, ...]:
    """Return the sentences, each once: every worker finds out by itself. `counted` has the run's events."""
    if not {TRANSLATED, LEFT_OUT} & set(counted):
        return ()
    query = "SELECT message FROM event WHERE kind IN (?, ?) GROUP BY message ORDER BY min(id) LIMIT ?"
    rows = reader.rows(query, (TRANSLATED, LEFT_OUT, MOST_TRANSLATIONS))
    return tuple(message for (message,) in rows)
