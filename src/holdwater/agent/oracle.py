"""The agent that runs the instance's own solution. If it fails, the suite is at fault."""

from __future__ import annotations

from ..core.authoring import Agent, Model, Sandbox
from ..core.errors import AgentFailed
from ..core.records import Instance

LONGEST_REASON = 1000  # characters of output quoted in a failure


async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> None:
    """Run the instance's own `solution`. If the suite defines `Suite.solve`, that runs instead."""
    if not instance.solution:
        raise AgentFailed(
            "the instance has no solution", hint="give it a `solution` command", kind="no-solution"
        )
    result = await sandbox.run(instance.solution)
    if not result.ok:
        reason = result.output.strip()[-LONGEST_REASON:]
        raise AgentFailed(f"the solution ended with status {result.exit_code}: {reason}", kind="exit")


def oracle() -> Agent:
    return Agent(
        name="oracle",
        act=act,
        uses_model=False,
        solves=True,
        description="runs the instance's own solution",
    )
