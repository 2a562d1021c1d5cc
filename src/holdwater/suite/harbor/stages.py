"""Derives the stages of a task: the agent acts once in each and is verified, in a shared or separate sandbox.

A task without steps has one stage. This module checks which files exist but starts nothing: `grading.py`
does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...core.records import Health, Network, Record, SandboxSpec
from .records import (
    AgentSection,
    ArtifactSection,
    EnvironmentSection,
    HealthcheckSection,
    NetworkMode,
    StepSection,
    VerifierMode,
    VerifierSection,
)
from .task_file import HarborTask

AGENT_LOGS = "/logs/agent"
VERIFIER_LOGS = "/logs/verifier"
PUBLISHED = "/logs/artifacts"  # files here are artifacts, declared or not
TESTS = "/tests"
SOLUTION = "/solution"
PROCESSES = "holdwater_processes"  # key in `[metadata]`: the task needs no files of its image


class TaskStage(Record, frozen=True):
    """One stage: the agent acts once and is verified."""

    name: str  # the step's name; empty if the task has no steps
    instruction: Path
    agent: AgentSection  # the step's settings, with the task's as defaults
    verifier: VerifierSection  # likewise
    reaches: Network | None  # the agent's network; None: the run's setting applies
    verifier_reaches: Network | None  # the verifier's network, likewise
    artifacts: tuple[ArtifactSection, ...]
    tests: tuple[Path, ...]  # directories; files of later ones replace those of earlier ones
    solution: Path
    grader: SandboxSpec | None = None  # the sandbox of a separate verifier; None if shared
    bundled: bool = False  # whether the image of a separate verifier contains the tests
    workdir: Path | None = None  # copied into the working directory first
    health: Health | None = None
    least: dict[str, float] = msgspec.field(default_factory=dict)  # minimum rewards for the next step

    @property
    def puts_tests(self) -> bool:
        """Whether to copy the tests from this machine; a process sandbox lacks those in an image."""
        return not self.bundled or (self.grader is not None and self.grader.processes)


def stages(task: HarborTask) -> tuple[TaskStage, ...]:
    """Return the stages of a task, in order."""
    steps = task.toml.steps
    return tuple(_stage(task, step) for step in steps) if steps else (_stage(task, None),)


def make_agent_spec(task: HarborTask) -> SandboxSpec:
    """Return the spec of the agent's sandbox, with the network of the first stage's agent."""
    first = stages(task)[0]
    directory = Path(task.directory, "environment")
    return _make_spec(task, task.toml.environment, directory, _user(first.agent.user), first.reaches)


def read_instruction(stage: TaskStage) -> str:
    """Return the agent's instruction without the leading canary lines that mark it as test data."""
    lines = stage.instruction.read_text(encoding="utf-8").split("\n")
    while lines and (not lines[0].strip() or _is_canary(lines[0].strip())):
        del lines[0]
    return "\n".join(lines)


def find_workdir_files(task: HarborTask) -> Path | None:
    """Return the directory whose files go into the working directory, if the task has no image."""
    directory = Path(task.directory, "environment")
    return directory if directory.is_dir() and not _has_image(task) else None


def fits_process_sandbox(task: HarborTask) -> bool:
    """Return whether a process sandbox suffices: no image, or the task opts in; and only one user."""
    verifiers = [task.toml.verifier, *(step.verifier for step in task.toml.steps)]
    users = [verifier.user for verifier in verifiers]
    users += [hook.user for verifier in verifiers for hook in verifier.collect]
    if any(user is not None for user in users):
        return False
    return not _has_image(task) or task.toml.metadata.get(PROCESSES) is True


def _stage(task: HarborTask, step: StepSection | None) -> TaskStage:
    own = Path(task.directory, "steps", step.name) if step else Path(task.directory)
    agent = _agent(task, step)
    verifier = _verifier(task, step)
    environment, directory, bundled = _separate_verifier(task, step, own)
    grader = None
    reaches = _verifier_network(verifier, environment or task.toml.environment)
    if environment is not None:
        grader = _make_spec(task, environment, directory, _user(verifier.user), reaches)
    shared = Path(task.directory, "tests")
    solution = own / "solution"
    return TaskStage(
        name=step.name if step else "",
        instruction=own / "instruction.md",
        agent=agent,
        verifier=verifier,
        reaches=_agent_network(agent, task.toml.environment),
        verifier_reaches=reaches,
        artifacts=tuple(_artifacts(task, step)),
        tests=tuple(path for path in dict.fromkeys((shared, own / "tests")) if path.is_dir()),
        solution=solution if solution.is_dir() else Path(task.directory, "solution"),
        grader=grader,
        bundled=bundled,
        workdir=own / "workdir" if step and (own / "workdir").is_dir() else None,
        health=_health(step.healthcheck) if step else None,
        least=_required_rewards(step),
    )


def _agent(task: HarborTask, step: StepSection | None) -> AgentSection:
    of_task = task.toml.agent
    if step is None:
        return of_task
    own, mode = step.agent, step.agent.network_mode
    return AgentSection(
        timeout_sec=of_task.timeout_sec if own.timeout_sec is None else own.timeout_sec,
        user=of_task.user if own.user is None else own.user,
        network_mode=of_task.network_mode if mode is None else mode,
    )


def _verifier(task: HarborTask, step: StepSection | None) -> VerifierSection:
    of_task = task.toml.verifier
    if step is None:
        return of_task
    own, mode = step.verifier, step.verifier.network_mode
    return VerifierSection(
        timeout_sec=own.timeout_sec,  # as in Harbor, where a step always has its own timeout
        env={**of_task.env, **own.env},
        user=of_task.user if own.user is None else own.user,
        network_mode=of_task.network_mode if mode is None else mode,
        collect=of_task.collect + own.collect,
    )


def _separate_verifier(
    task: HarborTask, step: StepSection | None, own: Path
) -> tuple[EnvironmentSection | None, Path, bool]:
    """Return a separate verifier's environment, its build directory, and whether its image has tests."""
    levels = [(step.verifier, own / "tests")] if step else []
    levels.append((task.toml.verifier, Path(task.directory, "tests")))
    mode = next(
        (m for verifier, _ in levels if (m := _verifier_mode(verifier)) is not None), VerifierMode.SHARED
    )
    agents = Path(task.directory, "environment")
    if mode is VerifierMode.SHARED:
        return None, agents, False
    given = next((v.environment for v, _ in levels if v.environment is not None), task.toml.environment)
    for verifier, directory in levels:
        image = verifier.environment.docker_image if verifier.environment else None
        if image is not None or (directory / "Dockerfile").is_file():
            return msgspec.structs.replace(given, docker_image=image), directory, True
    image = task.toml.environment.docker_image
    return msgspec.structs.replace(given, docker_image=image), agents, False


def _verifier_mode(verifier: VerifierSection) -> VerifierMode | None:
    return verifier.environment_mode or (VerifierMode.SEPARATE if verifier.environment is not None else None)


def _make_spec(
    task: HarborTask,
    environment: EnvironmentSection,
    directory: Path,
    user: str | None,
    network: Network | None,
) -> SandboxSpec:
    image = environment.docker_image
    builds = image is None and (directory / "Dockerfile").is_file()
    fits = fits_process_sandbox(task)
    own = (AGENT_LOGS, VERIFIER_LOGS, PUBLISHED)
    return SandboxSpec(
        image=image,
        build=str(directory) if builds else None,
        build_timeout=environment.build_timeout_sec,
        workdir=environment.workdir,
        user=user,
        env=environment.env,
        directories=(*own, TESTS, SOLUTION) if fits else own,
        network=network,
        health=_health(environment.healthcheck),
        processes=fits,
    )


def _has_image(task: HarborTask) -> bool:
    directory = Path(task.directory, "environment")
    return task.toml.environment.docker_image is not None or (directory / "Dockerfile").is_file()


def _user(user: str | int | None) -> str | None:
    return None if user is None else str(user)


def _health(check: HealthcheckSection | None) -> Health | None:
    if check is None:
        return None
    return Health(
        command=check.command,
        interval=check.interval_sec,
        timeout=check.timeout_sec,
        start_period=check.start_period_sec,
        retries=check.retries,
    )


def network_mode_of(environment: EnvironmentSection) -> NetworkMode | None:
    """Return an environment's network mode, from either of its fields; None if neither is set."""
    if environment.network_mode is not None or environment.allow_internet is None:
        return environment.network_mode
    return NetworkMode.PUBLIC if environment.allow_internet else NetworkMode.NO_NETWORK


def _agent_network(agent: AgentSection, environment: EnvironmentSection) -> Network | None:
    """Return the agent's network; every mode includes the gateway, because the model is behind it."""
    mode = agent.network_mode or network_mode_of(environment)
    if mode is None:
        return None
    return Network.OPEN if mode is NetworkMode.PUBLIC else Network.GATEWAY


def _verifier_network(verifier: VerifierSection, environment: EnvironmentSection) -> Network | None:
    mode = verifier.network_mode or network_mode_of(environment)
    if mode is None:
        return None
    return {NetworkMode.PUBLIC: Network.OPEN, NetworkMode.NO_NETWORK: Network.NONE}.get(mode, Network.GATEWAY)


def _artifacts(task: HarborTask, step: StepSection | None) -> Iterator[ArtifactSection]:
    declared = [*task.toml.artifacts, *(step.artifacts if step else ())]
    found = [ArtifactSection(source=entry) if isinstance(entry, str) else entry for entry in declared]
    if not any(artifact.source.rstrip("/") == PUBLISHED for artifact in found):
        yield ArtifactSection(source=PUBLISHED)
    yield from found


def _required_rewards(step: StepSection | None) -> dict[str, float]:
    least = step.min_reward if step else None
    if least is None:
        return {}
    return least if isinstance(least, dict) else {"reward": float(least)}


def _is_canary(line: str) -> bool:
    return line.startswith(("#", "<!--")) and "canary" in line.lower()
