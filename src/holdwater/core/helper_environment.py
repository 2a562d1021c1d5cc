"""The environment of helper processes: a few fixed variables, none of the operator's and none of a task's.

A variable such as `LD_PRELOAD` or `PATH` determines which code a program runs. The variables of a task are
set inside its sandbox, at the last exec. This module does not read the environment of this process.
"""

from __future__ import annotations

import sys

SERVE_KEYS = "HOLDWATER_SERVE_KEYS"  # API keys of a server, separated by commas
# Variables that hold keys: only the conductor has them, and no other process receives them.
KEY_VARIABLES = frozenset(
    (
        "OPENAI_API_KEY",
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_AUTH_TOKEN",
        "GEMINI_API_KEY",
        "GOOGLE_API_KEY",
        SERVE_KEYS,
    )
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def build_environment(**variables: str) -> dict[str, str]:
    """Return the clean environment, with the `variables` that the helper needs."""
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", **variables}


def build_python_environment() -> dict[str, str]:
    """Return the clean environment for a Python helper, which finds the same packages as this process."""
    return build_environment(PYTHONPATH=":".join(filter(None, sys.path)))
