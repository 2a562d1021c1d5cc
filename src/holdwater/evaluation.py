"""Loads an evaluation of the OpenHands benchmarks: a subclass of their `Evaluation`, and its metadata.

The interface is that of their public repository. No class of it is imported by name: the metadata and the
instances have the classes that the subclass itself uses. `suite/openhands.py` takes the instances and the
grades of an evaluation, and `agent/openhands/evaluation.py` runs it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec

from . import plugin
from .core.errors import BadInput
from .core.records import Record

PREFIX = "openhands:"
# The SDK and LiteLLM read these variables when they are imported.
SDK_VARIABLES = {
    "OPENHANDS_SUPPRESS_BANNER": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise LiteLLM downloads the prices
}
RESULT_NAME = "evaluation.json"  # in the attempt's artifacts: what a failed evaluation has saved
METHODS = ("prepare_instances", "prepare_workspace", "evaluate_instance")
CRITICS = {
    "finish_with_patch": "AgentFinishedCritic",
    "empty_patch_critic": "EmptyPatchCritic",
    "pass": "PassCritic",
}
OWN_FIELDS = ("eval_output_dir", "n_critic_runs", "max_retries")  # of the metadata: the run's own settings
DEFAULTS: dict[str, Any] = {"max_iterations": 500, "details": {}, "critic": "finish_with_patch"}
INTERFACE_HINT = "it must be a subclass of `Evaluation` of OpenHands' benchmarks"


class EvaluationSpec(Record, frozen=True):
    """A parsed `openhands:module:Class?option=value&...`."""

    place: str  # `module:Class` or `path.py:Class`
    image: str | None = None  # of every sandbox, with `{id}`
    workdir: str = "/workspace"
    prepare: bool = True  # whether `prepare_workspace` is called
    metadata: str | None = None  # a JSON file with fields of the metadata
    fields: dict[str, str] = msgspec.field(default_factory=dict)  # further fields of the metadata


def parse_evaluation(spec: str) -> EvaluationSpec:
    """Return the parts of a spec; raise BadInput that names the option."""
    place, _, query = spec.removeprefix(PREFIX).partition("?")
    own: dict[str, Any] = {}
    fields: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if not value:
            raise BadInput(f"empty option of `{PREFIX}{place}`: `{name}`")
        if name in ("image", "workdir", "metadata"):
            own[name] = value
        elif name == "prepare":
            if value not in ("yes", "no"):
                raise BadInput(f"invalid option `prepare` of `{PREFIX}{place}`: `{value}`", "`yes` or `no`")
            own[name] = value == "yes"
        elif name in OWN_FIELDS:
            hint = "`--out`, `--attempts` and `--retries` set them"
            raise BadInput(f"not an option of `{PREFIX}{place}`: `{name}`", hint)
        else:
            fields[name] = value
    if not own.get("workdir", "/").startswith("/"):
        raise BadInput(f"option `workdir` of `{PREFIX}{place}` is not absolute: `{own['workdir']}`")
    return EvaluationSpec(place=place, fields=fields, **own)


def make_absolute(spec: str) -> str:
    """Return the spec with absolute paths, so that it is valid from any directory."""
    place, _, query = spec.removeprefix(PREFIX).partition("?")
    options = [
        (name, str(Path(value).absolute()) if name in ("metadata", "selected_instances_file") else value)
        for name, value in parse_qsl(query, keep_blank_values=True)
    ]
    return PREFIX + plugin.make_absolute(place) + (f"?{urlencode(options)}" if options else "")


class LoadedEvaluation:
    """A class of evaluations, and the metadata that its spec gives."""

    def __init__(self, spec: str) -> None:
        self.spec = parse_evaluation(spec)
        self.kind = _load_class(self.spec.place)
        self._metadata: Any = self.kind.model_fields["metadata"].annotation
        self._fields = self._read_fields()

    def open(self, directory: Path, llm: Mapping[str, Any]) -> Any:
        """Return the evaluation; it writes its own files to `directory` and calls the model of `llm`."""
        fields = self._fields
        values = {
            "dataset": self.kind.__name__,
            "prompt_path": self._find_prompt(),
            **DEFAULTS,
            **fields,
            "llm": {"usage_id": "agent", **fields.get("llm", {}), **llm},
            "eval_output_dir": str(directory),
            "n_critic_runs": 1,
            "max_retries": 0,
        }
        if isinstance(values["critic"], str):
            values["critic"] = {"kind": CRITICS.get(values["critic"], values["critic"])}
        directory.mkdir(parents=True, exist_ok=True)
        metadata = self._validate(values)
        return plugin.call_guarded(lambda: self.kind(metadata=metadata), f"`{self.spec.place}`")

    def make_instance(self, name: str, data: Mapping[str, Any]) -> Any:
        """Return an instance of the benchmarks' own class, with a copy of the data."""
        kind = sys.modules[self._metadata.__module__].EvalInstance
        return kind(id=name, data=msgspec.json.decode(msgspec.json.encode(data)))

    def _read_fields(self) -> dict[str, Any]:
        """Return the fields of the metadata: those of the file, then those of the spec."""
        fields: dict[str, Any] = {}
        place = f"`{PREFIX}{self.spec.place}`"
        if self.spec.metadata is not None:
            place = f"`{self.spec.metadata}`"
            fields = _read_metadata(Path(self.spec.metadata))
            self._check_names(fields, place)
            fields = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
        self._check_names(self.spec.fields, f"`{PREFIX}{self.spec.place}`")
        return fields | {name: _decode_value(value) for name, value in self.spec.fields.items()}

    def _check_names(self, fields: Mapping[str, Any], place: str) -> None:
        known = self._metadata.model_fields
        for name in fields:
            if name not in known:
                near = plugin.find_close_name(name, [*known, "image", "workdir", "prepare", "metadata"])
                hint = f"did you mean `{near}`?" if near else f"fields are {', '.join(known)}"
                raise BadInput(f"{place}: the metadata has no field `{name}`", hint)

    def _find_prompt(self) -> str | None:
        """Return the default prompt, which lies beside the module of the class or of one that it extends."""
        files = (getattr(sys.modules[kind.__module__], "__file__", None) for kind in self.kind.__mro__)
        paths = (Path(file).with_name("prompts") / "default.j2" for file in files if file)
        return next((str(path) for path in paths if path.is_file()), None)

    def _validate(self, values: dict[str, Any]) -> Any:
        from pydantic import ValidationError  # their classes are models of pydantic

        try:
            return self._metadata.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "metadata"
            raise BadInput(f"`{self.spec.place}`: field `{field}` of the metadata: {first['msg']}") from None


def set_sdk_variables(own: Mapping[str, str] = MappingProxyType({})) -> None:
    """Set the variables for importing the SDK in this process, as far as the user has not set them."""
    ours = {**SDK_VARIABLES, "LOG_AUTO_CONFIG": "false", **own}  # a worker has its own log
    for name, value in ours.items():
        os.environ.setdefault(name, value)


def _load_class(place: str) -> Any:
    set_sdk_variables()
    found = plugin.find_object(place)
    if not isinstance(found, type):
        raise BadInput(f"not an evaluation: `{place}` is of type `{type(found).__name__}`", INTERFACE_HINT)
    missing = [name for name in METHODS if not callable(getattr(found, name, None))]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    if missing or "metadata" not in getattr(found, "model_fields", {}):
        lacks = f"no `{missing[0]}`" if missing else "no field `metadata`"
        raise BadInput(f"not an evaluation: `{place}` has {lacks}", INTERFACE_HINT)
    return found


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise BadInput(f"`{path}` is not a JSON object: {error}") from None


def _decode_value(value: str) -> Any:
    """Return an object or a list that is written as JSON; the metadata's own class converts other values."""
    if value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
