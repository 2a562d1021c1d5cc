"""Makes a suite from a directory or a tree of Harbor tasks.

`records.py` defines the format, `stages.py` derives the stages of a task, and `grading.py` runs a stage in a
sandbox.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from ...core.authoring import GradingSandbox, RequiredVariable, Suite, SuiteDefaults
from ...core.errors import BadInput
from ...core.records import Grade, Health, Instance, LimitOverrides, MiB
from . import compatibility, grading
from .stages import (
    TaskStage,
    find_workdir_files,
    fits_process_sandbox,
    make_agent_spec,
    read_instruction,
    stages,
)
from .task_file import TASK_FILE, BadTask, HarborTask, read_task

TASK = "task"  # key in an instance's data: the directory of its task
DIGEST = "digest"  # key in an instance's data: a hash of the task's files
KEEPS_PROCESSES = "keeps_processes"  # key: whether the agent's processes keep running during verification
KEEP_OPTION = "?keep-processes="
MARGIN = 300.0  # seconds added to a task's own limits, for copying files and starting sandboxes

BLOCK = 1 << 20  # bytes of a file that are hashed at once

_log = logging.getLogger(__name__)


def harbor(path: Path | str) -> Suite:
    """Return a suite of the tasks at or below `path`. Its `size` is known after `check` has run.

    With `PATH?keep-processes=PATTERN,...`, processes of the agent keep running while these tasks are
    verified.
    """
    root, keeps = _parse_path(str(path))
    warned: set[str] = set()  # bound: the number of distinct fields in the tasks

    def instances() -> Iterator[Instance]:
        for task in _tasks(root):
            if isinstance(task, BadTask):
                yield _make_refused(task, root)
                continue
            for field, what in compatibility.warnings(task):
                if field not in warned:
                    warned.add(field)
                    _log.warning(
                        "%s: field `%s`: %s; further occurrences are not reported", task.place, field, what
                    )
            yield _instance(task, root, keeps)

    def check() -> None:
        msgspec.structs.force_setattr(suite, "size", _check(root))

    inside = find_common_directory(root)
    suite = Suite(
        name=root.name or "harbor",
        instances=instances,
        grade=_grade,
        fresh=False,  # `grading.py` ends running processes, or starts a new sandbox for a separate verifier
        step=_step,
        solve=_solve,
        check=check,
        needs=lambda: (
            RequiredVariable(_name(task, root), variable, place)
            for task in _tasks(root)
            if isinstance(task, HarborTask)
            for variable, place in compatibility.needs(task)
        ),
        hidden=(str(inside),) if inside else (),
        defaults=SuiteDefaults(sandbox=_suggest_sandbox(root)),
        description=f"the Harbor tasks in `{root.name}`",
    )
    return suite


def _parse_path(path: str) -> tuple[Path, tuple[str, ...]]:
    """Return the directory, and the patterns of tasks whose processes keep running."""
    place, option, patterns = path.partition(KEEP_OPTION)
    keeps = tuple(pattern for pattern in patterns.split(",") if pattern)
    if ("?" in place and not Path(place).is_dir()) or (option and not keeps):
        raise BadInput(
            f"invalid option of a Harbor suite: `{path}`", f"`harbor:PATH{KEEP_OPTION}PATTERN,...`"
        )
    root = Path(place).absolute()
    if not root.is_dir():
        raise BadInput(f"no such directory: `{root}`")
    return root, keeps


def _tasks(root: Path) -> Iterator[HarborTask | BadTask]:
    for directory in find_tasks(root):
        place = str(Path(root.name) / directory.relative_to(root) / TASK_FILE)
        try:
            compatibility.confine([directory / TASK_FILE], root, place)
            task = read_task(directory, place)
            compatibility.confine(compatibility.used_paths(task), root, place)
            compatibility.check(task)
        except BadInput as error:
            yield BadTask(directory=str(directory), place=place, reason=error.message)
        else:
            yield task


def _check(root: Path) -> int:
    """Log each invalid task; check that one is valid and every id is unique; return the number of tasks."""
    seen: dict[str, str] = {}  # bound: one entry per task, only during this call
    bad: list[str] = []  # bound: likewise
    for task in _tasks(root):
        if isinstance(task, BadTask):
            bad.append(task.reason)
        name = _name(task, root)
        if name in seen:
            raise BadInput(f"duplicate id `{name}`: {seen[name]} and {task.place}")
        seen[name] = task.place
    if not seen:
        raise BadInput(
            f"no `{TASK_FILE}` in or below `{root}`", "a Harbor task is a directory with that file"
        )
    if len(bad) == len(seen):
        raise BadInput(bad[0])
    for reason in bad:
        _log.warning("%s; the task is skipped", reason)
    return len(seen)


def _name(task: HarborTask | BadTask, root: Path) -> str:
    if isinstance(task, HarborTask) and task.toml.task is not None:
        return task.toml.task.name
    directory = Path(task.directory)
    return str(directory.relative_to(root)) if directory != root else root.name


def _make_refused(task: BadTask, root: Path) -> Instance:
    """Return an instance that fails with the reason, so that reports count and name its task."""
    return Instance(id=_name(task, root), instruction="", data={TASK: task.directory}, refused=task.reason)


def _suggest_sandbox(root: Path) -> str | None:
    """Suggest the docker sandbox if the first task needs a container."""
    try:
        first = next((task for task in _tasks(root) if isinstance(task, HarborTask)), None)
    except BadInput:
        return None
    return "docker" if first is not None and not fits_process_sandbox(first) else None


def _instance(task: HarborTask, root: Path, keeps: tuple[str, ...]) -> Instance:
    planned = stages(task)
    source = find_workdir_files(task)
    try:
        data: dict[str, Any] = {TASK: task.directory, DIGEST: digest(Path(task.directory))}
        if any(fnmatch.fnmatchcase(_name(task, root), pattern) for pattern in keeps):
            data[KEEPS_PROCESSES] = True
        asked = read_instruction(planned[0])
        if refused := compatibility.refusal(task):
            return Instance(id=_name(task, root), instruction=asked, data=data, refused=refused)
        return Instance(
            id=_name(task, root),
            instruction=asked,
            directory=None if source is None else str(source),
            data=data,
            limits=_limits(task, planned),
            start=make_agent_spec(task),
            grader=planned[-1].grader,
            open_network=compatibility.find_open_network(task),
        )
    except (OSError, ValueError) as error:
        return _make_refused(BadTask(task.directory, task.place, f"{task.place}: {error}"), root)


def _limits(task: HarborTask, planned: tuple[TaskStage, ...]) -> LimitOverrides:
    environment = task.toml.environment
    agents = [stage.agent.timeout_sec for stage in planned]
    acting = None if None in agents else sum(seconds for seconds in agents if seconds is not None)
    if acting is not None and len(planned) > 1:
        acting += sum(_verify_seconds(stage) for stage in planned)
    health = _health_seconds(make_agent_spec(task).health)
    return LimitOverrides(
        setup=MARGIN + health if health else None,
        acting=acting,
        grading=max(_verify_seconds(stage) for stage in planned),
        memory=environment.memory_mb and environment.memory_mb * MiB,
        disk=environment.storage_mb and environment.storage_mb * MiB,
        cpus=environment.cpus,
    )


def _verify_seconds(stage: TaskStage) -> float:
    """Return the maximum seconds for verifying a stage and preparing the next one."""
    collecting = sum(hook.timeout_sec for hook in stage.verifier.collect)
    waiting = _health_seconds(stage.health) + _health_seconds(stage.grader.health if stage.grader else None)
    return stage.verifier.timeout_sec + collecting + waiting + MARGIN


def _health_seconds(health: Health | None) -> float:
    return health.start_period + health.retries * (health.timeout + health.interval) if health else 0.0


def _read_current(instance: Instance) -> HarborTask:
    """Read the task again from its directory: a worker receives only the path."""
    directory = Path(instance.data[TASK])
    task = read_task(directory, str(directory / TASK_FILE))
    return msgspec.structs.replace(task, keeps_processes=instance.data.get(KEEPS_PROCESSES, False))


async def _step(instance: Instance, sandbox: GradingSandbox, answer: Any, number: int) -> Instance | None:
    return await grading.next_step(_read_current(instance), instance, sandbox, number)


async def _solve(instance: Instance, sandbox: GradingSandbox) -> None:
    task = _read_current(instance)
    await grading.solve(task, stages(task)[instance.data.get(grading.STEP, 0)], sandbox)


async def _grade(instance: Instance, sandbox: GradingSandbox, answer: Any) -> Grade:
    return await grading.grade(_read_current(instance), sandbox)


def find_tasks(root: Path, *, last_first: bool = False) -> Iterator[Path]:
    """Yield the directories with a `task.toml` at or below `root`, sorted; links are not followed."""
    try:
        if (root / TASK_FILE).is_file():
            yield root
            return
        with os.scandir(root) as found:
            names = [e.name for e in found if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise BadInput(f"cannot read `{root}`: {error.strerror}") from None
    for name in sorted(names, reverse=last_first):
        yield from find_tasks(root / name, last_first=last_first)


def find_common_directory(root: Path) -> Path | None:
    """Return the innermost directory that contains all tasks at or below `root`; None if there are none."""
    first, last = next(find_tasks(root), None), next(find_tasks(root, last_first=True), None)
    if first is None or last is None:
        return None
    return Path(os.path.commonpath([first, last]))


def digest(task: Path) -> str:
    """Return a digest of the task's files: names, modes, contents and links."""
    hashed = blake3()
    for directory, names, files in os.walk(task):
        names.sort()
        for name in sorted([*files, *(n for n in names if Path(directory, n).is_symlink())]):
            path = Path(directory, name)
            _add_parts(hashed, os.fsencode(path.relative_to(task)))
            if path.is_symlink():
                _add_parts(hashed, b"link", os.fsencode(path.readlink()))
            elif path.is_file():
                _add_parts(hashed, b"run" if path.stat().st_mode & 0o111 else b"file", _hash_content(path))
    return hashed.hexdigest()


def _hash_content(path: Path) -> bytes:
    hashed = blake3()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hashed.update(block)
    return hashed.digest()


def _add_parts(hashed: blake3, *parts: bytes) -> None:
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)
