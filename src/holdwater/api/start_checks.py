"""Checks of a new run that need its suite or its agent, and the plan that a dry run prints.

`run/setup/config.py` checks the configuration by itself.
"""

from __future__ import annotations

import msgspec

from ..core.authoring import Agent, Suite
from ..core.config import RunConfig
from ..core.errors import AGENT_MISSING, BadInput, RunFailed
from ..rollout.sandbox_kinds import find_kind
from ..run.conductor.instance_source import InstanceSource, check_selected, first_instances
from ..run.execute import RunSetup

MOST_EXAMPLES = 3  # maximum number of instances that an error names as examples


def check_inputs(suite: Suite, agent: Agent, config: RunConfig) -> None:
    """Run the checks of suite and agent; a missing program may still be in containers or mounts."""
    kind = find_kind(config.sandbox)
    if suite.check is not None:
        suite.check()
    try:
        if agent.check is not None:
            agent.check()
    except RunFailed as error:
        if error.kind != AGENT_MISSING or (kind.shows_machine and not config.mounts):
            raise BadInput(error.message, error.hint) from None  # nothing has been created yet
    kind.check(config, agent)


async def check_start(prepared: RunSetup) -> None:
    """Raise BadInput if no instance could run: none is selected, or the agent needs a model and has none."""
    config, suite = prepared.config, prepared.suite
    if config.model is None and config.replays is None and prepared.agent.needs_model:
        name = prepared.agent.name.rpartition("/")[2]  # without the directory of its file
        raise BadInput(f"agent `{name}` calls the model, and the run has none", "give one with `--model`")
    if suite.size == 0:
        raise BadInput(f"suite `{suite.name}` has no instances")
    selection = prepared.selection
    if selection is not None:
        await check_selected(suite, config, selection)
    if config.only and not await first_instances(suite, config, 1, selection):
        patterns = ", ".join(f"`{pattern}`" for pattern in config.only)
        there = await first_instances(
            suite, msgspec.structs.replace(config, only=()), MOST_EXAMPLES, selection
        )
        both = " and is in `--select`" if selection is not None else ""
        raise BadInput(
            f"no instance of suite `{suite.name}` matches `--only`{both}: {patterns}",
            f"it has, for example, {', '.join(f'`{name}`' for name in there)}" if there else "",
        )


async def preview(prepared: RunSetup, count: int) -> tuple[list[str], int | None]:
    """Return the ids of the first instances that the run would try, and their total, if it is known."""
    await check_start(prepared)
    source = InstanceSource(prepared.suite, prepared.config, prepared.selection)
    first: list[str] = []
    try:
        while len(first) < count and (items := await source.take(count - len(first))):
            first += [instance.id for instance, _ in items]
        return first, source.total
    finally:
        source.close()
        if source.error is not None:
            raise source.error
