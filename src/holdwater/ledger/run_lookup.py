"""Finds a run's directory by name, or the newest run. The layout of a run directory is in `directory.py`."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import BadInput

RUNS = Path("runs")
LATEST = "latest"


def find_run(name: str | None) -> Path:
    """Return the run's directory; `latest` or None selects the newest run in `runs/`."""
    if name and name != LATEST:
        return Path(name)
    runs = [(config.stat().st_mtime, config.parent) for config in RUNS.glob("*/run.json")]
    if not runs:
        hint = "name a run's directory, or make a run: `holdwater run demo`"
        raise BadInput(f"no run in `{RUNS.absolute()}`", hint=hint)
    return max(runs)[1]
