"""Runs a task's stages and grades them: runs a verifier, reads its rewards, combines the rewards of steps.

`stages.py` defines a stage. The rewards of each step are stored with the attempt's artifacts. A regrade
cannot repeat the steps: the last step's verifier grades the final state of the agent's work.
"""

from __future__ import annotations

import logging
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...core.authoring import GradingSandbox
from ...core.environment import GRADING_VARIABLES, fill_templates
from ...core.errors import AgentFailed, GradeFailed, SandboxFailed
from ...core.records import Grade, Instance, LimitOverrides, Record
from ...ledger.durable_files import make_directory, write_private
from ..grading import tail
from . import artifacts
from .records import RewardStrategy
from .stages import (
    AGENT_LOGS,
    SOLUTION,
    TESTS,
    VERIFIER_LOGS,
    TaskStage,
    fits_process_sandbox,
    read_instruction,
    stages,
)
from .task_file import HarborTask

STEP = "step"  # key in an instance's data: the number of its current stage
STEPS_FILE = "steps.json"
REWARD_JSON = f"{VERIFIER_LOGS}/reward.json"
REWARD_TEXT = f"{VERIFIER_LOGS}/reward.txt"
SCRIPT = "test.sh"
KEPT_OUTPUT = "test-stdout.txt"
CLEAR_SECONDS = 60.0
ENDED_NOTE = (
    "note: processes that the agent left running were ended before the verifier ran; "
    "a task whose work is a running service needs `harbor:PATH?keep-processes=TASK`"
)
LONGEST_REASON = 1000  # characters of output quoted in a failure
PRIMARY = "reward"
LONGEST_QUOTE = 200  # characters of an invalid reward quoted in a message

Rewards = dict[str, float]

_log = logging.getLogger(__name__)


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


async def verify(task: HarborTask, stage: TaskStage, sandbox: GradingSandbox) -> tuple[Rewards, str]:
    """Return the rewards of a stage and the end of the verifier's output; raise GradeFailed if none."""
    kept = sandbox.artifacts / "steps" / stage.name if stage.name else sandbox.artifacts
    await _run_collect_hooks(task, stage, sandbox)
    taken = await artifacts.take(stage.artifacts, sandbox, kept)
    await artifacts.keep_logs(AGENT_LOGS, sandbox, kept / "agent")
    if stage.grader is None:
        ended = not task.keeps_processes and await sandbox.end_processes()
        await sandbox.set_network(stage.verifier_reaches)
        await clear(task, sandbox)
    else:
        ended = False  # a separate verifier never shares a sandbox with the agent's processes
        await sandbox.renew(stage.grader)
        await artifacts.hand_over(taken, sandbox, kept, root_user(task))
    if stage.puts_tests:
        for directory in stage.tests:
            await sandbox.put(directory, TESTS)
        await _make_runnable(TESTS, SCRIPT, sandbox, root_user(task))
    said = await _run_tests(task, stage, sandbox)
    make_directory(kept / "verifier")
    write_private(kept / "verifier" / KEPT_OUTPUT, said.encode(errors="backslashreplace"))
    await artifacts.keep_logs(VERIFIER_LOGS, sandbox, kept / "verifier")
    rewards = await _read_rewards(sandbox, tail(said, 300))
    parts = (artifacts.list_left_out(taken), ENDED_NOTE if ended else "", tail(said))
    return rewards, "\n".join(part for part in parts if part)


async def solve(task: HarborTask, stage: TaskStage, sandbox: GradingSandbox) -> None:
    """Run the task's own solution, for the oracle; no other agent ever sees it."""
    script = stage.solution / "solve.sh"
    if not script.is_file():
        raise AgentFailed(f"the task has no solution: `{script}`", kind="no-solution")
    await sandbox.put(stage.solution, SOLUTION)
    await _make_runnable(SOLUTION, script.name, sandbox, root_user(task))
    env = {"DEBIAN_FRONTEND": "noninteractive", **fill_templates(task.toml.solution.env, sandbox.variables)}
    result = await sandbox.run(f"{SOLUTION}/{script.name}", env=env)
    if not result.ok:
        reason = result.output.strip()[-LONGEST_REASON:]
        raise AgentFailed(f"the solution ended with status {result.exit_code}: {reason}", kind="exit")


async def clear(task: HarborTask, sandbox: GradingSandbox) -> None:
    """Empty the directories for tests and rewards: the agent or an earlier verifier may have used them."""
    line = "; ".join(artifacts.clearing_command(directory) for directory in (TESTS, VERIFIER_LOGS))
    result = await sandbox.run(f"set -e; {line}", timeout=CLEAR_SECONDS, user=root_user(task))
    if not result.ok:
        raise GradeFailed(
            f"`{TESTS}` and `{VERIFIER_LOGS}` cannot be emptied: {tail(result.output, 300)}", kind="clear"
        )


def root_user(task: HarborTask) -> str | None:
    """Return the user with full rights in the sandbox; None in a process sandbox, which has only one user."""
    return None if fits_process_sandbox(task) else "root"


async def _run_collect_hooks(task: HarborTask, stage: TaskStage, sandbox: GradingSandbox) -> None:
    """Run the task's collect commands before the verifier; log a failed one, as Harbor does."""
    for hook in stage.verifier.collect:
        user = str(hook.user) if hook.user is not None else _default_user(task, stage)
        try:
            result = await sandbox.run(hook.command, timeout=hook.timeout_sec, user=user)
        except SandboxFailed as error:
            _log.warning("collect failed command=%s reason=%s", hook.command, error)
            continue
        if not result.ok:
            said = tail(result.output, 300)
            _log.warning("collect failed command=%s status=%s said=%s", hook.command, result.exit_code, said)


async def _run_tests(task: HarborTask, stage: TaskStage, sandbox: GradingSandbox) -> str:
    verifier = stage.verifier
    user = str(verifier.user) if verifier.user is not None else _default_user(task, stage)
    env: Mapping[str, str] = {**GRADING_VARIABLES, **fill_templates(verifier.env, sandbox.variables)}
    result = await sandbox.run(f"{TESTS}/{SCRIPT}", env=env, timeout=verifier.timeout_sec, user=user)
    if result.timed_out:
        raise GradeFailed(f"the verifier took longer than {verifier.timeout_sec:g} s", kind="timeout")
    return result.output


def _default_user(task: HarborTask, stage: TaskStage) -> str | None:
    """Return the default user of a verifier: root if the agent has its own user in the same sandbox."""
    return root_user(task) if stage.agent.user is not None and stage.grader is None else None


async def _make_runnable(directory: str, script: str, sandbox: GradingSandbox, user: str | None) -> None:
    """Make files readable and the script executable; give them to root if the sandbox has a root user."""
    line = f"chmod -R a+rX {directory} && chmod a+rx {directory}/{script}"
    line = line if user is None else f"chown -R 0:0 {directory} && {line}"
    result = await sandbox.run(line, timeout=CLEAR_SECONDS, user=user)
    if not result.ok:
        raise GradeFailed(f"cannot prepare `{directory}`: {tail(result.output, 300)}", kind="clear")


async def _read_rewards(sandbox: GradingSandbox, said: str) -> Rewards:
    for path, parse in ((REWARD_JSON, parse_json_reward), (REWARD_TEXT, parse_text_reward)):
        try:
            content = await sandbox.read(path)
        except FileNotFoundError:
            continue
        except (SandboxFailed, OSError) as error:
            raise GradeFailed(
                f"the verifier's reward cannot be read: `{path}`: {error}", kind="reward"
            ) from error
        return parse(content, path)
    raise missing_reward((REWARD_JSON, REWARD_TEXT), said)


def parse_json_reward(content: bytes, place: str) -> Rewards:
    """Parse `reward.json`: a dict of finite numbers, which may be empty."""
    if not content.strip():
        raise _unusable_reward(place, "it is empty")
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise _unusable_reward(place, f"not JSON: {_quote(content)}") from None
    if not isinstance(found, dict):
        raise _unusable_reward(place, f"expected a dict of numbers, got {_quote(content)}")
    for name, value in found.items():
        if not isinstance(value, int | float) or not _finite(value):
            raise _unusable_reward(
                place, f"`{name[:80]}` is not a finite number: {str(value)[:LONGEST_QUOTE]}"
            )
    return {name: float(value) for name, value in found.items()}


def parse_text_reward(content: bytes, place: str) -> Rewards:
    """Parse `reward.txt`: one finite number."""
    if not content.strip():
        raise _unusable_reward(place, "it is empty")
    try:
        value = float(content)
    except ValueError:
        raise _unusable_reward(place, f"expected a number, got {_quote(content)}") from None
    if not math.isfinite(value):
        raise _unusable_reward(place, f"not a finite number: {_quote(content)}")
    return {PRIMARY: value}


def missing_reward(places: Sequence[str], said: str) -> GradeFailed:
    listed = " nor ".join(f"`{place}`" for place in places)
    return GradeFailed(
        f"the verifier left no reward, neither {listed}: {said or 'it printed nothing'}", kind="reward"
    )


def grade_of(rewards: Mapping[str, float], detail: str) -> Grade:
    """Return the grade: the score is `reward`, or the mean of all rewards. 1 passes; no rewards score 0."""
    score = rewards[PRIMARY] if PRIMARY in rewards else sum(rewards.values()) / max(1, len(rewards))
    return Grade(passed=score >= 1, score=score, detail=detail, metrics=dict(rewards))


def combine_rewards(steps: Sequence[Rewards], strategy: RewardStrategy | None) -> Rewards:
    """Combine the rewards of the verified steps: the last step's, or the mean; a missing key counts as 0."""
    if strategy is RewardStrategy.FINAL:
        return steps[-1]
    names = dict.fromkeys(name for rewards in steps for name in rewards)
    return {name: sum(rewards.get(name, 0.0) for rewards in steps) / len(steps) for name in names}


def short_of(rewards: Rewards, least: Mapping[str, float]) -> bool:
    """Return whether a reward is below the minimum for the next step; a missing one is always below."""
    return any(rewards.get(name, -math.inf) < threshold for name, threshold in least.items())


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _unusable_reward(place: str, problem: str) -> GradeFailed:
    return GradeFailed(f"the verifier's reward cannot be used: `{place}`: {problem}", kind="reward")


def _quote(content: bytes) -> str:
    return repr(content[:LONGEST_QUOTE].decode(errors="replace"))
