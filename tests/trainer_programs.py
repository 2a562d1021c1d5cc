"""The Python environment with TRL, verl and SkyRL, which `scripts/proof-clients` makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DRAWERS = (
    f"{(ROOT / 'examples' / 'grpo' / 'drawers.py').read_text()}\nsolve = search\n"  # for `server_harness.py`
)


def find_trainers() -> str:
    """Return its interpreter; skip the test if there is none."""
    python = ROOT / ".clients" / "trainers" / "bin" / "python"
    if not python.exists():
        reason = "the trainers are not installed: `scripts/proof-clients` does it"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return str(python)
