"""Agents that answer with a patch that is there already: the reference's, none, or someone's predictions.

They touch no sandbox. A suite that takes patches grades what they answer in the place of a diff.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.authoring import Agent, Model, Sandbox
from ..core.errors import AgentFailed, BadInput
from ..core.failures import NOT_SUBMITTED
from ..core.records import Instance


class Prediction(msgspec.Struct, frozen=True):
    """A line of the file; what else is in it is left alone."""

    instance_id: str
    model_patch: str | None
    model_name_or_path: str = ""


class Place(NamedTuple):
    told: str  # `file:line`
    offset: int  # of a `.jsonl` file
    length: int


def gold() -> Agent:
    async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> dict[str, Any]:
        if not (patch := instance.data.get("gold_patch")):
            raise AgentFailed("the instance has no reference patch", kind="no-solution")
        return {"model_patch": patch, "model_name_or_path": "gold"}

    told = "answers with the reference patch: what it fails is the suite's own mistake"
    return Agent(name="gold", act=act, uses_model=False, description=told)


def empty() -> Agent:
    async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> dict[str, Any]:
        return {"model_patch": "", "model_name_or_path": "empty"}

    return Agent(name="empty", act=act, uses_model=False, description="answers with an empty patch")


def predictions(path: Path) -> Agent:
    """An agent that answers with the prediction for the instance in this `.jsonl` or `.json` file."""
    if path.suffix not in (".jsonl", ".json"):
        raise BadInput(f"not a file of predictions: `{path}`", hint="`.jsonl` and `.json` are read")
    if not path.is_file():
        raise BadInput(f"no such file: `{path}`")

    @cache
    def places() -> dict[str, Place]:
        return index(path)

    def act(
        instance: Instance, sandbox: Sandbox, model: Model | None
    ) -> dict[str, Any]:  # reads: in a thread
        if instance.id not in places():
            raise AgentFailed(f"`{path.name}` has no prediction for it", kind=NOT_SUBMITTED, again=False)
        found = _at(path, places()[instance.id])
        return {"model_patch": found.model_patch or "", "model_name_or_path": found.model_name_or_path}

    def check() -> None:
        places()

    told = f"answers with the patches in `{path.name}`"
    return Agent(name=f"predictions:{path.name}", act=act, uses_model=False, check=check, description=told)


def index(path: Path) -> dict[str, Place]:
    """Where each prediction is, by its id; BadInput names the first that is wrong."""
    found: dict[str, Place] = {}  # as many as there are predictions
    for place, raw in _raw(path):
        try:
            name = _PREDICTIONS.decode(raw).instance_id
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadInput(
                f"{place.told}: {error}", hint="a prediction has `instance_id` and `model_patch`"
            ) from None
        if name in found:
            raise BadInput(f"duplicate id `{name[:200]}`: {found[name].told} and {place.told}")
        found[name] = place
    return found


def _raw(path: Path) -> Iterator[tuple[Place, bytes | msgspec.Raw]]:
    try:
        if path.suffix == ".json":
            yield from _listed(path)
            return
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield Place(f"{path.name}:{number}", offset, len(line)), line
                offset += len(line)
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None


def _listed(path: Path) -> Iterator[tuple[Place, msgspec.Raw]]:
    """A list, or an object of which the values are predictions; places are numbers of them."""
    try:
        whole = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw] | dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{path.name}: {error}", hint="expected a list or an object of predictions") from None
    for number, raw in enumerate(whole.values() if isinstance(whole, dict) else whole):
        yield Place(f"{path.name}: prediction {number + 1}", number, 0), raw


def _at(path: Path, place: Place) -> Prediction:
    if path.suffix == ".json":
        return next(_PREDICTIONS.decode(raw) for there, raw in _listed(path) if there.offset == place.offset)
    with path.open("rb") as file:
        file.seek(place.offset)
        return _PREDICTIONS.decode(file.read(place.length))


_PREDICTIONS = msgspec.json.Decoder(
    Prediction
)  # made at import: msgspec crashes when two threads do it at once
