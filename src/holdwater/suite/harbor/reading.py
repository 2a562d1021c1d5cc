"""Reads `task.toml`: wrong values are errors that name file and key, unknown keys are listed.

Keys of older versions are taken for what they became. What is not there at all is `stages.py`'s to miss.
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

from ...core.errors import BadInput
from ...core.records import MiB, Record
from ...core.sizes import bytes_of
from ...core.start_paths import explain_path
from .numbers import coerce_numbers
from .records import Agent, Artifact, Environment, Mode, NetworkMode, Step, Toml, Verifier

NAME = "task.toml"
LARGEST = 4 * MiB
WORDS = {"yes": True, "y": True, "t": True, "on": True, "no": False, "n": False, "f": False, "off": False}
NOT_IN_A_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')


_TOML = msgspec.inspect.type_info(Toml)


class Task(Record, frozen=True):
    """A task as it lies on this machine."""

    directory: str
    place: str  # its `task.toml`, as messages name it
    toml: Toml
    unknown: tuple[str, ...] = ()  # keys that mean nothing here
    keeps_processes: bool = False  # what the agent started runs on while a shared verifier judges


class BadTask(Record, frozen=True):
    """A task that cannot be tried: a value of it is wrong, or a part is missing."""

    directory: str
    place: str
    reason: str


class Wrong(ValueError):
    """A value that cannot be meant, and its key."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"field `{key}`: {problem}")


def read(directory: Path, place: str) -> Task:
    """The task in `directory`, which messages call `place`; BadInput says what is wrong with it."""
    try:
        raw = _modern(tomllib.loads(_text(directory / NAME)))
        toml = msgspec.convert(coerce_numbers(raw, _TOML), Toml, strict=False)
        _check(toml)
    except OSError as error:
        raise BadInput(f"{place}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"{place}: not valid TOML: {error}") from None
    except (msgspec.ValidationError, Wrong) as error:
        raise BadInput(f"{place}: {_explained(str(error))}") from None
    return Task(str(directory), place, toml, tuple(_unknown(raw, toml)))


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise Wrong("", f"larger than {LARGEST // MiB} MiB")
    return content.decode()


def _modern(raw: dict[str, Any]) -> dict[str, Any]:
    """The same in the words of the newest version."""
    if "version" in raw:
        raw.setdefault("schema_version", raw.pop("version"))
    for key, environment in _environments(raw):
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if old in environment:
                _rename(environment, key, old, new)
        if isinstance(environment.get("os"), str):
            environment["os"] = environment["os"].lower()
        if isinstance(said := environment.get("allow_internet"), str):
            environment["allow_internet"] = WORDS.get(said.lower(), said)
    return raw


def _environments(raw: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every table that describes an environment, with its key."""
    verifiers = [("verifier", raw.get("verifier"))]
    steps = raw.get("steps")
    for n, step in enumerate(steps if isinstance(steps, list) else ()):
        verifiers.append((f"steps.{n}.verifier", step.get("verifier") if isinstance(step, dict) else None))
    found = [("environment", raw.get("environment"))]
    found += [(f"{key}.environment", v.get("environment")) for key, v in verifiers if isinstance(v, dict)]
    yield from ((key, table) for key, table in found if isinstance(table, dict))


def _rename(environment: dict[str, Any], key: str, old: str, new: str) -> None:
    said = environment.pop(old)
    size = bytes_of(said) if isinstance(said, str) else None
    if size is None or not re.search("[kmgKMG]", said):
        raise Wrong(f"{key}.{old}", f"expected a size like `2G`, got `{said}`")
    if environment.setdefault(new, size // MiB) != size // MiB:
        raise Wrong(f"{key}.{old}", f"`{said}` is not what `{new}` says: {environment[new]}")


def _check(toml: Toml) -> None:
    """What types cannot say."""
    if toml.task is not None and ".." in toml.task.name:
        raise Wrong("task.name", f"must not contain `..`: `{toml.task.name}`")
    _check_environment("environment", toml.environment)
    _check_phases("", toml.agent, toml.verifier)
    _check_artifacts("artifacts", toml.artifacts)
    seen: set[str] = set()  # bound: the steps of one task
    for n, step in enumerate(toml.steps):
        _check_step(f"steps.{n}", step, seen)
        _check_phases(f"steps.{n}.", step.agent, step.verifier)


def _check_phases(above: str, agent: Agent, verifier: Verifier) -> None:
    _check_hosts(f"{above}agent", agent.network_mode, agent.allowed_hosts)
    _check_hosts(f"{above}verifier", verifier.network_mode, verifier.allowed_hosts)
    if verifier.environment is None:
        return
    key = f"{above}verifier.environment"
    _check_environment(key, verifier.environment)
    if verifier.environment_mode is Mode.SHARED:
        raise Wrong(f"{key}_mode", f"`shared`, although there is a `{key}`")


def _check_environment(key: str, environment: Environment) -> None:
    if environment.cpus is not None and not math.isfinite(environment.cpus):
        raise Wrong(f"{key}.cpus", f"expected a finite number, got {environment.cpus}")
    if environment.workdir is not None and (problem := explain_path(environment.workdir)):
        raise Wrong(f"{key}.workdir", problem)
    _check_hosts(key, environment.network_mode, environment.allowed_hosts)


def _check_hosts(key: str, mode: NetworkMode | None, hosts: tuple[str, ...] | None) -> None:
    if hosts and mode is not NetworkMode.ALLOWLIST:
        raise Wrong(f"{key}.allowed_hosts", 'only with `network_mode = "allowlist"`')


def _check_step(key: str, step: Step, seen: set[str]) -> None:
    name = step.name
    if (
        not name.strip()
        or name.endswith((".", " "))
        or NOT_IN_A_NAME.search(name)
        or len(name.encode()) > 255
    ):
        raise Wrong(f"{key}.name", f"cannot be the name of a directory: {name!r}")
    folded = unicodedata.normalize("NFC", name).casefold()
    if folded in seen:
        raise Wrong(f"{key}.name", f"there is another step of this name: `{name}`")
    seen.add(folded)
    _check_artifacts(f"{key}.artifacts", step.artifacts)


def _check_artifacts(key: str, artifacts: Iterable[str | Artifact]) -> None:
    for n, entry in enumerate(artifacts):
        artifact = Artifact(source=entry) if isinstance(entry, str) else entry
        if ".." in PurePosixPath(artifact.source).parts:
            raise Wrong(f"{key}.{n}.source", f"must not contain `..`: `{artifact.source}`")
        path = PurePosixPath(artifact.destination or "x")
        inside = not path.is_absolute() and path.parts and ".." not in path.parts and "\\" not in str(path)
        if not inside or str(path) == "manifest.json":
            raise Wrong(f"{key}.{n}.destination", f"expected a relative path, got `{artifact.destination}`")


def _unknown(raw: Any, known: Any, above: str = "") -> Iterator[str]:
    """The keys of `raw` that are no fields of the record that was made of it."""
    if isinstance(known, msgspec.Struct) and isinstance(raw, dict):
        for key, value in raw.items():
            if key in known.__struct_fields__:
                yield from _unknown(value, getattr(known, key), f"{above}{key}.")
            else:
                yield f"{above}{key}"
    elif isinstance(known, tuple) and isinstance(raw, list):
        for value, record in zip(raw, known, strict=True):
            yield from _unknown(value, record, above)


def _explained(text: str) -> str:
    """msgspec's message in our words: ``field `environment.cpus`: expected float, got str``."""
    what, _, place = text.partition(" - at `$")
    key = place.rstrip("`").lstrip(".").replace("[...]", "").replace("[", ".").replace("]", "")
    if match := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"field `{key}.{match[1]}`: missing" if key else f"field `{match[1]}`: missing"
    if not key:
        return what.removeprefix("field ``: ")
    what = what.replace(" | null`", "`").replace("`", "")
    return f"field `{key}`: {what[:1].lower()}{what[1:]}"
