"""The options of a run, for the command and the library, as fields of a `RunConfig`.

The command's flags have the same names; `config.py` adds the suite's defaults and checks the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from ...core.authoring import CriticFunction
from ...core.config import CriticKind, KeepRule, Network, RunConfig, SandboxKind, SandboxRoot
from ...core.errors import BadInput
from ...core.image import EngineKind
from ...core.prices import RunBudget
from ...core.records import Limits
from ...gateway.prices import read_prices
from ...image.recipe import read_recipe
from ...plugin import find_close_name
from ...rollout.critic import load_critic, spec_of
from .config import check_config, parse_bytes, parse_pass_env, parse_sampling, parse_shard

LIMIT_FIELDS = {  # option -> field of `Limits`
    "setup_timeout": "setup",
    "timeout": "acting",
    "working_time": "working",
    "grade_timeout": "grading",
    "sandbox_memory": "memory",
    "sandbox_disk": "disk",
    "sandbox_cpus": "cpus",
    "sandbox_cpu_seconds": "cpu_seconds",
    "sandbox_pids": "pids",
    "sandbox_output": "output",
    "max_requests": "requests",
    "max_input_tokens": "input_tokens",
    "max_output_tokens": "output_tokens",
    "max_cost": "cost",
}
BUDGET_FIELDS = {  # option -> field of `RunBudget`
    "run_requests": "requests",
    "run_tokens": "tokens",
    "run_cost": "cost",
    "run_time": "seconds",
}
SIZE_OPTIONS = {
    "sandbox_memory",
    "sandbox_disk",
    "sandbox_output",
    "memory",
    "disk",
    "worker_memory",
    "largest_request",
}
RETRY_OPTIONS = {"retry", "retry_poison"}  # not settings of a run


class RunOptions(TypedDict, total=False):
    """The options of a run. Sizes are bytes or text such as `512MiB`; times are seconds."""

    model: str | None
    base_url: str | None
    concurrency: int | str | None
    ungoverned: bool | None
    workers: int | None
    attempts: int | None
    retries: int | None
    samples: int | None
    critic: CriticKind | CriticFunction | str | None
    only: Sequence[str] | None
    limit: int | None
    shard: str | None
    timeout: float | None
    working_time: float | None
    setup_timeout: float | None
    grade_timeout: float | None
    sandbox_memory: int | str | None
    sandbox_disk: int | str | None
    sandbox_cpus: float | None
    sandbox_cpu_seconds: float | None
    sandbox_pids: int | None
    sandbox_output: int | str | None
    sandbox: SandboxKind | str | None
    image: str | None
    mount: Sequence[str] | None
    sandbox_root: SandboxRoot | str | None
    sandbox_read_only: bool | None
    network: Network | str | None
    pass_env: Sequence[str] | None
    images: str | Path | None
    scratch: str | Path | None
    keep: KeepRule | str | None
    memory: int | str | None
    disk: int | str | None
    disk_patience: float | None
    worker_memory: int | str | None
    recycle_after: int | None
    silence: float | None
    grace: float | None
    suite_timeout: float | None
    backoff: float | None
    max_requests: int | None
    max_input_tokens: int | None
    max_output_tokens: int | None
    max_cost: float | None
    run_requests: int | None
    run_tokens: int | None
    run_cost: float | None
    run_time: float | None
    largest_request: int | str | None
    sampling: Mapping[str, Any] | Sequence[str] | None
    rpm: float | None
    tpm: float | None
    prices: str | Path | None
    stall: float | None
    salvaging: float | None
    closing: float | None
    patience: float | None


class ResumeOptions(TypedDict, total=False):
    """The options of a resume: settings that replace the run's own, and samples to try again.

    `retry` holds words of `core.policy.RetryChoice`, or patterns over instance ids.
    """

    retry: str | Sequence[str] | None
    retry_poison: bool | None
    concurrency: int | str | None
    workers: int | None
    attempts: int | None
    retries: int | None
    timeout: float | None
    memory: int | str | None
    disk: int | str | None
    base_url: str | None
    pass_env: Sequence[str] | None
    rpm: float | None
    tpm: float | None
    run_requests: int | None
    run_tokens: int | None
    run_cost: float | None
    run_time: float | None


class ImageBuildOptions(TypedDict, total=False):
    """The options of an image build, which replace the recipe's own."""

    engine: EngineKind | str | None
    concurrency: int | None
    disk: int | str | None
    only: Sequence[str] | None
    limit: int | None
    shard: str | None
    retries: int | None
    timeout: float | None


def parse_build_settings(options: ImageBuildOptions) -> dict[str, Any]:
    """Return the options as fields of a `RunConfig` and of its recipe."""
    said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "engine" in said:
        said["engine"] = _parse_choice(EngineKind, said["engine"], "engine")
    if "disk" in said:
        said["disk"] = _parse_size(said["disk"], "--disk")
    if "shard" in said:
        said["shard"] = parse_shard(said["shard"])
    if "only" in said:
        said["only"] = tuple(said["only"])
    return said


def parse_settings(options: RunOptions) -> dict[str, Any]:
    """Return the options as fields of a `RunConfig`."""
    _refuse_unknown(options, RunOptions)
    fields, limits, budget = _parse(options)
    return {**fields, "limits": Limits(**limits), "budget": RunBudget(**budget)}


def replace_settings(config: RunConfig, options: ResumeOptions) -> RunConfig:
    """Return the run's configuration with the given settings replaced."""
    _refuse_unknown(options, ResumeOptions)
    fields, limits, budget = _parse(options)
    for name in RETRY_OPTIONS & fields.keys():
        del fields[name]
    changed = msgspec.structs.replace(
        config,
        **fields,
        limits=msgspec.structs.replace(config.limits, **limits),
        budget=msgspec.structs.replace(config.budget, **budget),
    )
    check_config(changed)
    return changed


def _refuse_unknown(options: Mapping[str, object], kind: type) -> None:
    """Refuse unknown options: Python does not check a `TypedDict`, and a typo must not be dropped."""
    known = kind.__annotations__
    if unknown := next((name for name in options if name not in known), None):
        near = find_close_name(unknown, known)
        hint = f"did you mean `{near}`?" if near else f"known options: {', '.join(known)}"
        raise BadInput(f"unknown option: `{unknown}`", hint)


def _parse(options: RunOptions | ResumeOptions) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the given options as fields of a `RunConfig`, of its limits and of its budget."""
    said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name in SIZE_OPTIONS & said.keys():
        said[name] = _parse_size(said[name], f"--{name.replace('_', '-')}")
    limits = {field: said.pop(option) for option, field in LIMIT_FIELDS.items() if option in said}
    budget = {field: said.pop(option) for option, field in BUDGET_FIELDS.items() if option in said}
    for option, field in (("mount", "mounts"), ("sandbox_read_only", "read_only")):
        if option in said:
            said[field] = said.pop(option)
    for name, kind in CHOICES.items():
        if name in said:
            said[name] = _parse_choice(kind, said[name], name)
    fields = {name: PARSERS[name](value) if name in PARSERS else value for name, value in said.items()}
    return fields, limits, budget


def _parse_choice(kind: type[StrEnum], value: str, name: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(f"`{choice}`" for choice in kind)
        raise BadInput(f"`--{name.replace('_', '-')}` must be one of {choices}: `{value}`") from None


def _parse_mount(text: str) -> tuple[str, str]:
    """Parse `HERE:THERE`: a path of this machine, and its path in a sandbox."""
    here, colon, there = text.rpartition(":")
    if not colon or not here or not there.startswith("/"):
        raise BadInput(f"`--mount` must look like `tools:/opt/tools`: `{text}`")
    if not Path(here).exists():
        raise BadInput(f"`--mount`: no such file or directory: `{here}`")
    return str(Path(here).resolve()), there


def _parse_slots(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    if value.strip().lower() == "auto":
        return None
    if not value.strip().isdigit():
        raise BadInput(f"`--concurrency` must be a number or `auto`: `{value}`")
    return int(value)


def _parse_critic(said: CriticFunction | str) -> str:
    load_critic(said)  # raises if it is no critic
    return spec_of(said)


CHOICES: dict[str, type[StrEnum]] = {
    "network": Network,
    "keep": KeepRule,
    "sandbox": SandboxKind,
    "sandbox_root": SandboxRoot,
}
PARSERS: dict[str, Callable[[Any], Any]] = {  # option -> parser of its value
    "critic": _parse_critic,
    "concurrency": _parse_slots,
    "shard": parse_shard,
    "sampling": parse_sampling,
    "prices": lambda path: read_prices(Path(path)),
    "images": lambda path: read_recipe(Path(path)),
    "only": tuple,
    "pass_env": parse_pass_env,
    "mounts": lambda texts: tuple(_parse_mount(text) for text in texts),
    "scratch": lambda path: str(Path(path).absolute()),
}


def _parse_size(value: int | str | None, flag: str) -> int | None:
    return parse_bytes(value, flag) if isinstance(value, str) else value
