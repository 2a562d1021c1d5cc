"""Makes flags from the options of a configuration, and merges them with the settings of a TOML file.

The command line takes precedence. The options themselves are in `core/config.py`.
"""

# No `from __future__ import annotations`: the annotations are read in other modules.
import dataclasses
import difflib
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from cyclopts import Group, Parameter

from ..core.config import RunConfig
from ..core.errors import BadInput
from ..core.options import OptionEntry, OptionGroup, list_options

FlagsClass = TypeVar("FlagsClass")


RETRY_GROUP = Group("Samples to retry", sort_key=1)
SETTINGS_GROUP = Group("Settings that replace the run's own from now on", sort_key=2)


def make_option(group: OptionGroup | Group | None, text: str) -> Parameter:
    if isinstance(group, OptionGroup):
        group = Group(group, sort_key=list(OptionGroup).index(group))
    return Parameter(group=group, help=text, show_default=False, negative="")


def add_flags(
    entries: Iterable[OptionEntry], changes: Group | None = None
) -> Callable[[type[FlagsClass]], type[FlagsClass]]:
    """Add a flag for each option to a class of flags. With `changes` they are the settings of a resume."""

    def decorate(kind: type[FlagsClass]) -> type[FlagsClass]:
        fields: list[Any] = []
        for entry in entries:
            shown, text = changes or entry.option.group, entry.option.resume if changes else entry.option.help
            if shown and text:
                accepts: Any = entry.accepts
                flag = Annotated[accepts, make_option(shown, text)]
                fields.append((entry.name, flag, dataclasses.field(default=None)))
        made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True)
        made.__module__, made.__doc__ = kind.__module__, kind.__doc__
        return Parameter(name="*")(made)

    return decorate


def make_switch(text: str) -> Parameter:
    return Parameter(help=text, show_default=False, negative="")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class DisplayFlags:
    """How a command shows its run."""

    view: Annotated[bool, make_switch("Serve the run to a browser while it runs, and print the address")] = (
        False
    )
    json: Annotated[
        bool, make_switch("Print the run's summary as one JSON document on stdout, at the end")
    ] = False
    quiet: Annotated[bool, make_switch("Show no live display and no closing page")] = False


@dataclasses.dataclass(frozen=True)
class AgentFlags:
    """The flags that choose an agent, which is an argument of its own in the library."""

    agent: Annotated[
        str | None,
        make_option(
            OptionGroup.CHOICE,
            "`bash`, `claude-code`, ... (see `holdwater agents`), `command` or `path.py:name`",
        ),
    ] = None
    command: Annotated[
        str | None,
        make_option(
            OptionGroup.CHOICE,
            "With `--agent command`: the program, with placeholders such as `{instruction}`",
        ),
    ] = None


@add_flags(list_options(RunConfig).values())
@dataclasses.dataclass(frozen=True)
class RunFlags(AgentFlags):
    """All flags of a run. A TOML file may set each of them under its own name."""


@add_flags(list_options(RunConfig).values(), SETTINGS_GROUP)
@dataclasses.dataclass(frozen=True)
class ResumeFlags:
    """The settings that a resume changes, and the samples that it tries again."""

    retry: Annotated[
        list[str] | None,
        make_option(
            RETRY_GROUP, "`failed`, `infrastructure`, `all`, or a pattern over instance ids; may be repeated"
        ),
    ] = None
    retry_poison: Annotated[
        bool | None, make_option(RETRY_GROUP, "Also retry instances that crashed their workers")
    ] = None


@add_flags(entry for entry in list_options(RunConfig).values() if entry.option.fork)
@dataclasses.dataclass(frozen=True)
class ForkFlags:
    """The settings in which a fork differs from its origin."""


def merge_flags(flags: Any, config: Path | None) -> dict[str, Any]:
    """Return the flags of the command line (a dataclass), with missing ones filled in from the file."""
    said = dataclasses.asdict(flags)
    if config is None:
        return said
    kinds = {**get_type_hints(type(flags)), **_list_file_types()}
    for name, value in _read(config).items():
        key = name.replace("-", "_")
        if key not in said:
            near = difflib.get_close_matches(key, said, n=1)
            hint = f"did you mean `{near[0].replace('_', '-')}`?" if near else ""
            raise BadInput(f"{config}: unknown setting: `{name}`", hint)
        if said[key] is None:
            try:
                said[key] = msgspec.convert(value, kinds[key])
            except msgspec.ValidationError as error:
                hint = "a whole number or `auto`" if key == "concurrency" else ""
                raise BadInput(f"{config}: `{name}`: {_explain_error(error)}", hint) from None
    return said


def _list_file_types() -> dict[str, Any]:
    """Return the types of options that a TOML file writes in another way than the command line."""
    entries = list_options(RunConfig).values()
    return {entry.name: entry.option.file for entry in entries if entry.option.file is not None}


def _explain_error(error: msgspec.ValidationError) -> str:
    """Return `expected int, got str`, without the `null` that TOML does not have."""
    text = str(error).replace(" | null", "").replace("Invalid enum value", "invalid value:")
    return text[0].lower() + text[1:]


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read `{config}`: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{config}: not TOML: {error}") from None
