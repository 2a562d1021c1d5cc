"""Describes how the requests of a replay differ from the recorded ones; `conversation/drift.py` compares."""

from __future__ import annotations

from collections.abc import Sequence

from ..conversation.drift import RequestComparison
from ..conversation.trajectory import ExchangeTree
from ..core.errors import HoldwaterError
from ..core.exchange import DriftedCall
from ..dialect import find_dialect
from ..gateway.recorder import VOLATILE_KEYS
from ..ledger.directory import RunDirectory


def describe_drift(
    directory: RunDirectory, recorded: RunDirectory, attempt: int, drifts: Sequence[DriftedCall]
) -> str:
    """Describe how an attempt's requests differ from those of the run that it replays. Reads both runs."""
    try:
        reader = RequestComparison(
            ExchangeTree(directory, attempt),
            lambda before: ExchangeTree(recorded, before),
            _steady_message,
            VOLATILE_KEYS,
        )
        return reader.describe(drifts)
    except HoldwaterError as error:
        return f"the requests cannot be compared: {error.message}"


def _steady_message(dialect: str, message: bytes) -> bytes:
    """Return a message without its volatile parts, as used for a request's identity."""
    found = find_dialect(dialect)
    return found.strip_generated(found.strip_transient(message))
