"""Prepares a resume: the owner of the run's directory, new settings, and closed samples to try again.

A resume imports the code that the run names, with this user's rights. Each change is an event. The rest of a
resume is in `run/execute.py` and `run/conductor/feed.py`.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Sequence

from ...core.config import CriticKind, RunConfig
from ...core.errors import BadInput
from ...core.options import OptionEntry, list_options
from ...core.policy import ClosedSample, RetryChoice, is_chosen
from ...ledger.directory import RunDirectory, name_user
from ...ledger.ledger import Ledger
from ...ledger.reader import LedgerReader
from .options import ResumeOptions

CHANGED = "resume.changed"
RETRIED = "resume.retried"


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


def read_choices(directory: RunDirectory, options: ResumeOptions) -> tuple[str, ...]:
    """Return the words that choose samples to try again; refuse a pattern that no instance matches."""
    retry = options.get("retry") or ()
    choices = (retry,) if isinstance(retry, str) else tuple(retry)
    choices += (RetryChoice.POISON,) if options.get("retry_poison") else ()
    patterns = [choice for choice in choices if choice not in set(RetryChoice)]
    if patterns:
        with LedgerReader(directory) as reader:
            for pattern in patterns:
                if not any(fnmatch.fnmatchcase(row.name, pattern) for row in reader.instances()):
                    words = ", ".join(f"`{word}`" for word in RetryChoice)
                    raise BadInput(
                        f"no instance of the run matches `--retry`: `{pattern[:200]}`",
                        f"it takes {words}, or a pattern over instance ids",
                    )
    return choices


async def change_settings(ledger: Ledger, config: RunConfig, kind: str = CHANGED, by: str = "") -> list[str]:
    """Make `config` the run's own, and record each change as an event, after `by`; return the changes."""
    before = ledger.directory.read_config()
    changes = list(describe_changes(before, config))
    for change in changes:
        await ledger.note(kind, by + change)
    if config != before:
        ledger.directory.replace_config(config)
    return changes


async def reopen_samples(ledger: Ledger, choices: Sequence[str]) -> None:
    """Reopen the chosen closed samples."""
    if not choices:
        return

    def chosen(closed: ClosedSample) -> bool:
        return is_chosen(closed, choices)

    count = await ledger.reopen(chosen)
    words = ", ".join(f"`{choice}`" for choice in choices)
    await ledger.note(RETRIED, f"samples that are tried again: {count}, chosen by {words}")


def describe_changes(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """Yield one sentence for each setting that a resume replaced."""
    for _, entry in sorted(list_options(RunConfig).items()):
        old, new = entry.read(before), entry.read(after)
        if entry.option.resume and new != old:
            yield f"`{entry.flag}`: {_show_value(new, entry)}, before: {_show_value(old, entry)}"


def _show_value(value: object, entry: OptionEntry) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value} bytes" if entry.option.size else str(value)
