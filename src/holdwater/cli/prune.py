"""`holdwater prune`: shrinks or removes old runs. Without `--yes` it only prints a preview."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ..core.errors import BadInput
from .console import CommandConsole, make_progress_printer
from .flags import Flag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..api.pruning import PruneOptions, PruneResult

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def prune(
    *places: str,
    older_than: str = "0",
    keep: Literal["all", "failures", "none"] | None = None,
    compress: Flag = False,
    remove: Flag = False,
    unfinished: Flag = False,
    yes: Flag = False,
    json: Flag = False,
) -> int:
    """Shrink or remove old runs.

    Without `--yes` it prints what would be removed, and changes nothing. Runs that a conductor holds and runs
    that can be resumed are skipped. The exit status is 1 if a run could not be pruned.

    For example: `holdwater prune --older-than 7d --keep failures --compress`, and once more with `--yes`;
    or `holdwater prune runs/mine --remove`.

    Parameters
    ----------
    places
        Runs, or folders of runs (default: `runs/`). `latest` is the newest run in `runs/`.
    older_than
        Only runs without activity for this long: `7d`, `12h`, `2w`, `90m`.
    keep
        Drop exchanges, logs and salvaged work: `failures` keeps the files of samples that did not pass,
        `none` keeps none, `all` drops only unreferenced media. Verdicts, usage, grades and answers stay.
    compress
        Compress the remaining logs, and merge the ledger's write-ahead log into the ledger.
    remove
        Remove whole runs.
    unfinished
        Include runs that can be resumed; their open samples keep their files.
    yes
        Make the changes; without it, only print them.
    json
        Print one JSON document.
    """
    from ..api.pruning import PruneOptions
    from ..core.config import KeepRule

    wanted = PruneOptions(
        keep=KeepRule(keep) if keep else None,
        compress=compress,
        remove=remove,
        unfinished=unfinished,
        older_than=parse_age(older_than),
    )
    check_request(wanted)
    return prune_runs(places, wanted, yes=yes, json=json)


def prune_runs(places: Sequence[str], wanted: PruneOptions, *, yes: bool, json: bool) -> int:
    """Prune all runs, and print the results; return 1 if a run could not be pruned."""
    from ..api.pruning import find_runs, try_prune

    found = find_runs(places)
    console = CommandConsole()
    tell = make_progress_printer(console)
    pruned = [try_prune(path, wanted, yes, tell) for path in found]
    console.write_result(
        {"done": yes, "bytes": sum(run.bytes for run in pruned), "runs": pruned},
        lambda: render_prune(pruned, yes),
        json=json,
    )
    console.flush()
    return 1 if any(run.problem for run in pruned) else 0


def parse_age(text: str) -> float:
    """Parse an age such as `7d`, `12h`, `90m`, `30s` or `2w`; return seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)", text.strip().lower())
    if match is None:
        raise BadInput(f"invalid time for `--older-than`: `{text}`", "for example `7d` or `12h`")
    return float(match[1]) * UNITS[match[2]]


def check_request(wanted: PruneOptions) -> None:
    if not (wanted.keep or wanted.compress or wanted.remove):
        raise BadInput("nothing to do", "use `--keep failures`, `--compress` or `--remove`")
    if wanted.remove and (wanted.keep or wanted.compress):
        raise BadInput("`--remove` leaves nothing to keep or to compress", "use one or the other")


def render_prune(pruned: list[PruneResult], yes: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.formatting import size

    table = Table.grid(padding=(0, 2, 0, 0))
    names = ("run", "last seen", "size", "freed" if yes else "would free", "")
    for name in names:
        table.add_column(justify="right" if name in names[2:4] else "left", overflow="fold")
    table.add_row(*(Text(name, "dim") for name in names))
    for run in pruned:
        table.add_row(*make_cells(run))
    total = size(sum(run.bytes for run in pruned))
    runs = f"{sum(bool(run.bytes) for run in pruned)} of {len(pruned)} runs"
    end = f"freed {total} in {runs}" if yes else f"would free {total} in {runs}; `--yes` makes the changes"
    return Group(table, Text(), Text(end))


def make_cells(run: PruneResult) -> tuple[RenderableType, ...]:
    from rich.text import Text

    from ..view.formatting import line, size

    seen = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.seen)) if run.seen else ""
    said = [f"{run.attempts} attempts"] if run.attempts else []
    said += [f"{run.blobs} media"] if run.blobs else []
    said += [f"{run.logs} logs compressed"] if run.logs else []
    about = Text(f"failed: {line(run.problem)}", "red") if run.problem else Text(run.left or ", ".join(said))
    return Text(line(run.directory)), seen, size(run.size), size(run.bytes), about
