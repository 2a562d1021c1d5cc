"""Sums the usage of a run by model. The ledger has totals alone, so this reads every recorded exchange.

It is a generator that does a little work for each step, as `text_search.py`: it stops with its page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.exchange import Exchange
from ..core.records import NO_USAGE, ModelUsage
from ..ledger.exchanges import decode_exchange, segment_path
from ..ledger.reader import LedgerReader
from ..ledger.segment import scan_bounded
from .text_search import LARGEST, list_attempts

MOST_MODELS = 50
LONGEST_NAME = 200
FURTHER = "further models"


class _NamedModel(msgspec.Struct):
    """The part of a request or reply that names its model."""

    model: Any = ""


_named = msgspec.json.Decoder(_NamedModel)


class ModelUsageSums:
    """The usage of each model so far."""

    def __init__(self, reader: LedgerReader) -> None:
        self.models: dict[str, ModelUsage] = {}  # bound: MOST_MODELS, and one for the further ones
        self.attempts = 0
        self.skipped = 0  # records that are too large, and segments that are damaged
        self._reader = reader

    def sum_attempts(self) -> Iterator[None]:
        for attempt, *_ in list_attempts(self._reader):
            path = segment_path(self._reader.directory, attempt)
            names: dict[int, str] = {}  # by exchange; bound: the exchanges of one attempt
            try:
                for record in scan_bounded(path, LARGEST):
                    if record.content is None:
                        self.skipped += 1
                    else:
                        self._add(decode_exchange(record.content, attempt), names)
                    yield
            except FileNotFoundError:
                pass  # no call was recorded, or the files are dropped
            except LedgerCorrupt:
                self.skipped += 1
            self.attempts += 1
            yield

    def _add(self, exchange: Exchange, names: dict[int, str]) -> None:
        name = read_model(exchange.head) or names.get(exchange.parent or 0, "") or read_model(exchange.reply)
        names[exchange.number] = name
        name = name if name in self.models or len(self.models) < MOST_MODELS else FURTHER
        self.models[name] = self.models.get(name, NO_USAGE).plus(exchange.usage)


def read_model(raw: msgspec.Raw | None) -> str:
    """Return the model that a request or a reply names; empty if it names none."""
    try:
        model = _named.decode(raw).model if raw is not None else ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return model[:LONGEST_NAME] if isinstance(model, str) else ""
