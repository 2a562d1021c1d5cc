"""What a run can be told, in the words of the command and of the library, as fields of a `RunConfig`.

The flags of the command are the same words; `config.py` adds what the suite suggests and checks the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict, cast

import msgspec

from ..core.authoring import Critique
from ..core.budget import RunBudget
from ..core.config import Critic, Keep, Network, RunConfig, SandboxKind
from ..core.errors import BadInput
from ..core.image import EngineKind
from ..core.records import Limits
from ..gateway.prices import read_prices
from ..image.recipe import read as read_recipe
from ..rollout.critic import own_critic, spec_of
from .config import check_spending, parse_bytes, parse_sampling, parse_shard

CALLS = ("run_requests", "run_tokens", "run_cost", "run_time")  # what a `RunBudget` is made of


class Options(TypedDict, total=False):
    """What a run can be told. Sizes are bytes or text such as `512MiB`; times are seconds."""

    model: str | None
    base_url: str | None
    concurrency: int | str | None
    ungoverned: bool | None
    workers: int | None
    attempts: int | None
    retries: int | None
    samples: int | None
    critic: Critic | Critique | str | None
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
    sandbox_read_only: bool | None
    network: Network | str | None
    images: str | Path | None
    scratch: str | Path | None
    keep: Keep | str | None
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


class Budgets(TypedDict, total=False):
    """What a run that goes on may use in all, in the place of what it was given first."""

    run_requests: int | None
    run_tokens: int | None
    run_cost: float | None
    run_time: float | None
    disk: int | str | None


class BuildOptions(TypedDict, total=False):
    """What a build of images can be told, in the place of what its recipe says."""

    engine: EngineKind | str | None
    concurrency: int | None
    disk: int | str | None
    only: Sequence[str] | None
    limit: int | None
    shard: str | None
    retries: int | None
    timeout: float | None


def build_settings(options: BuildOptions) -> dict[str, Any]:
    """The options as fields of a `RunConfig` and of its recipe."""
    said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "engine" in said:
        said["engine"] = _choice(EngineKind, said["engine"], "engine")
    if "disk" in said:
        said["disk"] = _size(said["disk"], "--disk")
    if "shard" in said:
        said["shard"] = parse_shard(said["shard"])
    if "only" in said:
        said["only"] = tuple(said["only"])
    return said


def settings(options: Options) -> dict[str, Any]:
    """The options as fields of a `RunConfig`."""
    said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    limits = {
        "setup": said.pop("setup_timeout", None),
        "acting": said.pop("timeout", None),
        "working": said.pop("working_time", None),
        "grading": said.pop("grade_timeout", None),
        "memory": _size(said.pop("sandbox_memory", None), "--sandbox-memory"),
        "disk": _size(said.pop("sandbox_disk", None), "--sandbox-disk"),
        "cpus": said.pop("sandbox_cpus", None),
        "cpu_seconds": said.pop("sandbox_cpu_seconds", None),
        "pids": said.pop("sandbox_pids", None),
        "output": _size(said.pop("sandbox_output", None), "--sandbox-output"),
        "requests": said.pop("max_requests", None),
        "input_tokens": said.pop("max_input_tokens", None),
        "output_tokens": said.pop("max_output_tokens", None),
        "cost": said.pop("max_cost", None),
    }
    said["limits"] = Limits(**{name: value for name, value in limits.items() if value is not None})
    said["budget"] = _budget({name: said.pop(name, None) for name in CALLS})
    for name in ("memory", "disk", "worker_memory", "largest_request"):
        if name in said:
            said[name] = _size(said[name], f"--{name.replace('_', '-')}")
    for option, field in (("mount", "mounts"), ("sandbox_read_only", "read_only")):
        if option in said:
            said[field] = said.pop(option)
    for name, kind in (("network", Network), ("keep", Keep), ("sandbox", SandboxKind)):
        if name in said:
            said[name] = _choice(kind, said[name], name)
    return {name: READ[name](value) if name in READ else value for name, value in said.items()}


def _budget(said: Mapping[str, Any]) -> RunBudget:
    return RunBudget(
        requests=said.get("run_requests"),
        tokens=said.get("run_tokens"),
        cost=said.get("run_cost"),
        seconds=said.get("run_time"),
    )


def with_budget(config: RunConfig, budgets: Budgets) -> RunConfig:
    """The run's configuration, with those of its budgets replaced that are given now."""
    new = msgspec.structs.asdict(_budget(cast(Mapping[str, Any], budgets)))
    given = {name: value for name, value in new.items() if value is not None}
    changed = msgspec.structs.replace(
        config,
        budget=msgspec.structs.replace(config.budget, **given),
        disk=_size(budgets.get("disk"), "--disk") or config.disk,
    )
    check_spending(changed)
    return changed


def _choice(kind: type[StrEnum], value: str, name: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(f"`{choice}`" for choice in kind)
        raise BadInput(f"`--{name}` must be one of {choices}: `{value}`") from None


def _mount(text: str) -> tuple[str, str]:
    """`HERE:THERE`: a path of this machine, and where it is in a container."""
    here, colon, there = text.rpartition(":")
    if not colon or not here or not there.startswith("/"):
        raise BadInput(f"`--mount` must look like `tools:/opt/tools`: `{text}`")
    if not Path(here).exists():
        raise BadInput(f"`--mount`: no such file or directory: `{here}`")
    return str(Path(here).resolve()), there


def _slots(value: int | str) -> int | None:
    if isinstance(value, int):
        return value
    if value.strip().lower() == "auto":
        return None
    if not value.strip().isdigit():
        raise BadInput(f"`--concurrency` must be a number or `auto`: `{value}`")
    return int(value)


def _critic(said: Critique | str) -> str:
    own_critic(said)  # refuses what is none
    return spec_of(said)


READ: dict[str, Callable[[Any], Any]] = {  # what people write -> what is kept
    "critic": _critic,
    "concurrency": _slots,
    "shard": parse_shard,
    "sampling": parse_sampling,
    "prices": lambda path: read_prices(Path(path)),
    "images": lambda path: read_recipe(Path(path)),
    "only": tuple,
    "mounts": lambda texts: tuple(_mount(text) for text in texts),
    "scratch": lambda path: str(Path(path).absolute()),
}


def _size(value: int | str | None, flag: str) -> int | None:
    return parse_bytes(value, flag) if isinstance(value, str) else value
