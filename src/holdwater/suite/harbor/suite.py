"""A directory or a tree of Harbor tasks as a suite. What a task means is in `stages.py`."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...core.authoring import Defaults, GradingSandbox, Need, Suite
from ...core.errors import BadInput
from ...core.records import Ask, Grade, Health, Instance, MiB
from . import grading, steps, supported
from .reading import NAME, BadTask, Task, read
from .stages import Stage, furnished, instruction, processes, stages, start
from .tree import digest, find, holding

TASK = "task"  # in an instance's data: the directory of its task
DIGEST = "digest"  # ... and what its files are known by
KEEPS = "keeps_processes"  # ... and whether what the agent started runs on while a verifier judges
OPTION = "?keep-processes="
MARGIN = 300.0  # seconds beside what a task allows: for copying, and for starting sandboxes

_log = logging.getLogger(__name__)


def harbor(path: Path | str) -> Suite:
    """The tasks at or below `path`. Their number is known once `check` has run.

    `PATH?keep-processes=PATTERN,...`: what the agents of these tasks started runs on while they are judged.
    """
    place, option, patterns = str(path).partition(OPTION)
    keeps = tuple(pattern for pattern in patterns.split(",") if pattern)
    if ("?" in place and not Path(place).is_dir()) or (option and not keeps):
        raise BadInput(f"invalid option of a Harbor suite: `{path}`", f"`harbor:PATH{OPTION}PATTERN,...`")
    root = Path(place).absolute()
    if not root.is_dir():
        raise BadInput(f"no such directory: `{root}`")
    told: set[str] = set()  # bound: the fields that the tasks have

    def instances() -> Iterator[Instance]:
        for task in _tasks(root):
            if isinstance(task, BadTask):
                yield _refused(task, root)
                continue
            for field, what in supported.warnings(task):
                if field not in told:
                    told.add(field)
                    _log.warning("%s: field `%s`: %s; it is not named again", task.place, field, what)
            yield _instance(task, root, keeps)

    def check() -> None:
        msgspec.structs.force_setattr(suite, "size", _check(root))

    inside = holding(root)
    suite = Suite(
        name=root.name or "harbor",
        instances=instances,
        grade=_grade,
        fresh=False,  # `grading.py` ends what runs, or begins anew where the verifier is separate
        step=_step,
        solve=_solve,
        check=check,
        needs=lambda: (
            Need(_name(task, root), variable, place)
            for task in _tasks(root)
            if isinstance(task, Task)
            for variable, place in supported.needs(task)
        ),
        hidden=(str(inside),) if inside else (),
        defaults=Defaults(sandbox=_suggested(root)),
        description=f"the Harbor tasks in `{root.name}`",
    )
    return suite


def _tasks(root: Path) -> Iterator[Task | BadTask]:
    for directory in find(root):
        place = str(Path(root.name) / directory.relative_to(root) / NAME)
        try:
            supported.confine([directory / NAME], root, place)
            task = read(directory, place)
            supported.confine(supported.used_paths(task), root, place)
            supported.check(task)
        except BadInput as error:
            yield BadTask(directory=str(directory), place=place, reason=error.message)
        else:
            yield task


def _check(root: Path) -> int:
    """Name each bad task; some are valid and no id is there twice. How many tasks there are."""
    seen: dict[str, str] = {}  # bound: a name for each task, while this runs
    bad: list[str] = []  # bound: the same
    for task in _tasks(root):
        if isinstance(task, BadTask):
            bad.append(task.reason)
        name = _name(task, root)
        if name in seen:
            raise BadInput(f"duplicate id `{name}`: {seen[name]} and {task.place}")
        seen[name] = task.place
    if not seen:
        raise BadInput(f"no `{NAME}` in or below `{root}`", "a Harbor task is a directory with that file")
    if len(bad) == len(seen):
        raise BadInput(bad[0])
    for reason in bad:
        _log.warning("%s; the task is not tried", reason)
    return len(seen)


def _name(task: Task | BadTask, root: Path) -> str:
    if isinstance(task, Task) and task.toml.task is not None:
        return task.toml.task.name
    directory = Path(task.directory)
    return str(directory.relative_to(root)) if directory != root else root.name


def _refused(task: BadTask, root: Path) -> Instance:
    """An instance that fails with the reason, so that its task is counted and named."""
    return Instance(id=_name(task, root), instruction="", data={TASK: task.directory}, refused=task.reason)


def _suggested(root: Path) -> str | None:
    """Containers, where the first task needs one."""
    try:
        first = next((task for task in _tasks(root) if isinstance(task, Task)), None)
    except BadInput:
        return None
    return "docker" if first is not None and not processes(first) else None


def _instance(task: Task, root: Path, keeps: tuple[str, ...]) -> Instance:
    planned = stages(task)
    source = furnished(task)
    try:
        data: dict[str, Any] = {TASK: task.directory, DIGEST: digest(Path(task.directory))}
        if any(fnmatch.fnmatchcase(_name(task, root), pattern) for pattern in keeps):
            data[KEEPS] = True
        asked = instruction(planned[0])
        if refused := supported.refusal(task):
            return Instance(id=_name(task, root), instruction=asked, data=data, refused=refused)
        return Instance(
            id=_name(task, root),
            instruction=asked,
            directory=None if source is None else str(source),
            data=data,
            limits=_limits(task, planned),
            start=start(task),
            grader=planned[-1].grader,
            open_network=supported.find_open_network(task),
        )
    except (OSError, ValueError) as error:
        return _refused(BadTask(task.directory, task.place, f"{task.place}: {error}"), root)


def _limits(task: Task, planned: tuple[Stage, ...]) -> Ask:
    environment = task.toml.environment
    agents = [stage.agent.timeout_sec for stage in planned]
    acting = None if None in agents else sum(seconds for seconds in agents if seconds is not None)
    if acting is not None and len(planned) > 1:
        acting += sum(_verifying(stage) for stage in planned)
    health = _waiting(start(task).health)
    return Ask(
        setup=MARGIN + health if health else None,
        acting=acting,
        grading=max(_verifying(stage) for stage in planned),
        memory=environment.memory_mb and environment.memory_mb * MiB,
        disk=environment.storage_mb and environment.storage_mb * MiB,
        cpus=environment.cpus,
    )


def _verifying(stage: Stage) -> float:
    """Seconds that verifying a stage, and making the next one ready, can take."""
    collecting = sum(hook.timeout_sec for hook in stage.verifier.collect)
    waiting = _waiting(stage.health) + _waiting(stage.grader.health if stage.grader else None)
    return stage.verifier.timeout_sec + collecting + waiting + MARGIN


def _waiting(health: Health | None) -> float:
    return health.start_period + health.retries * (health.timeout + health.interval) if health else 0.0


def _of(instance: Instance) -> Task:
    """The task as it is now: a worker knows it by its directory alone."""
    directory = Path(instance.data[TASK])
    task = read(directory, str(directory / NAME))
    return msgspec.structs.replace(task, keeps_processes=instance.data.get(KEEPS, False))


async def _step(instance: Instance, sandbox: GradingSandbox, answer: Any, number: int) -> Instance | None:
    return await steps.next_step(_of(instance), instance, sandbox, number)


async def _solve(instance: Instance, sandbox: GradingSandbox) -> None:
    task = _of(instance)
    await grading.solve(task, stages(task)[instance.data.get(steps.STEP, 0)], sandbox)


async def _grade(instance: Instance, sandbox: GradingSandbox, answer: Any) -> Grade:
    return await steps.grade(_of(instance), sandbox)
