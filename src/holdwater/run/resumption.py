"""What a resume changes before it goes on: settings of the run, and closed samples that are tried again.

Each change is an event. The rest of a resume is in `execute.py` and `feed.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.config import RunConfig
from ..core.errors import BadInput
from ..core.reopening import ClosedSample, Retry, is_chosen
from ..ledger.directory import RunDirectory
from ..ledger.ledger import Ledger
from ..ledger.reader import Reader
from .options import BUDGET, LIMITS, RETRYING, SIZES, ResumeOptions

CHANGED = "resume.changed"
RETRIED = "resume.retried"


def read_choices(directory: RunDirectory, options: ResumeOptions) -> tuple[str, ...]:
    """The words that choose samples to try again; a pattern that no instance matches is refused."""
    retry = options.get("retry") or ()
    choices = (retry,) if isinstance(retry, str) else tuple(retry)
    choices += (Retry.POISON,) if options.get("retry_poison") else ()
    patterns = [choice for choice in choices if choice not in set(Retry)]
    if patterns:
        with Reader(directory) as reader:
            for pattern in patterns:
                if not any(fnmatch.fnmatchcase(row.name, pattern) for row in reader.instances()):
                    words = ", ".join(f"`{word}`" for word in Retry)
                    raise BadInput(
                        f"no instance of the run matches `--retry`: `{pattern[:200]}`",
                        f"it takes {words}, or a pattern over instance ids",
                    )
    return choices


async def change_settings(ledger: Ledger, config: RunConfig) -> None:
    """Make `config` the run's own, and write down what is new in it."""
    before = ledger.directory.read_config()
    for change in describe_changes(before, config):
        await ledger.note(CHANGED, change)
    if config != before:
        ledger.directory.replace_config(config)


async def reopen_samples(ledger: Ledger, choices: Sequence[str]) -> None:
    """Open the closed samples that are chosen again."""
    if not choices:
        return

    def chosen(closed: ClosedSample) -> bool:
        return is_chosen(closed, choices)

    count = await ledger.reopen(chosen)
    words = ", ".join(f"`{choice}`" for choice in choices)
    await ledger.note(RETRIED, f"samples that are tried again: {count}, chosen by {words}")


def describe_changes(before: RunConfig, after: RunConfig) -> Iterator[str]:
    """One sentence for each setting that a resume replaced."""
    old, new = _by_option(before), _by_option(after)
    for option, value in new.items():
        if value != old[option]:
            yield f"`--{option.replace('_', '-')}`: {value}, before: {old[option]}"


def _by_option(config: RunConfig) -> dict[str, str]:
    """What each option of a resume stands at."""
    found: dict[str, Any] = {}
    for option in ResumeOptions.__annotations__.keys() - RETRYING:
        if option in LIMITS:
            found[option] = getattr(config.limits, LIMITS[option])
        elif option in BUDGET:
            found[option] = getattr(config.budget, BUDGET[option])
        else:
            found[option] = getattr(config, option)
    return {option: _shown(option, found[option]) for option in sorted(found)}


def _shown(option: str, value: object) -> str:
    if value is None:
        return "not set"
    return f"{value} bytes" if option in SIZES else str(value)
