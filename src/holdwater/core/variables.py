"""Values that come from holdwater's own environment: `${NAME}` and `${NAME:-default}`, where that is all.

Such a value is written down as it stands and filled in when a sandbox starts: it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from .errors import SandboxFailed

# Of every command that grades: packages in the home of a user are not the suite's.
GRADING: Mapping[str, str] = MappingProxyType({"PYTHONNOUSERSITE": "1"})

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def filled(env: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """`env` with the values of `variables` in the place of templates."""
    return {name: _value(value, variables) for name, value in env.items()}


def asked(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names in `env`, each with the variable that has to be set for it."""
    for name, value in env.items():
        match = _TEMPLATE.fullmatch(value)
        if match is not None and match[2] is None:
            yield name, match[1]


def _value(value: str, variables: Mapping[str, str]) -> str:
    match = _TEMPLATE.fullmatch(value)
    if match is None:
        return value
    found = variables.get(match[1], match[2])
    if found is None:
        raise SandboxFailed(
            f"the variable `{match[1]}` is not set, or not handed over",
            f"set it and allow it with `--pass-env {match[1]}`; {NOT_ALL}",
            kind="env",
            again=False,
        )
    return found


NOT_ALL = "keys of model providers never enter a sandbox"
