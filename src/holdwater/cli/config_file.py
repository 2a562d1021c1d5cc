"""Reads flags from a TOML file; flags on the command line take precedence."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ..core.errors import BadInput


def merge_flags(flags: Any, config: Path | None) -> dict[str, Any]:
    """Return the flags of the command line (a dataclass), with missing ones filled in from the file."""
    said = dataclasses.asdict(flags)
    if config is None:
        return said
    kinds = get_type_hints(type(flags))
    for name, value in _read(config).items():
        key = name.replace("-", "_")
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean `{near[0].replace('_', '-')}`?" if near else ""
            raise BadInput(f"{config}: unknown setting: `{name}`", hint)
        if said[key] is None:
            try:
                said[key] = msgspec.convert(value, kinds[key])
            except msgspec.ValidationError as error:
                raise BadInput(f"{config}: `{name}`: {_explain_error(error)}") from None
    return said


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
