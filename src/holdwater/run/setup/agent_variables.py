"""The variables that a user gives to the agent: `--env NAME=VALUE`, or `--env NAME` for the value here.

A run's configuration has their names alone, so a resume needs the values again. `core/masking.py` masks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...core.environment import KEYS_WITHHELD
from ...core.errors import BadInput
from ...dialect import list_key_variables, list_providers
from ...sandbox.launcher import NAME, SHELL_VARIABLES

AgentVariables = Mapping[str, str | None] | Sequence[str]
LONGEST_VALUE = 32 * 1024  # bytes
RESERVED = "HOLDWATER_"
# Variables that every sandbox sets, and the way to the same effect.
SANDBOX_VARIABLES = {
    "PATH": "`--mount tools:/opt/tools` puts `/opt/tools/bin` on it",
    "HOME": "it is a directory of the sandbox's own",
    "TMPDIR": "it is a directory of the sandbox's own",
}


def parse_names(variables: AgentVariables) -> tuple[str, ...]:
    """Return the names of the variables; raise BadInput for a name that an agent cannot get."""
    names = tuple(dict(_split_pairs(variables)))
    for name in names:
        if not NAME.fullmatch(name):
            raise BadInput(f"invalid name for `--env`: `{name}`", "for example `--env NAME` or `NAME=VALUE`")
        if hint := _find_refusal(name):
            raise BadInput(f"invalid name for `--env`: `{name}`", hint)
    return names


def read_values(
    names: Sequence[str], variables: AgentVariables | None, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the values of a run's variables: those given now, and the others from the environment."""
    values = dict(_split_pairs(variables or ()))
    found: dict[str, str] = {}
    for name in names:
        value = values.get(name)
        if value is None and (value := environment.get(name)) is None:
            raise BadInput(
                f"`--env {name}`: the variable is not set",
                f"set it, or give its value: `--env {name}=VALUE`; a run keeps no values",
            )
        found[name] = _check_value(name, value)
    return found


def _split_pairs(variables: AgentVariables) -> Iterator[tuple[str, str | None]]:
    if isinstance(variables, Mapping):
        yield from variables.items()
        return
    for text in variables:
        name, equals, value = text.partition("=")
        yield name, value if equals else None


def _find_refusal(name: str) -> str:
    """Return why an agent cannot get a variable of this name; empty if it can."""
    if name in SANDBOX_VARIABLES:
        return f"each sandbox sets it: {SANDBOX_VARIABLES[name]}"
    if name in list_key_variables():
        return f"{KEYS_WITHHELD}: the agent has a key of its own"
    if name in {url for provider in list_providers() for url in (provider.url, *provider.other_urls)}:
        return "the agent gets the gateway's URL; `--base-url` sets the model's server"
    if name.startswith(RESERVED):
        return f"names that begin with `{RESERVED}` belong to holdwater"
    return "it belongs to the shell" if name in SHELL_VARIABLES else ""


def _check_value(name: str, value: str) -> str:
    if "\0" in value:
        raise BadInput(f"`--env {name}`: the value has a NUL character")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise BadInput(f"`--env {name}`: the value is not valid UTF-8") from None
    if size > LONGEST_VALUE:
        raise BadInput(f"`--env {name}`: the value has {size} bytes, at most {LONGEST_VALUE} are allowed")
    return value
