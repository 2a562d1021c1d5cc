"""Parses the values of options that the command line and TOML files give as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .errors import BadInput


def parse_slots(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    if value.strip().lower() == "auto":
        return None
    if not value.strip().isdigit():
        raise BadInput(f"`--concurrency` must be a number or `auto`: `{value}`")
    return int(value)


def parse_shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise BadInput(f"`--shard` must look like `1/4`: `{text}`")
    return int(match[1]), int(match[2])


def parse_sampling(pairs: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    return _parse_pairs(pairs, "--sampling", "temperature=0.7")


def parse_agent_options(pairs: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    return _parse_pairs(pairs, "--agent-option", "max_iterations=100")


def parse_model_map(pairs: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = dict(pairs) if isinstance(pairs, Mapping) else {}
    for pair in () if isinstance(pairs, Mapping) else pairs:
        name, _, model = pair.partition("=")
        found[name.strip()] = model.strip()
    for name, model in found.items():
        if not name or not isinstance(model, str) or not model or not model.isprintable():
            raise BadInput(f"`--model-map` must look like `small=qwen3-4b`: `{name}={model}`")
    return found


def _parse_pairs(pairs: Mapping[str, Any] | Sequence[str], flag: str, example: str) -> dict[str, Any]:
    """Parse parameters such as `temperature=0.7`; a value that is not JSON is text."""
    if isinstance(pairs, Mapping):
        return dict(pairs)
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise BadInput(f"`{flag}` must look like `{example}`: `{pair}`")
        try:
            found[name.strip()] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            found[name.strip()] = text
    return found
