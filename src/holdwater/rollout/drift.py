"""Says where the requests of a replay differ from the recorded ones; `ledger/drift.py` compares them."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.authoring import DriftedCall
from ..core.errors import HoldwaterError
from ..gateway.identity import PASSING
from ..gateway.routes import DIALECTS
from ..ledger.directory import RunDirectory
from ..ledger.drift import RequestReader
from ..ledger.trajectory import Tree


def describe_drift(
    directory: RunDirectory, recorded: RunDirectory, attempt: int, drifts: Sequence[DriftedCall]
) -> str:
    """Where the requests of an attempt differ from those in the run that it replays. Reads both."""
    try:
        reader = RequestReader(
            Tree(directory, attempt), lambda before: Tree(recorded, before), _steady_message, PASSING
        )
        return reader.describe(drifts)
    except HoldwaterError as error:
        return f"they cannot be compared: {error.message}"


def _steady_message(dialect: str, message: bytes) -> bytes:
    """A message as its identity has it."""
    form = DIALECTS[dialect].form
    for part in (form.lasting, form.steady):
        message = message if part is None else part(message)
    return message
