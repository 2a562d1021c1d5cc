"""The environment variables of helper processes and sandboxes. It does not read this process's environment.

A helper gets a few fixed variables, none of the operator's and none of a task's: a variable such as
`LD_PRELOAD` or `PATH` determines which code a program runs. The variables of a task are set inside its
sandbox, at the last exec. Their values may be `${NAME}` or `${NAME:-default}`; such a template is stored
unexpanded and expanded when a sandbox starts, because its value may be a secret.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

from .authoring import Sandbox
from .errors import SandboxFailed

SERVE_KEYS = "HOLDWATER_SERVE_KEYS"  # API keys of a server, separated by commas
SANDBOX_TOKEN = "HOLDWATER_SANDBOX_TOKEN"  # the token of a sandbox server
JUDGE_KEY = "JUDGE_API_KEY"  # the key of the server of `--judge-base-url`
KEYS_WITHHELD = "keys of model providers never enter a sandbox"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Set for every grading command: packages in a user's home do not belong to the suite.
GRADING_VARIABLES: Mapping[str, str] = MappingProxyType({"PYTHONNOUSERSITE": "1"})
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


class AgentSandbox(Sandbox, Protocol):
    """The sandbox that agents receive."""

    @property
    def env(self) -> Mapping[str, str]:
        """The variables of `--env`. Each command has them, unless its own `env` says otherwise."""


def build_environment(**variables: str) -> dict[str, str]:
    """Return the clean environment, with the `variables` that the helper needs."""
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", **variables}


def build_python_environment() -> dict[str, str]:
    """Return the clean environment for a Python helper, which finds the same packages as this process."""
    return build_environment(PYTHONPATH=":".join(filter(None, sys.path)))


def fill_templates(env: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with templates replaced by the values of `variables`."""
    return {name: _fill_value(value, variables) for name, value in env.items()}


def list_required(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each name in `env` whose variable must be set, with that variable."""
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match is not None and match[2] is None:
            yield name, match[1]


def _fill_value(value: str, variables: Mapping[str, str]) -> str:
    match = _TEMPLATE.fullmatch(value)
    if match is None:
        return value
    found = variables.get(match[1], match[2])
    if found is None:
        raise SandboxFailed(
            f"the variable `{match[1]}` is not set, or not passed to sandboxes",
            f"set it and allow it with `--pass-env {match[1]}`; {KEYS_WITHHELD}",
            kind="env",
            again=False,
        )
    return found
