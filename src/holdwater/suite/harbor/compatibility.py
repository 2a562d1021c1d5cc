"""Checks a task before it runs: unsupported features, different behaviour, and required variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...core.environment import list_required
from ...core.errors import BadInput
from ...core.records import Network
from ..jsonl import leads_out
from .records import SCHEMA, EnvironmentSection, NetworkMode, OperatingSystem, TaskToml
from .stages import TaskStage, network_mode_of, read_instruction, stages
from .task_file import HarborTask

MAIN = "main"  # the service name of the task's own container


def confine(paths: Iterable[Path], root: Path, place: str) -> None:
    """Raise BadInput if a task reads or copies files outside `root`, the suite's own directory."""
    for path in paths:
        if leads_out(path, root):
            name = os.path.relpath(path, root)
            target = os.path.realpath(path)
            raise BadInput(f"{place}: `{name}` leads out of the suite's own directory: `{target}`")


def used_paths(task: HarborTask) -> Iterator[Path]:
    """Yield every path of the task that is read or copied; a link inside a copied directory stays a link."""
    environment = Path(task.directory, "environment")
    yield from (environment, environment / "Dockerfile")
    for stage in stages(task):
        yield from (stage.instruction, stage.solution, *stage.tests)
        yield from (tests / "Dockerfile" for tests in stage.tests)
        if stage.workdir is not None:
            yield stage.workdir


def check(task: HarborTask) -> None:
    """Raise BadInput if a file of the task is missing or unreadable."""
    for stage in stages(task):
        wanted = [stage.instruction]
        if stage.puts_tests and not any((tests / "test.sh").is_file() for tests in stage.tests):
            wanted.append(stage.instruction.parent / "tests" / "test.sh")
        for path in wanted:
            if not path.is_file():
                raise BadInput(f"{task.place}: no such file beside it: `{path.relative_to(task.directory)}`")
        try:
            read_instruction(stage)
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{task.place}: `{stage.instruction.name}` cannot be read: {error}") from None


def refusal(task: HarborTask) -> str:
    """Return why the task is not supported; an empty string if it is."""
    return next((f"{task.place}: {reason}" for reason in _refusals(task)), "")


def find_open_network(task: HarborTask) -> str:
    """Return the field with which the task requests an open network; an empty string if there is none."""
    if not any(Network.OPEN in (stage.reaches, stage.verifier_reaches) for stage in stages(task)):
        return ""
    field = next(key for key, mode in _network_modes(task) if mode is NetworkMode.PUBLIC)
    return f"{task.place}: field `{field}`"


def warnings(task: HarborTask) -> Iterator[tuple[str, str]]:
    """Yield a field and a warning for each feature that is ignored or behaves differently here."""
    for key in task.unknown:
        yield key, "unknown, ignored"
    if _version(task.toml.schema_version) > _version(SCHEMA):
        yield "schema_version", f"`{task.toml.schema_version}` is newer than the supported version `{SCHEMA}`"
    if task.toml.environment.mcp_servers:
        yield "environment.mcp_servers", "not given to agents"
    if task.toml.environment.skills_dir:
        yield "environment.skills_dir", "not given to agents"
    for key, mode in _network_modes(task):
        if mode is NetworkMode.ALLOWLIST:
            yield key, "the hosts of an `allowlist` are not reachable; only the model is"


def needs(task: HarborTask) -> Iterator[tuple[str, str]]:
    """Yield the environment variables that the task requires, and the field that requires each."""
    if refusal(task):
        return
    toml = task.toml
    tables = [(key, environment.env) for key, environment in _environments(toml)]
    tables += [("verifier", toml.verifier.env), ("solution", toml.solution.env)]
    tables += [(f"steps.{n}.verifier", step.verifier.env) for n, step in enumerate(toml.steps)]
    for key, env in tables:
        for name, variable in list_required(env):
            yield variable, f"{task.place}: field `{key}.env.{name}`"


def _refusals(task: HarborTask) -> Iterator[str]:
    directory = Path(task.directory)
    if (directory / "environment" / "docker-compose.yaml").is_file():
        yield "`environment/docker-compose.yaml`: services besides the task's own container are not supported"
    for key, environment in _environments(task.toml):
        yield from _hardware_refusals(key, environment)
    found = stages(task)
    for stage in found:
        yield from _service_refusals(stage)
        if stage.agent.user != found[0].agent.user:
            yield f"field `agent.user` of step `{stage.name}`: differs from the user of the first step"
    for stage in found[:-1]:
        if stage.grader is not None:
            mode = f"field `verifier.environment_mode` of step `{stage.name}`"
            yield f"{mode}: only the last step can have a separate verifier"


def _environments(toml: TaskToml) -> Iterator[tuple[str, EnvironmentSection]]:
    yield "environment", toml.environment
    verifiers = [("verifier", toml.verifier)]
    verifiers += [(f"steps.{n}.verifier", step.verifier) for n, step in enumerate(toml.steps)]
    for key, verifier in verifiers:
        if verifier.environment is not None:
            yield f"{key}.environment", verifier.environment


def _hardware_refusals(key: str, environment: EnvironmentSection) -> Iterator[str]:
    if environment.os is not OperatingSystem.LINUX:
        yield f"field `{key}.os`: `{environment.os}` is not supported"
    if environment.gpus:
        yield f"field `{key}.gpus`: {environment.gpus} GPUs requested, but GPUs are not supported"
    if environment.tpu is not None:
        yield f"field `{key}.tpu`: not supported"


def _service_refusals(stage: TaskStage) -> Iterator[str]:
    wanted = [("verifier.collect", hook.service) for hook in stage.verifier.collect]
    wanted += [("artifacts", artifact.service or MAIN) for artifact in stage.artifacts]
    for key, service in wanted:
        if service != MAIN:
            yield f"field `{key}.service`: there is no service `{service}`, only `{MAIN}`"


def _network_modes(task: HarborTask) -> Iterator[tuple[str, NetworkMode | None]]:
    toml = task.toml
    for key, environment in _environments(toml):
        said = "network_mode" if environment.network_mode is not None else "allow_internet"
        yield f"{key}.{said}", network_mode_of(environment)
    yield "agent.network_mode", toml.agent.network_mode
    yield "verifier.network_mode", toml.verifier.network_mode
    for n, step in enumerate(toml.steps):
        yield f"steps.{n}.agent.network_mode", step.agent.network_mode
        yield f"steps.{n}.verifier.network_mode", step.verifier.network_mode


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
