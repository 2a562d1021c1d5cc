"""What follows from a task: the stages in which the agent acts and is verified, and where.

A task without steps is one stage. Looks at which files are there, and starts nothing: `grading.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...core.records import Health, Network, Record, Start
from .reading import Task
from .records import Agent, Artifact, Environment, Healthcheck, Mode, NetworkMode, Step, Verifier

AGENT_LOGS = "/logs/agent"
VERIFIER_LOGS = "/logs/verifier"
PUBLISHED = "/logs/artifacts"  # what lies here is an artifact, declared or not
TESTS = "/tests"
SOLUTION = "/solution"
PROCESSES = "holdwater_processes"  # in `[metadata]`: the task needs nothing of its image


class Stage(Record, frozen=True):
    """The agent acts once and is verified."""

    name: str  # the step's; empty: the task has none
    instruction: Path
    agent: Agent  # the step's own, with the task's where it says nothing
    verifier: Verifier  # the same
    reaches: Network | None  # the agent; None: what the run says
    verifier_reaches: Network | None  # the same
    artifacts: tuple[Artifact, ...]
    tests: tuple[Path, ...]  # directories, of which later ones come on top
    solution: Path
    grader: Start | None = None  # what a separate verifier begins from
    bundled: bool = False  # ... and whether its image has the tests
    workdir: Path | None = None  # put into the working directory first
    health: Health | None = None
    least: dict[str, float] = msgspec.field(default_factory=dict)  # below this no further step is taken

    @property
    def puts_tests(self) -> bool:
        """Whether the tests come from this machine: an image's own are not there in a process sandbox."""
        return not self.bundled or (self.grader is not None and self.grader.processes)


def stages(task: Task) -> tuple[Stage, ...]:
    """The stages of a task, in their order."""
    steps = task.toml.steps
    return tuple(_stage(task, step) for step in steps) if steps else (_stage(task, None),)


def start(task: Task) -> Start:
    """What the agent's sandbox starts from. It reaches what the agent of the first stage may."""
    first = stages(task)[0]
    directory = Path(task.directory, "environment")
    return _start(task, task.toml.environment, directory, _user(first.agent.user), first.reaches)


def instruction(stage: Stage) -> str:
    """What the agent is asked, without the lines at its beginning that mark it as test data."""
    lines = stage.instruction.read_text(encoding="utf-8").split("\n")
    while lines and (not lines[0].strip() or _marks(lines[0].strip())):
        del lines[0]
    return "\n".join(lines)


def furnished(task: Task) -> Path | None:
    """A directory whose files are put into the working directory: of a task that has no image."""
    directory = Path(task.directory, "environment")
    return directory if directory.is_dir() and not _has_image(task) else None


def processes(task: Task) -> bool:
    """Whether a process sandbox will do: there is no image, or the task says so; and there is one user."""
    verifiers = [task.toml.verifier, *(step.verifier for step in task.toml.steps)]
    users = [verifier.user for verifier in verifiers]
    users += [hook.user for verifier in verifiers for hook in verifier.collect]
    if any(user is not None for user in users):
        return False
    return not _has_image(task) or task.toml.metadata.get(PROCESSES) is True


def _stage(task: Task, step: Step | None) -> Stage:
    own = Path(task.directory, "steps", step.name) if step else Path(task.directory)
    agent = _agent(task, step)
    verifier = _verifier(task, step)
    environment, directory, bundled = _separate(task, step, own)
    grader = None
    reaches = _verifier_network(verifier, environment or task.toml.environment)
    if environment is not None:
        grader = _start(task, environment, directory, _user(verifier.user), reaches)
    shared = Path(task.directory, "tests")
    solution = own / "solution"
    return Stage(
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
        least=_least(step),
    )


def _agent(task: Task, step: Step | None) -> Agent:
    of_task = task.toml.agent
    if step is None:
        return of_task
    own, mode = step.agent, step.agent.network_mode
    return Agent(
        timeout_sec=of_task.timeout_sec if own.timeout_sec is None else own.timeout_sec,
        user=of_task.user if own.user is None else own.user,
        network_mode=of_task.network_mode if mode is None else mode,
    )


def _verifier(task: Task, step: Step | None) -> Verifier:
    of_task = task.toml.verifier
    if step is None:
        return of_task
    own, mode = step.verifier, step.verifier.network_mode
    return Verifier(
        timeout_sec=own.timeout_sec,  # as in Harbor, where a step always has one of its own
        env={**of_task.env, **own.env},
        user=of_task.user if own.user is None else own.user,
        network_mode=of_task.network_mode if mode is None else mode,
        collect=of_task.collect + own.collect,
    )


def _separate(task: Task, step: Step | None, own: Path) -> tuple[Environment | None, Path, bool]:
    """A separate verifier's environment, where its Dockerfile is, and whether its image has the tests."""
    levels = [(step.verifier, own / "tests")] if step else []
    levels.append((task.toml.verifier, Path(task.directory, "tests")))
    mode = next((m for verifier, _ in levels if (m := _mode(verifier)) is not None), Mode.SHARED)
    agents = Path(task.directory, "environment")
    if mode is Mode.SHARED:
        return None, agents, False
    given = next((v.environment for v, _ in levels if v.environment is not None), task.toml.environment)
    for verifier, directory in levels:
        image = verifier.environment.docker_image if verifier.environment else None
        if image is not None or (directory / "Dockerfile").is_file():
            return _with_image(given, image), directory, True
    return _with_image(given, task.toml.environment.docker_image), agents, False


def _mode(verifier: Verifier) -> Mode | None:
    return verifier.environment_mode or (Mode.SEPARATE if verifier.environment is not None else None)


def _with_image(environment: Environment, image: str | None) -> Environment:
    fields = {name: getattr(environment, name) for name in environment.__struct_fields__}
    return Environment(**{**fields, "docker_image": image})


def _start(
    task: Task, environment: Environment, directory: Path, user: str | None, network: Network | None
) -> Start:
    image = environment.docker_image
    builds = image is None and (directory / "Dockerfile").is_file()
    fits = processes(task)
    own = (AGENT_LOGS, VERIFIER_LOGS, PUBLISHED)
    return Start(
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


def _has_image(task: Task) -> bool:
    directory = Path(task.directory, "environment")
    return task.toml.environment.docker_image is not None or (directory / "Dockerfile").is_file()


def _user(user: str | int | None) -> str | None:
    return None if user is None else str(user)


def _health(check: Healthcheck | None) -> Health | None:
    if check is None:
        return None
    return Health(
        command=check.command,
        interval=check.interval_sec,
        timeout=check.timeout_sec,
        start_period=check.start_period_sec,
        retries=check.retries,
    )


def mode_of(environment: Environment) -> NetworkMode | None:
    """What an environment says of its network, in whichever words; None: nothing."""
    if environment.network_mode is not None or environment.allow_internet is None:
        return environment.network_mode
    return NetworkMode.PUBLIC if environment.allow_internet else NetworkMode.NO_NETWORK


def _agent_network(agent: Agent, environment: Environment) -> Network | None:
    """An agent's model is behind the gateway: it reaches that in every mode."""
    mode = agent.network_mode or mode_of(environment)
    if mode is None:
        return None
    return Network.OPEN if mode is NetworkMode.PUBLIC else Network.GATEWAY


def _verifier_network(verifier: Verifier, environment: Environment) -> Network | None:
    mode = verifier.network_mode or mode_of(environment)
    if mode is None:
        return None
    return {NetworkMode.PUBLIC: Network.OPEN, NetworkMode.NO_NETWORK: Network.NONE}.get(mode, Network.GATEWAY)


def _artifacts(task: Task, step: Step | None) -> Iterator[Artifact]:
    declared = [*task.toml.artifacts, *(step.artifacts if step else ())]
    found = [Artifact(source=entry) if isinstance(entry, str) else entry for entry in declared]
    if not any(artifact.source.rstrip("/") == PUBLISHED for artifact in found):
        yield Artifact(source=PUBLISHED)
    yield from found


def _least(step: Step | None) -> dict[str, float]:
    least = step.min_reward if step else None
    if least is None:
        return {}
    return least if isinstance(least, dict) else {"reward": float(least)}


def _marks(line: str) -> bool:
    return line.startswith(("#", "<!--")) and "canary" in line.lower()
