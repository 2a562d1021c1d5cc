"""The tags of instances: a field of an instance's data, in a table of their own so that a list can use them.

`statements.py` and the migration in `schema.py` write the table, `listing.py` filters by it.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from ..core.masking import clean_text

TAGS = "tags"  # the field of an instance's data that has its tags
MOST_TAGS = 32  # of an instance in the table
LONGEST_TAG = 100  # characters in the table


class _TaggedPayload(msgspec.Struct):
    """The part of an instance that tags come from."""

    data: dict[str, Any] = {}


_payloads = msgspec.msgpack.Decoder(_TaggedPayload)


def read_tags(payload: bytes, field: str = TAGS) -> tuple[str, ...]:
    """Return the values of a field of `Instance.data`: a list has several tags, any other value is one."""
    value = _payloads.decode(payload).data.get(field)
    if value is None:
        return ()
    return tuple(str(item) for item in (value if isinstance(value, list | tuple) else [value]))


def list_stored_tags(payload: bytes) -> list[str]:
    """Return the tags that the table has for an instance; none if they cannot be read."""
    try:
        tags = read_tags(payload)
    except msgspec.MsgspecError:
        return []
    return sorted({clean_text(tag[:LONGEST_TAG]) for tag in tags[:MOST_TAGS]})


def write_tags(connection: sqlite3.Connection, instance: int, payload: bytes) -> None:
    """Write the tags of a new instance."""
    connection.executemany(
        "INSERT INTO tag VALUES (?, ?)", ((tag, instance) for tag in list_stored_tags(payload))
    )


def replace_tags(connection: sqlite3.Connection, instance: int, payload: bytes) -> None:
    connection.execute("DELETE FROM tag WHERE instance = ?", (instance,))
    write_tags(connection, instance, payload)
