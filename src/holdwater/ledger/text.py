"""Records as MessagePack, whatever text they carry.

Half a surrogate pair in an error message, as file names bring them, must not cost a verdict.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.records import Record


def encode(record: Record) -> bytes:
    try:
        return _encode(record)
    except UnicodeEncodeError:
        return _encode(_clean(msgspec.to_builtins(record)))


def clean(text: str) -> str:
    """The text, with what UTF-8 cannot say written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


_encode = msgspec.msgpack.Encoder().encode
