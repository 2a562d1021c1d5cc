"""Shrinks or removes old runs, or estimates the freed bytes. The rules are in `ledger/pruning.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.errors import BadInput, HoldwaterError
from ..ledger.directory import LATEST, RUNS, find_run
from ..ledger.pruning import PruneOptions as PruneOptions
from ..ledger.pruning import PruneResult as PruneResult
from ..ledger.pruning import estimate_prune, is_run, list_runs, prune_run


def find_runs(places: Sequence[str]) -> list[Path]:
    """Return the runs that are named or lie in a named folder, without duplicates."""
    found: dict[Path, None] = {}
    for path in [find_run(place) if place == LATEST else Path(place) for place in places] or [RUNS]:
        if path.is_symlink():
            raise BadInput(f"a link is not followed: `{path}`")
        if not path.is_dir():
            raise BadInput(f"no such directory: `{path}`")
        runs = [path] if is_run(path) else list_runs(path)
        if not runs:
            raise BadInput(f"neither a run nor a folder of runs: `{path}`")
        found |= dict.fromkeys(runs)
    return list(found)


def try_prune(path: Path, wanted: PruneOptions, yes: bool, tell: Callable[[str], None]) -> PruneResult:
    """Prune a run, or only estimate it; a problem becomes part of the result, so that other runs continue."""
    try:
        return (prune_run if yes else estimate_prune)(path, wanted, time.time(), tell)
    except HoldwaterError as error:
        return PruneResult(directory=str(path), problem=error.message)
    except OSError as error:
        return PruneResult(directory=str(path), problem=f"{error.strerror}: `{error.filename}`")
