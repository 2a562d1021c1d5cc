"""Flags from a TOML file, merged with those of the command line, which come first."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from ..core.errors import BadInput


def merged(flags: dict[str, Any], config: Path | None) -> dict[str, Any]:
    """The flags that were given, and for those that were not what the file says."""
    if config is None:
        return flags
    for name, value in _read(config).items():
        key = name.replace("-", "_")
        if key not in flags:
            near = difflib.get_close_matches(key, flags, n=1)
            hint = f"did you mean `{near[0].replace('_', '-')}`?" if near else ""
            raise BadInput(f"{config}: no such setting: `{name}`", hint)
        if flags[key] is None:
            flags[key] = _checked(config, name, value)
    return flags


def _read(config: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(config.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read `{config}`: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{config}: not TOML: {error}") from None


TEXTS = {"agent", "command", "model", "base_url", "shard", "critic", "network", "scratch"}
SIZES = {"sandbox_memory", "memory", "worker_memory"}
LISTS = {"only"}
SECONDS = {  # numbers
    "timeout",
    "working_time",
    "setup_timeout",
    "grade_timeout",
    "silence",
    "grace",
    "suite_timeout",
    "backoff",
}


def _checked(config: Path, name: str, value: Any) -> Any:
    key = name.replace("-", "_")
    kinds: tuple[type, ...] = (int,)
    if key in TEXTS:
        kinds = (str,)
    elif key in SIZES:
        kinds = (str, int)
    elif key in LISTS:
        kinds = (list,)
    elif key in SECONDS:
        kinds = (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise BadInput(f"{config}: `{name}`: expected {expected}, got {type(value).__name__}")
    return value
