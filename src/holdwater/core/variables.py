"""Values from holdwater's own environment: `${NAME}` and `${NAME:-default}`, as the whole value.

Such a template is stored unexpanded and expanded when a sandbox starts, because its value may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from .errors import SandboxFailed

# Set for every grading command: packages in a user's home do not belong to the suite.
GRADING_VARIABLES: Mapping[str, str] = MappingProxyType({"PYTHONNOUSERSITE": "1"})

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


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


KEYS_WITHHELD = "keys of model providers never enter a sandbox"
