"""The agent that does nothing: what it passes needs no agent."""

from __future__ import annotations

from ..core.authoring import Agent, Model, Sandbox
from ..core.records import Instance


async def act(instance: Instance, sandbox: Sandbox, model: Model | None) -> None:
    """Touch nothing, so that no sandbox is made for it."""


def nop() -> Agent:
    return Agent(
        name="nop", act=act, uses_model=False, description="does nothing: what it passes needs no agent"
    )
