"""Records as MessagePack, whatever text they carry: for journals, the ledger and the wire between processes.

Half a surrogate pair in an error message, as file names bring them, or a log line of gigabytes must cost
neither a verdict nor a worker.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.masking import mask_bytes
from ..core.records import Record
from ..core.text import clean_text

LARGEST_RECORD = 64 * 1024 * 1024  # bytes; over it, long texts are cut


def encode(record: Record) -> bytes:
    try:
        content = _encode(record)
    except UnicodeEncodeError:
        content = None
    if content is not None and len(content) <= LARGEST_RECORD:
        return mask_bytes(content)
    return mask_bytes(_encode(_clean(msgspec.to_builtins(record, builtin_types=(bytes,)))))


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


_encode = msgspec.msgpack.Encoder().encode
