"""Applies the changes of a resume before the run goes on: new settings, and closed samples to try again.

Each change is an event. The rest of a resume is in `run/execute.py` and `run/conductor/feed.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from ...core.config import RunConfig
from ...core.errors import BadInput
from ...core.options import OptionEntry, list_options
from ...core.policy import ClosedSample, RetryChoice, is_chosen
from ...ledger.directory import RunDirectory
from ...ledger.ledger import Ledger
from ...ledger.reader import LedgerReader
from .options import ResumeOptions

CHANGED = "resume.changed"
RETRIED = "resume.retried"


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


async def change_settings(ledger: Ledger, config: RunConfig) -> None:
    """Make `config` the run's own, and record each change as an event."""
    before = ledger.directory.read_config()
    for change in describe_changes(before, config):
        await ledger.note(CHANGED, change)
    if config != before:
        ledger.directory.replace_config(config)


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
    return f"{value} bytes" if entry.option.size else str(value)
