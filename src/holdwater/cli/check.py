"""`holdwater check`: a suite held against its own oracle and against nobody at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console
from .flags import Flag
from .run import Flags
from .settings import merged

if TYPE_CHECKING:
    from rich.text import Text

    from ..api.checking import Checked

MOST_SHOWN = 50
SAYINGS = {
    "oracle_failed": "the oracle does not pass",
    "nop_passed": "passes without any work",
    "infrastructure": "could not be tried",
}


def check(
    suite: str,
    /,
    *,
    flags: Flags = Flags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Run `oracle` and `nop` on every instance of a suite, and name those that are wrong.

    An instance is good if its own solution passes and doing nothing does not. Both are real runs, whose
    directories are kept.

    For example: `holdwater check tasks.jsonl --only 'add-*' --concurrency 4 --json`

    Exit status: 0 all are good, 1 some are not, 2 bad input, 3 interrupted, 4 stopped.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        A directory for both runs; `runs/<time>-<suite>-check` otherwise.
    config
        A TOML file with flags; those given here come first.
    json
        Print one JSON document on stdout.
    quiet
        No display.
    """
    console = Console.claim()
    from .. import api
    from ..api.checking import checked, finished, prepare_check
    from ..core.errors import BadInput
    from .conduct import leave, watched

    said = merged(flags, config)
    if said.pop("agent") or said.pop("command"):
        raise BadInput("`holdwater check` takes no agent: it runs `oracle` and `nop`")
    prepared = prepare_check(suite, out, said)  # type: ignore[arg-type]
    for one in prepared:
        console.say(f"check: {one.agent.name} in `{one.path}`")
        finished(watched(lambda around, one=one: api.start(one, around), quiet=quiet))  # type: ignore[misc]
    found = checked(prepared)
    if json:
        console.data(found)
    else:
        console.page(page(found))
    console.flush()
    return leave(0 if found.ok else 1)


def page(found: Checked) -> Text:
    from rich.text import Text

    from ..view.figures import line

    text = Text(f"{found.suite}: {found.instances} instances, {found.good} good")
    for kind, saying in SAYINGS.items():
        faults = getattr(found, kind)
        if faults:
            text.append(f"\n{saying}: {len(faults)}", "red")
        for fault in faults[:MOST_SHOWN]:
            text.append(f"\n  {line(fault.id)}: {line(fault.why)}")
        if len(faults) > MOST_SHOWN:
            text.append(f"\n  ... and {len(faults) - MOST_SHOWN} more; `--json` has them all")
    return text
