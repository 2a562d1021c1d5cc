"""Checks a run directory's owner: a resume imports the code that the run names, with this user's rights."""

from __future__ import annotations

import os

from ...core.config import CriticKind, RunConfig
from ...core.errors import BadInput
from ...ledger.directory import RunDirectory, name_user


def check_trust(directory: RunDirectory, *, trust: bool = False) -> RunConfig:
    """Return the run's configuration; raise BadInput, naming the code to import, if another user wrote it."""
    config = directory.read_config()
    owners = _find_other_owners(directory)
    if owners and not trust:
        names = ", ".join(f"`{name}`" for name in _list_code_names(config))
        raise BadInput(
            f"the run belongs to {name_user(owners.pop())} and would import code that it names: {names}",
            hint="read that code first; `--trust` (`trust=True`) then accepts it",
        )
    return config


def check_owner(directory: RunDirectory) -> None:
    """Raise BadInput if another user wrote the run: its orders would run with the rights of this user."""
    if owners := _find_other_owners(directory):
        raise BadInput(
            f"the run belongs to {name_user(owners.pop())}: `{directory.path}`", hint="give another `--out`"
        )


def _find_other_owners(directory: RunDirectory) -> set[int]:
    paths = (directory.path, directory.config, directory.database)
    return {path.stat().st_uid for path in paths if path.exists()} - {os.geteuid()}


def _list_code_names(config: RunConfig) -> list[str]:
    """Return everything in a run's configuration that names code to import."""
    recipe = config.recipe
    if recipe is not None:
        return [recipe.path, *([recipe.suite] if recipe.suite else [])]
    policy = config.serving.policy if config.serving is not None else None
    named = [config.suite, config.agent, config.critic, policy]
    return [name for name in named if name is not None and name not in set(CriticKind)]
