"""A task's steps and its grade. What the steps were rewarded with lies with the attempt's artifacts.

A regrade has no steps to go through again: the last one's verifier judges what the agent left in the end.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from ...core.authoring import GradingSandbox
from ...core.errors import SandboxFailed
from ...core.records import Ask, Grade, Instance, Record
from ...ledger.private import make_directory, write_private
from ..grading import tail
from .grading import clear, verify
from .reading import Task
from .rewards import Rewards, combined, grade_of, short_of
from .stages import Stage, instruction, stages

STEP = "step"  # in the data of an instance: which stage it is at
FILE = "steps.json"


class Done(Record, frozen=True, omit_defaults=False):
    """A step that was begun; its rewards, once it was verified."""

    step: str
    rewards: Rewards | None = None


async def next_step(task: Task, instance: Instance, sandbox: GradingSandbox, number: int) -> Instance | None:
    """The instance for step `number`, its sandbox ready. None after the last, or after too low a reward."""
    planned, done = stages(task), _done(sandbox)
    if number == len(planned):
        return None
    if not task.toml.steps:
        return _at_stage(instance, planned[0], number)
    if number:
        before = planned[number - 1]
        rewards, _ = await verify(task, before, sandbox)
        done[-1] = Done(before.name, rewards)
        _remember(sandbox, done)
        if short_of(rewards, before.least):
            return None
        await clear(task, sandbox)
    stage = planned[number]
    _remember(sandbox, [*done, Done(stage.name)])
    await sandbox.reach(stage.reaches)
    await _set_up(stage, sandbox)
    return _at_stage(instance, stage, number)


async def grade(task: Task, sandbox: GradingSandbox) -> Grade:
    """The grade of a task; the stage in which the agent's time ended is verified first."""
    planned, done = stages(task), _done(sandbox)
    if not task.toml.steps:
        return grade_of(*await verify(task, planned[0], sandbox))
    if not done:
        rewards, said = await verify(task, planned[-1], sandbox)
        return grade_of(rewards, f"only the last step was graded, on what was left\n{said}")
    said = ""
    if done[-1].rewards is None:
        rewards, said = await verify(task, planned[len(done) - 1], sandbox)
        done[-1] = Done(done[-1].step, rewards)
        _remember(sandbox, done)
    found = [one.rewards for one in done if one.rewards is not None]
    lines = [f"{one.step}: {msgspec.json.encode(one.rewards).decode()}" for one in done]
    if not short_of(found[-1], planned[len(done) - 1].least):  # else no further step was due
        for stage in planned[len(done) :]:
            found.append(dict.fromkeys(found[0], 0.0))
            lines.append(f"{stage.name}: the agent did not come to it")
    return grade_of(combined(found, task.toml.multi_step_reward_strategy), "\n".join([*lines, said]).strip())


def _at_stage(instance: Instance, stage: Stage, number: int) -> Instance:
    start = msgspec.structs.replace(instance.start, network=stage.reaches, health=stage.health)
    return msgspec.structs.replace(
        instance,
        instruction=instruction(stage),
        start=start,
        limits=Ask(acting=stage.agent.timeout_sec),
        data={**instance.data, STEP: number},
    )


async def _set_up(stage: Stage, sandbox: GradingSandbox) -> None:
    if stage.workdir is None:
        return
    await sandbox.put(stage.workdir, sandbox.workdir)
    if (stage.workdir / "setup.sh").is_file():
        result = await sandbox.run(f"bash {shlex.quote(str(Path(sandbox.workdir, 'setup.sh')))}")
        if not result.ok:
            said = tail(result.output, 500)
            message = f"`setup.sh` of step `{stage.name}` ended with status {result.exit_code}: {said}"
            raise SandboxFailed(message, kind="setup")


def _done(sandbox: GradingSandbox) -> list[Done]:
    try:
        return msgspec.json.decode((sandbox.artifacts / FILE).read_bytes(), type=list[Done])
    except FileNotFoundError:
        return []


def _remember(sandbox: GradingSandbox, done: list[Done]) -> None:
    make_directory(sandbox.artifacts)
    write_private(sandbox.artifacts / FILE, msgspec.json.encode(done))
