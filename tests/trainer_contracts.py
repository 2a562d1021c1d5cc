"""The contracts of TRL, verl and SkyRL, read from the source of their packages and recorded in a file.

The tests give the adapters types that are built from the record, so that they need neither torch nor Ray. A
test of `make proof` reads the installed packages again: `python tests/trainer_contracts.py SITE_PACKAGES`
prints their contracts.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

RECORD = Path(__file__).with_suffix(".json")
# What the adapters use: fields of classes, parameters of methods, by their place in the packages.
CLASSES = {
    "trl/experimental/async_grpo/async_rollout_worker.py": ["RolloutSample"],
    "verl/experimental/agent_loop/agent_loop.py": ["AgentLoopMetrics", "AgentLoopOutput"],
    "verl/workers/rollout/replica.py": ["TokenOutput"],
    "skyrl/train/generators/base.py": ["TrajectoryID", "BatchMetadata", "GeneratorInput", "GeneratorOutput"],
    "skyrl/backends/skyrl_train/inference_servers/base.py": ["InferenceEngineInput", "InferenceEngineOutput"],
}
METHODS = {
    "trl/experimental/async_grpo/async_grpo_trainer.py": {
        "RolloutWorkerProtocol": ["start", "stop", "update_model_version", "check_health"]
    },
    "verl/experimental/agent_loop/agent_loop.py": {"AgentLoopBase": ["__init__", "run"]},
    "verl/workers/rollout/llm_server.py": {"LLMServerClient": ["generate"]},
    "skyrl/train/generators/base.py": {"GeneratorInterface": ["generate"]},
    "skyrl/backends/skyrl_train/inference_servers/base.py": {
        "InferenceEngineInterface": ["generate", "finish_session"]
    },
}
GRPO = "trl/trainer/grpo_trainer.py"
TRAINER_ATTRIBUTES = ["accelerator", "model", "num_generations", "num_generations_eval", "processing_class"]


def read_contracts(packages: Path) -> dict[str, Any]:
    """Return the contracts of the packages in this directory."""
    fields: dict[str, dict[str, str]] = {}
    parameters: dict[str, list[str]] = {}
    for path in {**CLASSES, **METHODS}:
        classes = _read_classes(packages / path)
        for name in CLASSES.get(path, ()):
            fields[f"{path}:{name}"] = _read_fields(classes[name])
        for name, methods in METHODS.get(path, {}).items():
            for method in methods:
                parameters[f"{path}:{name}.{method}"] = _read_parameters(classes[name], method)
    return {"fields": fields, "parameters": parameters, "grpo": _read_grpo(packages / GRPO)}


def _read_classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _read_fields(node: ast.ClassDef) -> dict[str, str]:
    """Return the annotation of each field, with its default."""
    return {
        ast.unparse(part.target): ast.unparse(part.annotation)
        + (f" = {ast.unparse(part.value)}" if part.value is not None else "")
        for part in node.body
        if isinstance(part, ast.AnnAssign)
    }


def _read_parameters(node: ast.ClassDef, method: str) -> list[str]:
    functions = (part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))
    [found] = (function for function in functions if function.name == method)
    return [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)]


def _read_grpo(path: Path) -> dict[str, Any]:
    """Return the keys that a `rollout_func` has to return and may return, and the trainer's attributes."""
    [trainer] = (node for name, node in _read_classes(path).items() if name == "GRPOTrainer")
    [keys] = (
        ast.literal_eval(node.value)
        for node in ast.walk(trainer)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "required_keys"
    )
    calls = [ast.unparse(node) for node in ast.walk(trainer) if isinstance(node, ast.Call)]
    text = path.read_text()
    return {
        "required": sorted(keys),
        "mask": sorted({"env_mask"} & {key for key in ("env_mask",) if f'extra_fields.pop("{key}"' in text}),
        "call": sorted(call for call in calls if call.startswith("self.rollout_func(")),
        "attributes": sorted(name for name in TRAINER_ATTRIBUTES if f"self.{name}" in text),
        "unscored": "torch.isnan(rewards_per_func).all(dim=1)" in text,
    }


def load_record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def build_modules() -> dict[str, ModuleType]:
    """Return the modules that adapters import, with types that are built from the record."""
    modules: dict[str, ModuleType] = {}
    for place, fields in load_record()["fields"].items():
        path, name = place.split(":")
        parts = path.removesuffix(".py").split("/")
        for depth in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        module = modules[".".join(parts)]
        setattr(module, name, _build_type(name, fields, vars(module)))
    return modules


def _build_type(name: str, fields: dict[str, str], others: dict[str, Any]) -> Any:
    import typing

    import numpy
    from pydantic import create_model
    from typing_extensions import TypedDict

    names = {**vars(typing), **others, "np": numpy, "torch": ModuleType("torch")}
    names |= {"Messages": list[dict[str, str]], "ConversationType": list[dict[str, str]]}
    names |= {"TrainingPhase": str, "MultiModalFeatures": Any}
    names["torch"].Tensor = Any
    read: dict[str, Any] = {}
    for field, text in fields.items():
        kind, _, default = text.partition(" = ")
        read[field] = (eval(kind, names), ast.literal_eval(default) if default else ...)
    kinds = {field: kind for field, (kind, _) in read.items()}
    if name.startswith(("Generator", "InferenceEngine")):
        return TypedDict(name, kinds)  # type: ignore[operator]
    if name.startswith(("AgentLoop", "TokenOutput")):
        return create_model(name, **read)
    return dataclasses.make_dataclass(
        name,
        [
            (field, kind) if default is ... else (field, kind, dataclasses.field(default=default))
            for field, (kind, default) in read.items()
        ],
    )


def main(packages: str) -> None:
    found = read_contracts(Path(packages))
    versions = {
        distribution.name: distribution.version
        for distribution in importlib.metadata.distributions(path=[packages])
        if distribution.name in ("trl", "verl", "skyrl")
    }
    print(json.dumps({"versions": versions, **found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
