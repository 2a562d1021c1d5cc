"""Encodes records as MessagePack for journals, the ledger and the wire between processes.

Encoding succeeds for any text: a lone surrogate in an error message (file names contain them) or a log line
of gigabytes must cost neither a verdict nor a worker.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..core.masking import clean_text, mask_bytes
from ..core.records import Record

LARGEST_RECORD = 64 * 1024 * 1024  # bytes; in a larger record, long texts are cut


def encode_record(record: Record) -> bytes:
    try:
        content = _encode(record)
    except UnicodeEncodeError:
        content = None
    if content is not None and len(content) <= LARGEST_RECORD:
        return mask_bytes(content)
    return mask_bytes(_encode(_clean_value(msgspec.to_builtins(record, builtin_types=(bytes,)))))


def _clean_value(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {_clean_value(key): _clean_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean_value(item) for item in value]
    return value


_encode = msgspec.msgpack.Encoder().encode
