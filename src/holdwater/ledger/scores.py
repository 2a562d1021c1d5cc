"""Reads the scores and tags of a run's instances for a comparison: a small row for each instance."""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.comparison import InstanceScores
from ..core.errors import LedgerCorrupt
from .reader import LedgerReader


def read_scores(reader: LedgerReader) -> dict[str, InstanceScores]:
    """Return the scores of all planned instances, in the order of planning."""
    return {row[1]: InstanceScores(*row[2:]) for row in reader.paged(_SCORES)}


def read_tags(reader: LedgerReader, field: str) -> dict[str, tuple[str, ...]]:
    """Return the values of a field of `Instance.data`: a list has several tags, any other value is one."""
    found = {}
    for row in reader.instances():
        try:
            data = _payloads.decode(reader.payload(row.id)).data
        except msgspec.MsgspecError as e:
            raise LedgerCorrupt(f"instance `{row.name}` of the run cannot be read: {e}") from e
        value = data.get(field)
        if value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            found[row.name] = tuple(str(item) for item in values)
    return found


class _TaggedPayload(msgspec.Struct):
    """The part of an instance that tags come from."""

    data: dict[str, Any] = {}


_payloads = msgspec.msgpack.Decoder(_TaggedPayload)
_SCORES = """
    SELECT i.id, i.name, i.digest,
        coalesce(sum(o.kind IN ('passed', 'failed')), 0), coalesce(sum(o.kind = 'passed'), 0),
        coalesce(sum(CASE WHEN o.kind IN ('passed', 'failed') THEN o.score END), 0.0),
        coalesce(sum(o.kind NOT IN ('passed', 'failed')), 0)
    FROM instance i LEFT JOIN outcome o ON o.instance = i.id
    WHERE i.id > ? GROUP BY i.id ORDER BY i.id LIMIT ?
"""
