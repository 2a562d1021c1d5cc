"""The metadata that makes a field of a configuration an option: a flag, a setting of a TOML file, a keyword.

A field says all of it once, as `Annotated[int, ConfigOption(...)]`. `run/setup/options.py` parses the values,
`cli/run_flags.py` makes the flags.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec


class OptionGroup(StrEnum):
    """The headings of `--help`, in their order."""

    SERVER = "Server"
    CHOICE = "Suite, agent and model"
    ATTEMPTS = "Attempts and retries"
    LIMITS = "Limits (seconds; sizes such as `512MiB`)"
    BUDGETS = "Budgets of model calls (US dollars)"
    MACHINE = "Sandboxes, workers and files"


class ConfigOption(msgspec.Struct, frozen=True):
    """How users set a field. Without a group it is a keyword of `hw.run` and no flag."""

    group: OptionGroup | None = None
    help: str = ""
    name: str = ""  # of the option, if it is not the field's
    size: bool = False  # a number of bytes, or text such as `512MiB`
    accepts: Any = None  # the type on the command line, if it does not follow from the field's
    file: Any = None  # the type in a TOML file, if it is not that of the command line
    parse: Callable[[Any], Any] | None = None  # makes the field's value; raises BadInput
    least: float | None = None
    positive: bool = False  # the value must be more than 0
    resume: str = ""  # the help of `holdwater resume`; empty: a resume cannot change it
    live: bool = True  # if a resume can change it, `holdwater set` can, too, while the run is running
    serve: bool = True  # a server has it too
    fork: bool = True  # a fork has it too


class OptionEntry(NamedTuple):
    """An option of a configuration."""

    name: str
    path: tuple[str, ...]  # the field, in a record of the configuration or in the configuration itself
    kind: Any  # the field's type
    option: ConfigOption

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def accepts(self) -> Any:
        """The type of its value on the command line and in a TOML file."""
        if self.option.accepts is not None:
            return self.option.accepts | None
        if self.option.size or (isinstance(self.kind, type) and issubclass(self.kind, str)):
            return str | None
        return (list[str] if get_origin(self.kind) is tuple else self.kind) | None

    def read(self, config: msgspec.Struct) -> Any:
        """Return the option's value in a configuration."""
        value: Any = config
        for field in self.path:
            value = getattr(value, field)
        return value


@cache
def list_options(record: type[msgspec.Struct]) -> dict[str, OptionEntry]:
    """Return the options of a configuration and of the records in it, by name."""
    found: dict[str, OptionEntry] = {}
    for field, hint in get_type_hints(record, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, *metadata = get_args(hint)
            for option in metadata:
                if isinstance(option, ConfigOption):
                    name = option.name or field
                    found[name] = OptionEntry(name, (field,), kind, option)
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            for entry in list_options(hint).values():
                found[entry.name] = entry._replace(path=(field, *entry.path))
    return found
