"""`holdwater check`: tests a suite with its own oracle, with an agent that does nothing, and with tricks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..core.errors import BadInput
from .console import CommandConsole
from .flags import Flag
from .run_flags import RunFlags, merge_flags

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from ..api.checking import Attacked, Checked
    from ..api.runs import RunSetup

MOST_SHOWN = 50
ATTACK_PREFIX = "attack:"  # prefix of a trick's name
FAULT_LABELS = {
    "oracle_failed": "the oracle does not pass",
    "nop_passed": "passes without any work",
    "infrastructure": "could not be run",
}


def check(
    suite: str,
    /,
    *,
    flags: RunFlags = RunFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    attack: Flag = False,
    config: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Run `oracle` and `nop` on every instance of a suite, and name the faulty ones.

    An instance is good if its own solution passes and doing nothing fails. Both are real runs, and their
    directories are kept.

    With `--attack` an agent that does no work tries to pass the grading, one trick after another, on the
    first five instances or on the selection of `--only` and `--limit`. A page lists the tricks that passed.

    For example: `holdwater check tasks.jsonl --only 'add-*' --concurrency 4 --json`, or
    `holdwater check --attack tasks.jsonl --limit 2`.

    Exit status: 0 all instances are good, or no trick passed; 1 some are faulty, or a trick passed;
    2 bad input, 3 interrupted, 4 stopped.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        A directory for the runs (default: `runs/<time>-<suite>-check`; with `--attack` none is kept).
    attack
        List the tricks with which a cheating agent passes.
    config
        A TOML file with flags; flags on the command line take precedence.
    json
        Print one JSON document on stdout.
    quiet
        Show no live display.
    """
    console = CommandConsole.claim()
    from .foreground_run import exit_past_threads

    said = merge_flags(flags, config)
    if said.pop("agent") or said.pop("command"):
        raise BadInput("`holdwater check` takes no agent: it runs its own agents")
    found, page = (look_for_tricks if attack else look_for_faults)(suite, out, said, console, quiet)
    console.write_result(found, lambda: page, json=json)
    console.flush()
    return exit_past_threads(0 if found.ok else 1)


def look_for_faults(
    suite: str, out: Path | None, said: dict[str, Any], console: CommandConsole, quiet: bool
) -> tuple[Checked, Text]:
    """Run the oracle and `nop`; return the findings, and a page for people."""
    from ..api.checking import prepare_check, summarize_check

    prepared = prepare_check(suite, out, said)  # type: ignore[arg-type]
    conduct_all(prepared, console, "check", quiet)
    found = summarize_check(prepared)
    return found, render_check(found)


def look_for_tricks(
    suite: str, out: Path | None, said: dict[str, Any], console: CommandConsole, quiet: bool
) -> tuple[Attacked, RenderableType]:
    """Run every trick; return the findings, and a page for people."""
    from ..api.checking import prepare_attack, summarize_attack

    with TemporaryDirectory(prefix="holdwater-attack-") as place:
        prepared = prepare_attack(suite, out or place, said)  # type: ignore[arg-type]
        conduct_all(prepared, console, "attack", quiet)
        found = summarize_attack(prepared)
    return found, render_attack(found)


def conduct_all(prepared: Sequence[RunSetup], console: CommandConsole, verb: str, quiet: bool) -> None:
    """Conduct the runs one after another; raise an error if one does not finish."""
    from ..api.checking import require_finished
    from .foreground_run import watch_run

    for one in prepared:
        console.say(f"{verb}: {one.agent.name.removeprefix(ATTACK_PREFIX)} in `{one.path}`")
        require_finished(watch_run(one, quiet=quiet))


def render_check(found: Checked) -> Text:
    from rich.text import Text

    from ..view.formatting import line

    text = Text(f"{found.suite}: {found.instances} instances, {found.good} good")
    for kind, saying in FAULT_LABELS.items():
        faults = getattr(found, kind)
        if faults:
            text.append(f"\n{saying}: {len(faults)}", "red")
        for fault in faults[:MOST_SHOWN]:
            text.append(f"\n  {line(fault.id)}: {line(fault.why)}")
        if len(faults) > MOST_SHOWN:
            text.append(f"\n  ... and {len(faults) - MOST_SHOWN} more; `--json` lists them all")
    return text


def render_attack(found: Attacked) -> RenderableType:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.formatting import line

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
        text.append(f"\n{FAULT_LABELS['nop_passed']}, so no trick is to blame: {names}", "yellow")
    for fault in found.untried[:MOST_SHOWN]:
        text.append(f"\n{FAULT_LABELS['infrastructure']}: {line(fault.id)}: {line(fault.why)}", "yellow")
    return Group(table, Text(), text)
