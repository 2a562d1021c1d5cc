"""`holdwater check`: a suite held against its own oracle, against doing nothing, and against tricks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from .console import Console
from .flags import Flag
from .run import Flags
from .settings import merged

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ..api import Prepared
    from ..api.attacking import Attacked
    from ..api.checking import Checked

MOST_SHOWN = 50
ATTACK = "attack:"  # before the name of a trick
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
    attack: Flag = False,
    config: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Run `oracle` and `nop` on every instance of a suite, and name those that are wrong.

    An instance is good if its own solution passes and doing nothing does not. Both are real runs, whose
    directories are kept.

    With `--attack` an agent that does no work tries to be graded as if it had, one trick after another, on
    the first five instances or on those that `--only` and `--limit` name. A page says which trick passed.

    For example: `holdwater check tasks.jsonl --only 'add-*' --concurrency 4 --json`, or
    `holdwater check --attack tasks.jsonl --limit 2`.

    Exit status: 0 all are good, or no trick passed; 1 some are not, or a trick passed; 2 bad input,
    3 interrupted, 4 stopped.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        A directory for the runs; `runs/<time>-<suite>-check` otherwise, and none is kept with `--attack`.
    attack
        Say which tricks of an agent that cheats are graded as a pass.
    config
        A TOML file with flags; those given here come first.
    json
        Print one JSON document on stdout.
    quiet
        No display.
    """
    console = Console.claim()
    from ..core.errors import BadInput
    from .conduct import leave

    said = merged(flags, config)
    if said.pop("agent") or said.pop("command"):
        raise BadInput("`holdwater check` takes no agent: it runs its own")
    look = look_for_tricks if attack else look_for_faults
    found, text = look(suite, out, said, console, quiet)
    if json:
        console.data(found)
    else:
        console.page(text)
    console.flush()
    return leave(0 if found.ok else 1)


def look_for_faults(
    suite: str, out: Path | None, said: dict[str, Any], console: Console, quiet: bool
) -> tuple[Checked, Text]:
    """Run the oracle and `nop`; what they found, and as people read it."""
    from ..api.checking import checked, prepare_check

    prepared = prepare_check(suite, out, said)  # type: ignore[arg-type]
    conduct_all(prepared, console, "check", quiet)
    found = checked(prepared)
    return found, page(found)


def look_for_tricks(
    suite: str, out: Path | None, said: dict[str, Any], console: Console, quiet: bool
) -> tuple[Attacked, RenderableType]:
    """Run every trick; what they came to, and as people read it."""
    from ..api.attacking import attacked, prepare_attack

    with TemporaryDirectory(prefix="holdwater-attack-") as place:
        prepared = prepare_attack(suite, out or place, said)  # type: ignore[arg-type]
        conduct_all(prepared, console, "attack", quiet)
        found = attacked(prepared)
    return found, attack_page(found)


def conduct_all(prepared: Sequence[Prepared], console: Console, verb: str, quiet: bool) -> None:
    """Conduct the runs, one after another; each has to come to its end."""
    from .. import api
    from ..api.checking import finished
    from .conduct import watched

    for one in prepared:
        console.say(f"{verb}: {one.agent.name.removeprefix(ATTACK)} in `{one.path}`")
        finished(watched(lambda around, one=one: api.start(one, around), quiet=quiet))  # type: ignore[misc]


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


def attack_page(found: Attacked) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.figures import line

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for heading in ("trick", "passed", "what it does"):
        table.add_column(heading)
    for trick in found.tricks:
        passed = f"{len(trick.passed)} of {len(trick.passed) + trick.held}"
        table.add_row(trick.name, Text(passed, "red" if trick.passed else "green"), trick.says)
    text = Text(f"{found.suite}: {found.instances} instances attacked")
    for trick in found.tricks:
        named = ", ".join(line(name) for name in trick.passed[:MOST_SHOWN])
        if named:
            text.append(f"\n{trick.name} passes: {named}", "red")
    if found.nop_passed:
        names = ", ".join(line(name) for name in found.nop_passed[:MOST_SHOWN])
        text.append(f"\n{SAYINGS['nop_passed']}, so no trick is to blame: {names}", "yellow")
    for fault in found.untried[:MOST_SHOWN]:
        text.append(f"\n{SAYINGS['infrastructure']}: {line(fault.id)}: {line(fault.why)}", "yellow")
    return Group(table, Text(), text)
