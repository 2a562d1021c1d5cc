"""Runs a task's steps and combines their rewards into a grade.

The rewards of each step are stored with the attempt's artifacts. A regrade cannot repeat the steps: the last
step's verifier grades the final state of the agent's work.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from ...core.authoring import GradingSandbox
from ...core.errors import SandboxFailed
from ...core.records import Grade, Instance, LimitOverrides, Record
from ...ledger.durable_files import make_directory, write_private
from ..grading import tail
from .grading import clear, verify
from .rewards import Rewards, combine_rewards, grade_of, short_of
from .stages import TaskStage, read_instruction, stages
from .task_file import HarborTask

STEP = "step"  # key in an instance's data: the number of its current stage
STEPS_FILE = "steps.json"


class StepResult(Record, frozen=True, omit_defaults=False):
    """A started step; its rewards are set once it is verified."""

    step: str
    rewards: Rewards | None = None


async def next_step(
    task: HarborTask, instance: Instance, sandbox: GradingSandbox, number: int
) -> Instance | None:
    """Prepare the sandbox for step `number`; return its instance, or None after the last or a failed step."""
    planned, done = stages(task), _read_steps(sandbox)
    if number == len(planned):
        return None
    if not task.toml.steps:
        return _at_stage(instance, planned[0], number)
    if number:
        before = planned[number - 1]
        rewards, _ = await verify(task, before, sandbox)
        done[-1] = StepResult(before.name, rewards)
        _write_steps(sandbox, done)
        if short_of(rewards, before.least):
            return None
        await clear(task, sandbox)
    stage = planned[number]
    _write_steps(sandbox, [*done, StepResult(stage.name)])
    await sandbox.set_network(stage.reaches)
    await _set_up(stage, sandbox)
    return _at_stage(instance, stage, number)


async def grade(task: HarborTask, sandbox: GradingSandbox) -> Grade:
    """Return the grade of a task; verify first the stage in which the agent's time ended."""
    planned, done = stages(task), _read_steps(sandbox)
    if not task.toml.steps:
        return grade_of(*await verify(task, planned[0], sandbox))
    if not done:
        rewards, said = await verify(task, planned[-1], sandbox)
        return grade_of(rewards, f"only the last step was graded, on the final state\n{said}")
    said = ""
    if done[-1].rewards is None:
        rewards, said = await verify(task, planned[len(done) - 1], sandbox)
        done[-1] = StepResult(done[-1].step, rewards)
        _write_steps(sandbox, done)
    found = [one.rewards for one in done if one.rewards is not None]
    lines = [f"{one.step}: {msgspec.json.encode(one.rewards).decode()}" for one in done]
    if not short_of(found[-1], planned[len(done) - 1].least):  # otherwise no further step was due
        for stage in planned[len(done) :]:
            found.append(dict.fromkeys(found[0], 0.0))
            lines.append(f"{stage.name}: not reached by the agent")
    return grade_of(
        combine_rewards(found, task.toml.multi_step_reward_strategy), "\n".join([*lines, said]).strip()
    )


def _at_stage(instance: Instance, stage: TaskStage, number: int) -> Instance:
    start = msgspec.structs.replace(instance.start, network=stage.reaches, health=stage.health)
    return msgspec.structs.replace(
        instance,
        instruction=read_instruction(stage),
        start=start,
        limits=LimitOverrides(acting=stage.agent.timeout_sec),
        data={**instance.data, STEP: number},
    )


async def _set_up(stage: TaskStage, sandbox: GradingSandbox) -> None:
    if stage.workdir is None:
        return
    await sandbox.put(stage.workdir, sandbox.workdir)
    if (stage.workdir / "setup.sh").is_file():
        result = await sandbox.run(f"bash {shlex.quote(str(Path(sandbox.workdir, 'setup.sh')))}")
        if not result.ok:
            said = tail(result.output, 500)
            message = f"`setup.sh` of step `{stage.name}` ended with status {result.exit_code}: {said}"
            raise SandboxFailed(message, kind="setup")


def _read_steps(sandbox: GradingSandbox) -> list[StepResult]:
    try:
        return msgspec.json.decode((sandbox.artifacts / STEPS_FILE).read_bytes(), type=list[StepResult])
    except FileNotFoundError:
        return []


def _write_steps(sandbox: GradingSandbox, done: list[StepResult]) -> None:
    make_directory(sandbox.artifacts)
    write_private(sandbox.artifacts / STEPS_FILE, msgspec.json.encode(done))
