"""Commands with the real package `verifiers`: forks of one process that has it loaded.

`scripts/clients` installs the environment. Where it is missing, tests are skipped, and fail in CI.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.forked_command import Interpreter

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".clients" / "verifiers" / "bin" / "python"
LOADED = ("verifiers.v1", "verifiers.v1.judge", "verifiers.v1.envs.best_of_n")
TASKSETS = Path(__file__).parent / "clients" / "tasksets"


def find_interpreter(name: str = "verifiers", *modules: str) -> Interpreter:
    """The Python of an environment, with the package loaded before it forks: an import takes seconds."""
    python = ROOT / ".clients" / name / "bin" / "python"
    if not python.exists():
        reason = f"{name} are not installed: `scripts/clients` or `scripts/proof-clients` does it"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return Interpreter(str(python), modules or LOADED)


def copy_taskset(place: Path, name: str) -> Path:
    """Copy a taskset, so that its directory has nothing else in it."""
    return Path(shutil.copy(TASKSETS / f"{name}.py", place))
