"""Runs one stage in its sandbox: runs the verifier and reads its rewards, or runs the oracle's solution.

`stages.py` defines a stage. `steps.py` chooses the next stage and combines the rewards into a grade.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...core.authoring import GradingSandbox
from ...core.environment import GRADING_VARIABLES, fill_templates
from ...core.errors import AgentFailed, GradeFailed, SandboxFailed
from ...ledger.durable_files import make_directory, write_private
from ..grading import tail
from . import artifacts
from .rewards import Rewards, missing_reward, parse_json_reward, parse_text_reward
from .stages import AGENT_LOGS, SOLUTION, TESTS, VERIFIER_LOGS, TaskStage, fits_process_sandbox
from .task_file import HarborTask

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

_log = logging.getLogger(__name__)


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
