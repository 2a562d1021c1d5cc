"""Reads `task.toml`: an invalid value raises an error that names file and key; unknown keys are collected.

Keys of older schema versions are converted to current ones, and numbers as Harbor does: `true` is 1, and
`" 30 "`, `"1_000"` and `"512.0"` are numbers. `compatibility.py` checks for missing files.
"""

from __future__ import annotations

import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import msgspec.inspect
from msgspec import inspect

from ...core.errors import BadInput
from ...core.input_checks import explain_path
from ...core.limits import parse_size
from ...core.records import MiB, Record
from ..jsonl import InvalidField, explain_error
from .records import (
    AgentSection,
    ArtifactSection,
    EnvironmentSection,
    NetworkMode,
    StepSection,
    TaskToml,
    VerifierMode,
    VerifierSection,
)

WHOLE = re.compile(r"([+-]?\d+(?:_\d+)*)(?:\.0*)?", re.ASCII)
TASK_FILE = "task.toml"
LARGEST_FILE = 4 * MiB
BOOLEAN_WORDS = dict.fromkeys(("yes", "y", "t", "on"), True) | dict.fromkeys(("no", "n", "f", "off"), False)
NOT_IN_A_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')


_TOML = msgspec.inspect.type_info(TaskToml)


def coerce_numbers(value: Any, kind: inspect.Type) -> Any:
    """Return `value` with every field converted that is a number in `kind`."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for one in kinds:
        if isinstance(one, inspect.StructType) and isinstance(value, dict):
            types = {field.encode_name: field.type for field in one.fields}
            return {k: coerce_numbers(v, types[k]) if k in types else v for k, v in value.items()}
        if isinstance(one, inspect.VarTupleType) and isinstance(value, list):
            return [coerce_numbers(item, one.item_type) for item in value]
        if isinstance(one, inspect.DictType) and isinstance(value, dict):
            return {k: coerce_numbers(v, one.value_type) for k, v in value.items()}
    text = any(isinstance(one, inspect.StrType) for one in kinds)
    number = next((one for one in kinds if isinstance(one, inspect.IntType | inspect.FloatType)), None)
    if number is None or (text and isinstance(value, str)):
        return value
    return _read_number(value, whole=isinstance(number, inspect.IntType))


def _read_number(value: Any, *, whole: bool) -> Any:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str) or not value.isascii():
        return value
    if whole:
        match = WHOLE.fullmatch(value.strip())
        return int(match[1]) if match else value
    try:
        return float(value)
    except ValueError:
        return value


class HarborTask(Record, frozen=True):
    """A task on this machine."""

    directory: str
    place: str  # the path of its `task.toml` in messages
    toml: TaskToml
    unknown: tuple[str, ...] = ()  # keys that are not supported
    keeps_processes: bool = False  # whether the agent's processes keep running while a shared verifier runs


class BadTask(Record, frozen=True):
    """A task that cannot run: a value is invalid or a file is missing."""

    directory: str
    place: str
    reason: str


def read_task(directory: Path, place: str) -> HarborTask:
    """Read the task in `directory`, called `place` in messages; raise BadInput if it is invalid."""
    try:
        raw = _modernize(tomllib.loads(_read_text(directory / TASK_FILE)))
        toml = msgspec.convert(coerce_numbers(raw, _TOML), TaskToml, strict=False)
        _check(toml)
    except OSError as error:
        raise BadInput(f"{place}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"{place}: not valid TOML: {error}") from None
    except (msgspec.ValidationError, InvalidField) as error:
        raise BadInput(f"{place}: {explain_error(error)}") from None
    return HarborTask(str(directory), place, toml, tuple(_find_unknown(raw, toml)))


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise InvalidField("", f"larger than {LARGEST_FILE // MiB} MiB")
    return content.decode()


def _modernize(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert the keys of older schema versions to the current ones."""
    if "version" in raw:
        raw.setdefault("schema_version", raw.pop("version"))
    for key, environment in _environments(raw):
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in environment:
                _rename(environment, key, old, new)
        if isinstance(environment.get("os"), str):
            environment["os"] = environment["os"].lower()
        if isinstance(said := environment.get("allow_internet"), str):
            environment["allow_internet"] = BOOLEAN_WORDS.get(said.lower(), said)
    return raw


def _environments(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every table that describes an environment, with its key."""
    verifiers = [("verifier", raw.get("verifier"))]
    steps = raw.get("steps")
    for n, step in enumerate(steps if isinstance(steps, list) else ()):
        verifiers.append((f"steps.{n}.verifier", step.get("verifier") if isinstance(step, dict) else None))
    found = [("environment", raw.get("environment"))]
    found += [(f"{key}.environment", v.get("environment")) for key, v in verifiers if isinstance(v, dict)]
    yield from ((key, table) for key, table in found if isinstance(table, dict))


def _rename(environment: dict[str, Any], key: str, old: str, new: str) -> None:
    said = environment.pop(old)
    size = parse_size(said) if isinstance(said, str) else None
    if size is None or not re.search("[kmgKMG]", said):
        raise InvalidField(f"{key}.{old}", f"expected a size like `2G`, got `{said}`")
    if environment.setdefault(new, size // MiB) != size // MiB:
        raise InvalidField(f"{key}.{old}", f"`{said}` contradicts `{new}`: {environment[new]}")


def _check(toml: TaskToml) -> None:
    """Check the constraints that the types do not express."""
    if toml.task is not None and ".." in toml.task.name:
        raise InvalidField("task.name", f"must not contain `..`: `{toml.task.name}`")
    _check_environment("environment", toml.environment)
    _check_phases("", toml.agent, toml.verifier)
    _check_artifacts("artifacts", toml.artifacts)
    seen: set[str] = set()  # bound: the steps of one task
    for n, step in enumerate(toml.steps):
        _check_step(f"steps.{n}", step, seen)
        _check_phases(f"steps.{n}.", step.agent, step.verifier)


def _check_phases(above: str, agent: AgentSection, verifier: VerifierSection) -> None:
    _check_hosts(f"{above}agent", agent.network_mode, agent.allowed_hosts)
    _check_hosts(f"{above}verifier", verifier.network_mode, verifier.allowed_hosts)
    if verifier.environment is None:
        return
    key = f"{above}verifier.environment"
    _check_environment(key, verifier.environment)
    if verifier.environment_mode is VerifierMode.SHARED:
        raise InvalidField(f"{key}_mode", f"`shared`, although there is a `{key}`")


def _check_environment(key: str, environment: EnvironmentSection) -> None:
    if environment.cpus is not None and not math.isfinite(environment.cpus):
        raise InvalidField(f"{key}.cpus", f"expected a finite number, got {environment.cpus}")
    if environment.workdir is not None and (problem := explain_path(environment.workdir)):
        raise InvalidField(f"{key}.workdir", problem)
    _check_hosts(key, environment.network_mode, environment.allowed_hosts)


def _check_hosts(key: str, mode: NetworkMode | None, hosts: tuple[str, ...] | None) -> None:
    if hosts and mode is not NetworkMode.ALLOWLIST:
        raise InvalidField(f"{key}.allowed_hosts", 'requires `network_mode = "allowlist"`')


def _check_step(key: str, step: StepSection, seen: set[str]) -> None:
    name = step.name
    if (
        not name.strip()
        or name.endswith((".", " "))
        or NOT_IN_A_NAME.search(name)
        or len(name.encode()) > 255
    ):
        raise InvalidField(f"{key}.name", f"not a valid directory name: {name!r}")
    folded = unicodedata.normalize("NFC", name).casefold()
    if folded in seen:
        raise InvalidField(f"{key}.name", f"duplicate step name: `{name}`")
    seen.add(folded)
    _check_artifacts(f"{key}.artifacts", step.artifacts)


def _check_artifacts(key: str, artifacts: Iterable[str | ArtifactSection]) -> None:
    for n, entry in enumerate(artifacts):
        artifact = ArtifactSection(source=entry) if isinstance(entry, str) else entry
        if ".." in PurePosixPath(artifact.source).parts:
            raise InvalidField(f"{key}.{n}.source", f"must not contain `..`: `{artifact.source}`")
        path = PurePosixPath(artifact.destination or "x")
        inside = not path.is_absolute() and path.parts and ".." not in path.parts and "\\" not in str(path)
        if not inside or str(path) == "manifest.json":
            raise InvalidField(
                f"{key}.{n}.destination", f"expected a relative path, got `{artifact.destination}`"
            )


def _find_unknown(raw: Any, known: Any, above: str = "") -> Iterator[str]:
    """Yield the keys of `raw` that are not fields of the converted record."""
    if isinstance(known, msgspec.Struct) and isinstance(raw, dict):
        for key, value in raw.items():
            if key in known.__struct_fields__:
                yield from _find_unknown(value, getattr(known, key), f"{above}{key}.")
            else:
                yield f"{above}{key}"
    elif isinstance(known, tuple) and isinstance(raw, list):
        for value, record in zip(raw, known, strict=True):
            yield from _find_unknown(value, record, above)
