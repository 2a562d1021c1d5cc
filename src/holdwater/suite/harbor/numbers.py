"""Converts numbers as Harbor does: `true` is 1, and `" 30 "`, `"1_000"` and `"512.0"` are numbers.

A value that is not a number stays unchanged: `task_file.py` rejects it and names its key.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import inspect

WHOLE = re.compile(r"([+-]?\d+(?:_\d+)*)(?:\.0*)?", re.ASCII)


def coerce_numbers(value: Any, kind: inspect.Type) -> Any:
    """Return `value` with every field converted that is a number in `kind`."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for one in kinds:
        if isinstance(one, inspect.StructType) and isinstance(value, dict):
            types = {field.encode_name: field.type for field in one.fields}
            return {k: coerce_numbers(v, types[k]) if k in types else v for k, v in value.items()}
        if isinstance(one, inspect.VarTupleType) and isinstance(value, list):
            return [coerce_numbers(item, one.item_type) for item in value]
        if isinstance(one, inspect.DictType) and isinstance(value, dict):
            return {k: coerce_numbers(v, one.value_type) for k, v in value.items()}
    text = any(isinstance(one, inspect.StrType) for one in kinds)
    number = next((one for one in kinds if isinstance(one, inspect.IntType | inspect.FloatType)), None)
    if number is None or (text and isinstance(value, str)):
        return value
    return _read_number(value, whole=isinstance(number, inspect.IntType))


def _read_number(value: Any, *, whole: bool) -> Any:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str) or not value.isascii():
        return value
    if whole:
        match = WHOLE.fullmatch(value.strip())
        return int(match[1]) if match else value
    try:
        return float(value)
    except ValueError:
        return value
