"""The directories that a run writes to, and the removal of leftovers of its conductors."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from ...core.config import RunConfig
from ...ledger.directory import RunDirectory
from ...sandbox.scratch import list_temporary_places, remove_dead_runs, sweep, temporary_prefix


def sweep_all(directory: RunDirectory, config: RunConfig) -> None:
    """Remove scratch directories of dead runs nearby, and the leftovers of this run."""
    for place in {directory.sandbox_root(config).parent, *list_temporary_places()}:
        remove_dead_runs(place)
    sweep_leftovers(directory, config)


def sweep_leftovers(directory: RunDirectory, config: RunConfig) -> None:
    """Remove leftovers of this run's conductors: processes, sandboxes, sockets."""
    sweep(config.id, directory.sandbox_root(config))
    for place in list_temporary_places():
        for left in place.glob(f"{temporary_prefix(config.id)}*"):
            shutil.rmtree(left, ignore_errors=True)


def list_places(directory: RunDirectory, config: RunConfig) -> dict[str, Path]:
    """Return the directories that a run writes to."""
    return {
        "run": directory.path,
        "scratch": directory.sandbox_root(config),
        "temp": Path(tempfile.gettempdir()),
    }
