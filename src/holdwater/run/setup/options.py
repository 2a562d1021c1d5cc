"""Parses the options of a run, from the command or the library, into fields of a `RunConfig`.

`core/config.py` says which options there are. `config.py` adds the suite's defaults and checks the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict, get_origin

import msgspec

from ...core.authoring import Agent, AgentFunction, CriticFunction, Policy, Suite
from ...core.config import (
    CriticKind,
    KeepRule,
    Network,
    RunConfig,
    SandboxRoot,
)
from ...core.environment import KEYS_WITHHELD
from ...core.errors import BadInput
from ...core.image import EngineKind, ForcedPhase, ImageRecipe
from ...core.judge import JudgeModel
from ...core.option_values import parse_shard
from ...core.options import OptionEntry, list_options
from ...core.prices import RunBudget
from ...core.records import Limits
from ...core.sandbox_protocol import RemoteAddress
from ...core.token_sequences import TokenServer
from ...dialect import list_key_variables
from ...gateway.prices import read_prices
from ...image.recipe import read_recipe
from ...plugin import find_close_name
from ...rollout.critic import load_critic, spec_of
from ...rollout.sandbox_kinds import find_kind
from .agent_variables import parse_names
from .config import check_config, parse_bytes, read_environment

INNER_RECORDS: dict[str, type[msgspec.Struct]] = {  # field of a `RunConfig` -> a record with options
    "limits": Limits,
    "budget": RunBudget,
    "remote": RemoteAddress,
    "judge": JudgeModel,
}
RETRY_OPTIONS = {"retry", "retry_poison"}  # not settings of a run


class RunOptions(TypedDict, total=False):
    """The options of a run, for type checkers. Sizes are bytes or text such as `512MiB`; times are seconds.

    A test compares them with the fields of `RunConfig`.
    """

    model: str | None
    model_map: Mapping[str, str] | Sequence[str] | None
    base_url: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
    upstream_dialect: str | None
    token_ids: TokenServer | str | None
    judge_model: str | None
    judge_base_url: str | None
    agent_option: Mapping[str, Any] | Sequence[str] | None
    concurrency: int | str | None
    ungoverned: bool | None
    workers: int | None
    attempts: int | None
    retries: int | None
    samples: int | None
    critic: CriticKind | CriticFunction | str | None
    only: Sequence[str] | None
    select: str | Path | Sequence[str] | None
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
    sandbox: str | None
    sandbox_url: str | None
    sandbox_token_file: str | Path | None
    sandbox_ca: str | Path | None
    sandbox_plain: bool | None
    image: str | None
    mount: Sequence[str] | None
    sandbox_root: SandboxRoot | str | None
    sandbox_read_only: bool | None
    network: Network | str | None
    env: Mapping[str, str | None] | Sequence[str] | None
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
    base_url: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None
    upstream_dialect: str | None
    token_ids: TokenServer | str | None
    judge_base_url: str | None
    env: Mapping[str, str | None] | Sequence[str] | None
    sandbox_url: str | None
    sandbox_token_file: str | Path | None
    sandbox_ca: str | Path | None
    pass_env: Sequence[str] | None
    max_cost: float | None
    rpm: float | None
    tpm: float | None
    run_requests: int | None
    run_tokens: int | None
    run_cost: float | None
    run_time: float | None


class ForkOptions(RunOptions, total=False):
    """The options of a fork: its place in the recorded run, the code to use, and settings that differ."""

    sample: int
    attempt: int | None
    say: str | None
    then_say: str | None
    drift: bool
    suite: Suite | None
    agent: Agent | AgentFunction | None
    policy: Policy | None
    trust: bool


class ImageBuildOptions(TypedDict, total=False):
    """The options of an image build, which replace the recipe's own."""

    engine: EngineKind | str | None
    concurrency: int | None
    disk: int | str | None
    cache: int | str | None
    keep: bool | None
    force: bool | ForcedPhase | str | Sequence[str] | None
    only: Sequence[str] | None
    limit: int | None
    shard: str | None
    retries: int | None
    timeout: float | None


def load_recipe(path: Path) -> ImageRecipe:
    """Return a recipe, filled and changed by the variables of this process."""
    environment = read_environment()
    recipe = read_recipe(path, environment.inherited)
    size = environment.cache_size
    return recipe if size is None else msgspec.structs.replace(recipe, cache=size)


def parse_build_settings(options: ImageBuildOptions) -> dict[str, Any]:
    """Return the options as fields of a `RunConfig` and of its recipe."""
    said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "engine" in said:
        said["engine"] = _parse_choice(EngineKind, said["engine"], "--engine")
    for name in ("disk", "cache"):
        if name in said:
            said[name] = _parse_size(said[name], f"--{name}")
    if "force" in said:
        said["force"] = _parse_force(said["force"])
    if "shard" in said:
        said["shard"] = parse_shard(said["shard"])
    if "only" in said:
        said["only"] = tuple(said["only"])
    return said


def parse_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as fields of a `RunConfig`."""
    fields = _parse(options, list_options(RunConfig))
    return {**fields, **{name: kind(**fields[name]) for name, kind in INNER_RECORDS.items()}}


def replace_settings(config: RunConfig, options: Mapping[str, Any]) -> RunConfig:
    """Return the run's configuration with the given settings replaced."""
    known = {name: entry for name, entry in list_options(RunConfig).items() if entry.option.resume}
    fields = _replace_fields(config, options, {**dict.fromkeys(RETRY_OPTIONS), **known})
    changed = msgspec.structs.replace(config, **fields)
    check_config(changed)
    return changed


def parse_fork_changes(config: RunConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run's configuration that a fork of it changes."""
    known = {name: entry for name, entry in list_options(RunConfig).items() if entry.option.fork}
    return _replace_fields(config, options, known)


def _replace_fields(
    config: RunConfig, options: Mapping[str, Any], known: Mapping[str, OptionEntry | None]
) -> dict[str, Any]:
    fields = _parse(options, known)
    for name in INNER_RECORDS:
        fields[name] = msgspec.structs.replace(getattr(config, name), **fields[name])
    fields["env"] = tuple(dict.fromkeys((*config.env, *fields.get("env", ()))))
    return fields


def parse_changes(words: Mapping[str, str]) -> dict[str, Any]:
    """Return settings of a running run from their texts (`max-cost` -> `20`), as options of a resume."""
    entries = {name: entry for name, entry in list_options(RunConfig).items() if entry.option.resume}
    return {word.replace("-", "_"): _read_change(word, text, entries) for word, text in words.items()}


def _read_change(word: str, text: str, entries: Mapping[str, OptionEntry]) -> Any:
    live = [name.replace("_", "-") for name, entry in entries.items() if entry.option.live]
    entry = entries.get(word.replace("-", "_"))
    if entry is None:
        near = find_close_name(word, live)
        hint = f"did you mean `{near}`?" if near else f"a running run can change: {', '.join(live)}"
        raise BadInput(f"unknown setting: `{word[:200]}`", hint)
    if not entry.option.live:
        hint = f"`holdwater stop RUN`, then `holdwater resume RUN {entry.flag} {text[:200]}`"
        raise BadInput(f"a running run cannot change `{word}`", hint)
    if entry.option.parse is not None or entry.option.size:
        return text
    try:
        value = msgspec.convert(text, entry.kind, strict=False)
    except msgspec.ValidationError:
        value = None
    if value is None or not math.isfinite(value):
        raise BadInput(f"`{entry.flag}` must be a number: `{text[:200]}`")
    return value


def _parse(options: Mapping[str, Any], known: Mapping[str, OptionEntry | None]) -> dict[str, Any]:
    """Return the given options as fields of a `RunConfig`, and of the records in it."""
    fields: dict[str, Any] = {name: {} for name in INNER_RECORDS}
    for name, value in options.items():
        if name not in known:  # Python does not check a `TypedDict`, and a typo must not be dropped
            near = find_close_name(name, known)
            hint = f"did you mean `{near}`?" if near else f"known options: {', '.join(known)}"
            raise BadInput(f"unknown option: `{name}`", hint)
        entry = known[name]
        if value is not None and entry is not None:
            *inner, field = entry.path
            (fields[inner[0]] if inner else fields)[field] = _parse_value(value, entry)
    return fields


def _parse_value(value: Any, entry: OptionEntry) -> Any:
    if (parse := MACHINE_PARSERS.get(entry.name) or entry.option.parse) is not None:
        return parse(value)
    if entry.option.size:
        return _parse_size(value, entry.flag)
    if isinstance(entry.kind, type) and issubclass(entry.kind, StrEnum):
        return _parse_choice(entry.kind, value, entry.flag)
    return tuple(value) if get_origin(entry.kind) is tuple else value


def _parse_choice(kind: type[StrEnum], value: str, flag: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(f"`{choice}`" for choice in kind)
        raise BadInput(f"`{flag}` must be one of {choices}: `{value}`") from None


def _parse_force(chosen: bool | str | Sequence[str]) -> ForcedPhase | None:
    """Return the phase to force; `--force` without a phase (`[]`) and `force=True` mean all."""
    if isinstance(chosen, bool):
        return ForcedPhase.ALL if chosen else None
    phases = [chosen] if isinstance(chosen, str) else chosen or [ForcedPhase.ALL]
    return ForcedPhase(_parse_choice(ForcedPhase, phases[0], "--force"))


def _parse_mount(text: str) -> tuple[str, str]:
    """Parse `HERE:THERE`: a path of this machine, and its path in a sandbox."""
    here, colon, there = text.rpartition(":")
    if not colon or not here or not there.startswith("/"):
        raise BadInput(f"`--mount` must look like `tools:/opt/tools`: `{text}`")
    if not Path(here).exists():
        raise BadInput(f"`--mount`: no such file or directory: `{here}`")
    return str(Path(here).resolve()), there


def _parse_pass_env(names: Sequence[str]) -> tuple[str, ...]:
    """Check names of variables; keys of providers and of a server are refused."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise BadInput(f"invalid name for `--pass-env`: `{name}`")
        if name in list_key_variables():
            raise BadInput(f"invalid name for `--pass-env`: `{name}`", KEYS_WITHHELD)
    return tuple(dict.fromkeys(names))


def _parse_sandbox(name: str) -> str:
    find_kind(name)  # raises if there is none
    return name


def _parse_critic(said: CriticFunction | str) -> str:
    load_critic(said)  # raises if it is no critic
    return spec_of(said)


# Parsers of options that name files, code or variables of this machine.
MACHINE_PARSERS: dict[str, Callable[[Any], Any]] = {
    "critic": _parse_critic,
    "prices": lambda path: read_prices(Path(path)),
    "images": lambda path: load_recipe(Path(path)),
    "mount": lambda texts: tuple(_parse_mount(text) for text in texts),
    "env": parse_names,
    "select": lambda selection: selection.record,
    "pass_env": _parse_pass_env,
    "sandbox": _parse_sandbox,
    "sandbox_token_file": lambda path: str(Path(path).absolute()),
    "sandbox_ca": lambda path: str(Path(path).absolute()),
    "scratch": lambda path: str(Path(path).absolute()),
}


def _parse_size(value: int | str | None, flag: str) -> int | None:
    return parse_bytes(value, flag) if isinstance(value, str) else value
