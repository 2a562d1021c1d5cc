"""The experts that an engine chose for each token, cut to the tokens of one node: for router replay.

An engine of a mixture-of-experts model returns `routed_experts` beside a choice: base64 of an array of tokens
x layers x experts, from the token `start` of the prompt on. The last sampled token has no row yet.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any, NamedTuple

import msgspec

from ..core.exchange import Exchange
from ..dialect.message import as_dict, as_list

_SIZES = {"uint8": 1, "uint16": 2, "int32": 4}  # bytes of a number, by the name of its type


class ExpertRouting(NamedTuple):
    """The rows of one reply."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]  # of one row: layers, experts
    start: int

    @property
    def width(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape) * _SIZES[self.dtype]

    def cut(self, first: int, count: int) -> dict[str, Any] | None:
        """Return the rows of these tokens as an array of the wire; None if some are missing."""
        at, rows = first - self.start, len(self.data) // self.width
        if at < 0 or count == 0 or at + count > rows + 1:
            return None
        found = self.data[at * self.width : (at + count) * self.width]
        if at + count == rows + 1:  # nothing followed the last token: its row is a stand-in
            found += found[-self.width :]
        return {"__nd__": True, "dtype": self.dtype, "shape": [count, *self.shape], "data": found}

    def correct(self, array: dict[str, Any] | None, following: int) -> None:
        """Replace the stand-in at the end of the rows before the token `following`."""
        at = following - 1 - self.start
        if array is None or array["shape"][1:] != list(self.shape) or array["dtype"] != self.dtype:
            return
        if 0 <= at < len(self.data) // self.width:
            row = self.data[at * self.width : (at + 1) * self.width]
            array["data"] = array["data"][: -self.width] + row


def read_routing(exchange: Exchange, choice: int) -> ExpertRouting | None:
    """Return the routing of a choice of a reply; None if the engine sent none that can be read."""
    reply = bytes(exchange.original or exchange.reply or b"")
    if b'"routed_experts"' not in reply:
        return None
    choices = as_list(as_dict(msgspec.json.decode(reply)).get("choices"))
    routed = as_dict(as_dict(choices[choice]).get("routed_experts")) if choice < len(choices) else {}
    shape, dtype, start = as_list(routed.get("shape")), routed.get("dtype", "uint8"), routed.get("start") or 0
    sized = len(shape) == 3 and all(isinstance(size, int) and size > 0 for size in shape)
    if dtype not in _SIZES or not sized:
        return None
    try:
        data = base64.b64decode(routed.get("data", ""), validate=True)
    except (binascii.Error, TypeError, ValueError):
        return None
    whole = math.prod(shape) * _SIZES[dtype] == len(data) and isinstance(start, int)
    return ExpertRouting(data, dtype, tuple(shape[1:]), start) if whole else None
