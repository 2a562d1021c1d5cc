"""Fill the variables of a recipe: `${NAME}` from the environment, `{git.sha}` and `{git.short}` from git.

Texts that a shell inside the image reads stay as they are. `recipe.py` decodes the file, `checkout.py` asks
git, and `naming.py` fills the fields of an instance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import BadInput
from ..dialect import list_key_variables
from .checkout import GitCheckout

VERBATIM = ("agent.entrypoint", "agent.cmd", "build.before", "build.after")
NAMED_BY_USERS = ("registries",)  # tables whose keys are values too
# `$${` is a literal `${`. A default may hold braces once: `${TAG:-{id}}`, `${A:-${B}}`.
_VARIABLE = re.compile(
    r"\$(?:\$(?=\{)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>(?:[^{}]|\{[^{}]*\})*))?\}|\{)"
)
_GIT_FIELD = re.compile(r"\{git\.([^{}]*)\}")


class RecipeVariables:
    """Fills the texts of one recipe. Errors are BadInput without a location."""

    def __init__(self, variables: Mapping[str, str], find_checkout: Callable[[], GitCheckout]) -> None:
        self.revision = ""  # the commit that `{git.sha}` stood for; empty: no text named it
        self._variables = variables
        self._find_checkout = find_checkout

    def fill_text(self, text: str) -> str:
        filled = _VARIABLE.sub(self._find_value, text)
        return _GIT_FIELD.sub(self._find_revision, filled)

    def _find_value(self, match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        if match[0] == "$$":
            return "$"
        if name is None:
            raise BadInput(
                f"not a variable: `{match.string[match.start() :][:60]}`",
                "`${NAME}` or `${NAME:-default}`; `$${` stands for `${`",
            )
        if name in list_key_variables():
            raise BadInput(f"the variable `{name}` is a key", "keys of model providers never enter an image")
        value = self._variables.get(name)
        if value is None and default is None:
            raise BadInput(
                f"the variable `{name}` is not set", f"set it, or give a default: `${{{name}:-default}}`"
            )
        return value if value or default is None else self.fill_text(default)  # type: ignore[return-value]

    def _find_revision(self, match: re.Match[str]) -> str:
        if match[1] not in ("sha", "short"):
            raise BadInput(
                f"unknown field: `{match[0]}`", "known fields of a checkout: `{git.sha}`, `{git.short}`"
            )
        checkout = self._find_checkout()
        self.revision = checkout.sha
        return checkout.sha if match[1] == "sha" else checkout.short


def fill_tables(
    tables: dict[str, Any], fill: Callable[[str, str], str], above: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the tables of a recipe with `fill(text, field)` applied to their texts."""
    filled = {}
    for name, value in tables.items():
        field = ".".join((*above, name))
        key = fill(name, ".".join(above)) if above in {(table,) for table in NAMED_BY_USERS} else name
        filled[key] = value if field in VERBATIM else _fill_value(value, fill, (*above, name))
    return filled


def _fill_value(value: Any, fill: Callable[[str, str], str], path: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return fill(value, ".".join(path))
    if isinstance(value, list):
        *above, name = path
        return [_fill_value(item, fill, (*above, f"{name}[{n}]")) for n, item in enumerate(value)]
    return fill_tables(value, fill, path) if isinstance(value, dict) else value
