"""Agents without a model: they do nothing, run the instance's own solution, or answer with an existing patch.

An instance that `nop` passes does not measure agents. If `oracle` or `gold` fails, the suite is at fault. A
suite that grades patches uses the answer of `gold`, `empty` and `predictions` in place of a diff.
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

LONGEST_REASON = 1000  # characters of output quoted in a failure


class PatchPrediction(msgspec.Struct, frozen=True):
    """A line of the file; other fields are ignored."""

    instance_id: str
    model_patch: str | None
    model_name_or_path: str = ""


class PredictionPlace(NamedTuple):
    label: str  # `file:line`
    offset: int  # byte offset in a `.jsonl` file; index in a `.json` file
    length: int


def nop() -> Agent:
    async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> None:
        """Do nothing; without a call to the sandbox, none is created."""

    described = "does nothing; an instance that it passes needs no agent"
    return Agent(name="nop", act=act, uses_model=False, description=described)


def oracle() -> Agent:
    """Return the agent that runs an instance's `solution`, or the suite's own `Suite.solve`."""

    async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> None:
        if not instance.solution:
            raise AgentFailed(
                "the instance has no solution", hint="give it a `solution` command", kind="no-solution"
            )
        result = await sandbox.run(instance.solution)
        if not result.ok:
            reason = result.output.strip()[-LONGEST_REASON:]
            raise AgentFailed(f"the solution ended with status {result.exit_code}: {reason}", kind="exit")

    described = "runs the instance's own solution"
    return Agent(name="oracle", act=act, uses_model=False, solves=True, description=described)


def gold() -> Agent:
    async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> dict[str, Any]:
        if not (patch := instance.data.get("gold_patch")):
            raise AgentFailed("the instance has no reference patch", kind="no-solution")
        return {"model_patch": patch, "model_name_or_path": "gold"}

    described = "answers with the reference patch; if it fails, the suite is at fault"
    return Agent(name="gold", act=act, uses_model=False, description=described)


def empty() -> Agent:
    async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> dict[str, Any]:
        return {"model_patch": "", "model_name_or_path": "empty"}

    return Agent(name="empty", act=act, uses_model=False, description="answers with an empty patch")


def predictions(path: Path) -> Agent:
    """Return an agent that answers with the instance's prediction in this `.jsonl` or `.json` file."""
    if path.suffix not in (".jsonl", ".json"):
        raise BadInput(f"not a file of predictions: `{path}`", hint="supported formats: `.jsonl` and `.json`")
    if not path.is_file():
        raise BadInput(f"no such file: `{path}`")

    @cache
    def places() -> dict[str, PredictionPlace]:
        return index_predictions(path)

    # Not async: it runs in a thread, because it reads a file.
    def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> dict[str, Any]:
        if instance.id not in places():
            raise AgentFailed(
                f"`{path.name}` has no prediction for this instance", kind=NOT_SUBMITTED, again=False
            )
        found = _read_prediction(path, places()[instance.id])
        return {"model_patch": found.model_patch or "", "model_name_or_path": found.model_name_or_path}

    def check() -> None:
        places()

    described = f"answers with the patches in `{path.name}`"
    return Agent(
        name=f"predictions:{path.name}", act=act, uses_model=False, check=check, description=described
    )


def index_predictions(path: Path) -> dict[str, PredictionPlace]:
    """Return the position of each prediction by its id; raise BadInput that names the first invalid one."""
    found: dict[str, PredictionPlace] = {}  # one entry per prediction
    for place, raw in _read_raw(path):
        try:
            name = _PREDICTIONS.decode(raw).instance_id
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadInput(
                f"{place.label}: {error}", hint="a prediction has `instance_id` and `model_patch`"
            ) from None
        if name in found:
            raise BadInput(f"duplicate id `{name[:200]}`: {found[name].label} and {place.label}")
        found[name] = place
    return found


def _read_raw(path: Path) -> Iterator[tuple[PredictionPlace, bytes | msgspec.Raw]]:
    try:
        if path.suffix == ".json":
            yield from _read_list(path)
            return
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield PredictionPlace(f"{path.name}:{number}", offset, len(line)), line
                offset += len(line)
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None


def _read_list(path: Path) -> Iterator[tuple[PredictionPlace, msgspec.Raw]]:
    """Yield the predictions of a list, or of an object's values; their positions are indexes."""
    try:
        whole = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw] | dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{path.name}: {error}", hint="expected a list or an object of predictions") from None
    for number, raw in enumerate(whole.values() if isinstance(whole, dict) else whole):
        yield PredictionPlace(f"{path.name}: prediction {number + 1}", number, 0), raw


def _read_prediction(path: Path, place: PredictionPlace) -> PatchPrediction:
    if path.suffix == ".json":
        return next(
            _PREDICTIONS.decode(raw) for there, raw in _read_list(path) if there.offset == place.offset
        )
    with path.open("rb") as file:
        file.seek(place.offset)
        return _PREDICTIONS.decode(file.read(place.length))


# Made at import: msgspec crashes when two threads make one at once.
_PREDICTIONS = msgspec.json.Decoder(PatchPrediction)
