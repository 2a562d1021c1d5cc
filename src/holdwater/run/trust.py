"""Whose code a run directory names: what goes on with a run imports it, with the rights of this user."""

from __future__ import annotations

import os

from ..core.config import Critic, RunConfig
from ..core.errors import BadInput
from ..ledger.directory import RunDirectory, name_user


def check_trust(directory: RunDirectory, *, trust: bool = False) -> RunConfig:
    """The run's configuration; BadInput names the code that it would import if another user wrote it."""
    config = directory.read_config()
    owners = _find_other_owners(directory)
    if owners and not trust:
        names = ", ".join(f"`{name}`" for name in _named(config))
        raise BadInput(
            f"the run belongs to {name_user(owners.pop())} and would import code that it names: {names}",
            hint="read that code first; `--trust` (`trust=True`) then accepts it",
        )
    return config


def check_owner(directory: RunDirectory) -> None:
    """BadInput if another user wrote the run: its orders would be carried out with the rights of this one."""
    if owners := _find_other_owners(directory):
        raise BadInput(
            f"the run belongs to {name_user(owners.pop())}: `{directory.path}`", hint="give another `--out`"
        )


def _find_other_owners(directory: RunDirectory) -> set[int]:
    paths = (directory.path, directory.config, directory.database)
    return {path.stat().st_uid for path in paths if path.exists()} - {os.geteuid()}


def _named(config: RunConfig) -> list[str]:
    """All that stands for code in a run's configuration."""
    recipe = config.recipe
    if recipe is not None:
        return [recipe.path, *([recipe.suite] if recipe.suite else [])]
    policy = config.serving.policy if config.serving is not None else None
    named = [config.suite, config.agent, config.critic, policy]
    return [name for name in named if name is not None and name not in set(Critic)]
