"""The readers of formats that we export, as their makers ship them: in an environment of their own.

`scripts/clients` installs it. A script is run by its Python; what is missing is skipped, and fails in CI.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

PYTHON = Path(__file__).parents[1] / ".clients" / "readers" / "bin" / "python"
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}


def read_by_others(script: str, *arguments: str | Path) -> str:
    """What the script prints; an assertion of it that fails is ours."""
    if not PYTHON.exists():
        reason = "the readers of other programs are not installed: `scripts/clients` does it"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(PYTHON), "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=stretch(90),
        env={**env, **QUIET},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    sys.stderr.write(done.stderr)
    return done.stdout
