"""A stage in its sandbox: what the verifier is given, what it leaves, and what the oracle runs.

What a stage is says `stages.py`; which comes next, and the grade of them all, `steps.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...core.authoring import GradingSandbox
from ...core.errors import AgentFailed, GradeFailed, SandboxFailed
from ...core.variables import GRADING, filled
from ...ledger.private import make_directory, write_private
from ..grading import tail
from . import artifacts
from .reading import Task
from .rewards import Rewards, missing, of_json, of_text
from .stages import AGENT_LOGS, SOLUTION, TESTS, VERIFIER_LOGS, Stage, processes

REWARD_JSON = f"{VERIFIER_LOGS}/reward.json"
REWARD_TEXT = f"{VERIFIER_LOGS}/reward.txt"
SCRIPT = "test.sh"
KEPT_OUTPUT = "test-stdout.txt"
CLEARING = 60.0  # seconds
ENDED = (
    "note: processes that the agent left running were ended before the verifier ran; "
    "a task whose work is a running service needs `harbor:PATH?keep-processes=TASK`"
)
LONGEST_REASON = 1000  # characters of output that a failure quotes

_log = logging.getLogger(__name__)


async def verify(task: Task, stage: Stage, sandbox: GradingSandbox) -> tuple[Rewards, str]:
    """The rewards of a stage, and the end of what its verifier printed; GradeFailed where there are none."""
    kept = sandbox.artifacts / "steps" / stage.name if stage.name else sandbox.artifacts
    await _collect(task, stage, sandbox)
    taken = await artifacts.take(stage.artifacts, sandbox, kept)
    await artifacts.keep(AGENT_LOGS, sandbox, kept / "agent")
    if stage.grader is None:
        ended = not task.keeps_processes and await sandbox.end_processes()
        await sandbox.reach(stage.verifier_reaches)
        await clear(task, sandbox)
    else:
        ended = False  # the verifier never shared a sandbox with them
        await sandbox.renew(stage.grader)
        await artifacts.hand_over(taken, sandbox, kept, root(task))
    if stage.puts_tests:
        for directory in stage.tests:
            await sandbox.put(directory, TESTS)
        await _make_runnable(TESTS, SCRIPT, sandbox, root(task))
    said = await _test(task, stage, sandbox)
    make_directory(kept / "verifier")
    write_private(kept / "verifier" / KEPT_OUTPUT, said.encode(errors="backslashreplace"))
    await artifacts.keep(VERIFIER_LOGS, sandbox, kept / "verifier")
    rewards = await _rewards(sandbox, tail(said, 300))
    parts = (artifacts.named(taken), ENDED if ended else "", tail(said))
    return rewards, "\n".join(part for part in parts if part)


async def solve(task: Task, stage: Stage, sandbox: GradingSandbox) -> None:
    """What the oracle does: the task's own solution, which no other agent ever sees."""
    script = stage.solution / "solve.sh"
    if not script.is_file():
        raise AgentFailed(f"the task has no solution: `{script}`", kind="no-solution")
    await sandbox.put(stage.solution, SOLUTION)
    await _make_runnable(SOLUTION, script.name, sandbox, root(task))
    env = {"DEBIAN_FRONTEND": "noninteractive", **filled(task.toml.solution.env, sandbox.variables)}
    result = await sandbox.run(f"{SOLUTION}/{script.name}", env=env)
    if not result.ok:
        reason = result.output.strip()[-LONGEST_REASON:]
        raise AgentFailed(f"the solution ended with status {result.exit_code}: {reason}", kind="exit")


async def clear(task: Task, sandbox: GradingSandbox) -> None:
    """Nothing is left where tests and rewards will be, of the agent or of an earlier verifier."""
    line = "; ".join(artifacts.empty(directory) for directory in (TESTS, VERIFIER_LOGS))
    result = await sandbox.run(f"set -e; {line}", timeout=CLEARING, user=root(task))
    if not result.ok:
        raise GradeFailed(
            f"`{TESTS}` and `{VERIFIER_LOGS}` cannot be emptied: {tail(result.output, 300)}", kind="clear"
        )


def root(task: Task) -> str | None:
    """Who may do anything in the sandbox; in a process sandbox there is one user only."""
    return None if processes(task) else "root"


async def _collect(task: Task, stage: Stage, sandbox: GradingSandbox) -> None:
    """Run the commands that leave something to verify; one that fails is noted, as in Harbor."""
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


async def _test(task: Task, stage: Stage, sandbox: GradingSandbox) -> str:
    verifier = stage.verifier
    user = str(verifier.user) if verifier.user is not None else _default_user(task, stage)
    env: Mapping[str, str] = {**GRADING, **filled(verifier.env, sandbox.variables)}
    result = await sandbox.run(f"{TESTS}/{SCRIPT}", env=env, timeout=verifier.timeout_sec, user=user)
    if result.timed_out:
        raise GradeFailed(f"the verifier took longer than {verifier.timeout_sec:g} s", kind="timeout")
    return result.output


def _default_user(task: Task, stage: Stage) -> str | None:
    """Where a verifier names no user, it is not the agent's; a sandbox of its own has no other."""
    return root(task) if stage.agent.user is not None and stage.grader is None else None


async def _make_runnable(directory: str, script: str, sandbox: GradingSandbox, user: str | None) -> None:
    """What was put in belongs to whoever acts: it becomes root's, where there is another than that."""
    line = f"chmod -R a+rX {directory} && chmod a+rx {directory}/{script}"
    line = line if user is None else f"chown -R 0:0 {directory} && {line}"
    result = await sandbox.run(line, timeout=CLEARING, user=user)
    if not result.ok:
        raise GradeFailed(f"`{directory}` cannot be made ready: {tail(result.output, 300)}", kind="clear")


async def _rewards(sandbox: GradingSandbox, said: str) -> Rewards:
    for path, parse in ((REWARD_JSON, of_json), (REWARD_TEXT, of_text)):
        try:
            content = await sandbox.read(path)
        except FileNotFoundError:
            continue
        except (SandboxFailed, OSError) as error:
            raise GradeFailed(
                f"the verifier's reward cannot be read: `{path}`: {error}", kind="reward"
            ) from error
        return parse(content, path)
    raise missing((REWARD_JSON, REWARD_TEXT), said)
