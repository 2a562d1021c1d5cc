"""The agent that does nothing. An instance that it passes does not measure agents."""

from __future__ import annotations

from ..core.authoring import Agent, Model, Sandbox
from ..core.records import Instance


async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> None:
    """Do nothing; without a call to the sandbox, none is created."""


def nop() -> Agent:
    return Agent(
        name="nop",
        act=act,
        uses_model=False,
        description="does nothing; an instance that it passes needs no agent",
    )
