"""What of a task cannot be done here, what is done otherwise, and what must be there: said beforehand."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...core.errors import BadInput
from ...core.records import Network
from ...core.variables import asked
from ..confinement import leads_out
from .reading import Task
from .records import SCHEMA, Environment, NetworkMode, System, Toml
from .stages import Stage, instruction, mode_of, stages

MAIN = "main"  # the service that a task's own container is


def confine(paths: Iterable[Path], root: Path, place: str) -> None:
    """Refuse a task that reads or copies what lies outside of `root`, the suite's own directory."""
    for path in paths:
        if leads_out(path, root):
            name = os.path.relpath(path, root)
            target = os.path.realpath(path)
            raise BadInput(f"{place}: `{name}` leads out of the suite's own directory: `{target}`")


def used_paths(task: Task) -> Iterator[Path]:
    """All that is read of the task on this machine, or copied: a link inside a copied directory stays one."""
    environment = Path(task.directory, "environment")
    yield from (environment, environment / "Dockerfile")
    for stage in stages(task):
        yield from (stage.instruction, stage.solution, *stage.tests)
        yield from (tests / "Dockerfile" for tests in stage.tests)
        if stage.workdir is not None:
            yield stage.workdir


def check(task: Task) -> None:
    """Refuse a task of which a part is missing."""
    for stage in stages(task):
        wanted = [stage.instruction]
        if stage.puts_tests and not any((tests / "test.sh").is_file() for tests in stage.tests):
            wanted.append(stage.instruction.parent / "tests" / "test.sh")
        for path in wanted:
            if not path.is_file():
                raise BadInput(f"{task.place}: no such file beside it: `{path.relative_to(task.directory)}`")
        try:
            instruction(stage)
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{task.place}: `{stage.instruction.name}` cannot be read: {error}") from None


def refusal(task: Task) -> str:
    """Why the task cannot be tried here; empty: it can."""
    return next((f"{task.place}: {reason}" for reason in _refusals(task)), "")


def find_open_network(task: Task) -> str:
    """The field by which the task asks for an open network; empty: there is none."""
    if not any(Network.OPEN in (stage.reaches, stage.verifier_reaches) for stage in stages(task)):
        return ""
    field = next(key for key, mode in _modes(task) if mode is NetworkMode.PUBLIC)
    return f"{task.place}: field `{field}`"


def warnings(task: Task) -> Iterator[tuple[str, str]]:
    """What of the task has another effect here than its author may think: a field, and what of it."""
    for key in task.unknown:
        yield key, "unknown, and passed over"
    if _version(task.toml.schema_version) > _version(SCHEMA):
        yield "schema_version", f"`{task.toml.schema_version}` is newer than what is known, `{SCHEMA}`"
    if task.toml.environment.mcp_servers:
        yield "environment.mcp_servers", "not given to agents"
    if task.toml.environment.skills_dir:
        yield "environment.skills_dir", "not given to agents"
    for key, mode in _modes(task):
        if mode is NetworkMode.ALLOWLIST:
            yield key, "hosts of an `allowlist` cannot be reached: only the model can"


def needs(task: Task) -> Iterator[tuple[str, str]]:
    """The variables that must be set for it, and where it says so."""
    if refusal(task):
        return
    toml = task.toml
    tables = [(key, environment.env) for key, environment in _environments(toml)]
    tables += [("verifier", toml.verifier.env), ("solution", toml.solution.env)]
    tables += [(f"steps.{n}.verifier", step.verifier.env) for n, step in enumerate(toml.steps)]
    for key, env in tables:
        for name, variable in asked(env):
            yield variable, f"{task.place}: field `{key}.env.{name}`"


def _refusals(task: Task) -> Iterator[str]:
    directory = Path(task.directory)
    if (directory / "environment" / "docker-compose.yaml").is_file():
        yield "`environment/docker-compose.yaml`: services beside the task's own container are not supported"
    for key, environment in _environments(task.toml):
        yield from _machines(key, environment)
    found = stages(task)
    for stage in found:
        yield from _services(stage)
        if stage.agent.user != found[0].agent.user:
            yield f"field `agent.user` of step `{stage.name}`: another user than that of the first step"
    for stage in found[:-1]:
        if stage.grader is not None:
            mode = f"field `verifier.environment_mode` of step `{stage.name}`"
            yield f"{mode}: only the last step's can be separate"


def _environments(toml: Toml) -> Iterator[tuple[str, Environment]]:
    yield "environment", toml.environment
    verifiers = [("verifier", toml.verifier)]
    verifiers += [(f"steps.{n}.verifier", step.verifier) for n, step in enumerate(toml.steps)]
    for key, verifier in verifiers:
        if verifier.environment is not None:
            yield f"{key}.environment", verifier.environment


def _machines(key: str, environment: Environment) -> Iterator[str]:
    if environment.os is not System.LINUX:
        yield f"field `{key}.os`: `{environment.os}` is not supported"
    if environment.gpus:
        yield f"field `{key}.gpus`: {environment.gpus} GPUs are asked for, and none are given"
    if environment.tpu is not None:
        yield f"field `{key}.tpu`: not supported"


def _services(stage: Stage) -> Iterator[str]:
    wanted = [("verifier.collect", hook.service) for hook in stage.verifier.collect]
    wanted += [("artifacts", artifact.service or MAIN) for artifact in stage.artifacts]
    for key, service in wanted:
        if service != MAIN:
            yield f"field `{key}.service`: there is no service `{service}`, only `{MAIN}`"


def _modes(task: Task) -> Iterator[tuple[str, NetworkMode | None]]:
    toml = task.toml
    for key, environment in _environments(toml):
        said = "network_mode" if environment.network_mode is not None else "allow_internet"
        yield f"{key}.{said}", mode_of(environment)
    yield "agent.network_mode", toml.agent.network_mode
    yield "verifier.network_mode", toml.verifier.network_mode
    for n, step in enumerate(toml.steps):
        yield f"steps.{n}.agent.network_mode", step.agent.network_mode
        yield f"steps.{n}.verifier.network_mode", step.verifier.network_mode


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())
