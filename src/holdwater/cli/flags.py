"""What several verbs take: flags, and a run named by its directory or as the latest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..core.errors import BadInput

Flag = Annotated[bool, Parameter(negative="", show_default=False)]
Patterns = Annotated[list[str] | None, Parameter(negative="", show_default=False)]
RUNS = Path("runs")
LATEST = "latest"


def find_run(name: str | None) -> Path:
    """The run's directory; `latest` or None is the newest run in `runs/`."""
    if name and name != LATEST:
        return Path(name)
    runs = [(config.stat().st_mtime, config.parent) for config in RUNS.glob("*/run.json")]
    if not runs:
        hint = "name a run's directory, or make a run: `holdwater run demo`"
        raise BadInput(f"no run in `{RUNS.absolute()}`", hint=hint)
    return max(runs)[1]
