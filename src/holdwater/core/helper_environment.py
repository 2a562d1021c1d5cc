"""The environment of helper processes: a few variables of ours, none of the operator's, none of a task's.

A variable such as `LD_PRELOAD` or `PATH` decides which code a program runs. Variables of a task are set
inside its sandbox, at the last exec. It reads nothing of this process's own environment.
"""

from __future__ import annotations

import sys

SERVE_KEYS = "HOLDWATER_SERVE_KEYS"  # that open a server, with commas between them
# Variables that hold keys: they stay in the conductor, and no other process gets them.
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
    """The clean environment, and `variables` that the helper needs."""
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", **variables}


def build_python_environment() -> dict[str, str]:
    """The clean environment for a Python of ours: it finds the packages that this process finds."""
    return build_environment(PYTHONPATH=":".join(filter(None, sys.path)))
