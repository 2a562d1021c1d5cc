"""`holdwater prune`: make old runs smaller, or remove them. Without `--yes` it only says what would go."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.errors import BadInput, HoldwaterError
from .console import Console, teller
from .flags import LATEST, RUNS, Flag, find_run

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..ledger.prune import Pruned, Wanted

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
    """Make old runs smaller, or remove them.

    Without `--yes` it prints what would go, and changes nothing. A run that is held by a conductor is left
    alone, and so is one that could be resumed. The exit status is 1 if something could not be done.

    For example: `holdwater prune --older-than 7d --keep failures --compress`, and once more with `--yes`;
    or `holdwater prune runs/mine --remove`.

    Parameters
    ----------
    places
        Runs, or folders of runs; `runs/` otherwise. `latest` is the newest run there.
    older_than
        Only runs at which nobody has been at work for so long: `7d`, `12h`, `2w`, `90m`.
    keep
        Drop exchanges, logs and salvaged work: `failures` keeps those of samples that did not pass, `none`
        keeps none, `all` drops only media that nothing refers to any more. Verdicts, usage, grades and
        answers stay.
    compress
        Compress the logs that stay, and fold the ledger's write-ahead log into it.
    remove
        Remove whole runs.
    unfinished
        Also runs that could be resumed; of these, open samples keep their files.
    yes
        Do it.
    json
        Print one JSON document.
    """
    from ..core.config import Keep
    from ..ledger.prune import Wanted

    wanted = Wanted(
        keep=Keep(keep) if keep else None,
        compress=compress,
        remove=remove,
        unfinished=unfinished,
        older_than=parse_age(older_than),
    )
    check(wanted)
    found = find_runs(places)
    console = Console()
    tell = teller(console)
    pruned = [pruned_run(path, wanted, yes, tell) for path in found]
    if json:
        console.data({"done": yes, "bytes": sum(run.bytes for run in pruned), "runs": pruned})
    else:
        console.page(page(pruned, yes))
    console.flush()
    return 1 if any(run.problem for run in pruned) else 0


def parse_age(text: str) -> float:
    """`7d`, `12h`, `90m`, `30s`, `2w`: seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)", text.strip().lower())
    if match is None:
        raise BadInput(f"`--older-than` is no time: `{text}`", "for example `7d` or `12h`")
    return float(match[1]) * UNITS[match[2]]


def check(wanted: Wanted) -> None:
    if not (wanted.keep or wanted.compress or wanted.remove):
        raise BadInput("nothing to do", "say `--keep failures`, `--compress` or `--remove`")
    if wanted.remove and (wanted.keep or wanted.compress):
        raise BadInput("`--remove` leaves nothing to keep or to compress", "say one or the other")


def find_runs(places: tuple[str, ...]) -> list[Path]:
    """The runs that are named, or lie in a folder that is; each once."""
    from ..ledger.prune import is_run, runs_in

    found: dict[Path, None] = {}
    for path in [find_run(place) if place == LATEST else Path(place) for place in places] or [RUNS]:
        if path.is_symlink():
            raise BadInput(f"a link is not followed: `{path}`")
        if not path.is_dir():
            raise BadInput(f"no such directory: `{path}`")
        runs = [path] if is_run(path) else runs_in(path)
        if not runs:
            raise BadInput(f"neither a run nor a folder of runs: `{path}`")
        found |= dict.fromkeys(runs)
    return list(found)


def pruned_run(path: Path, wanted: Wanted, yes: bool, tell: Callable[[str], None]) -> Pruned:
    """What goes of a run. What goes wrong is told, and the others go on."""
    from ..ledger.prune import Pruned, carry_out, foresee

    try:
        return (carry_out if yes else foresee)(path, wanted, time.time(), tell)
    except HoldwaterError as error:
        return Pruned(directory=str(path), problem=error.message)
    except OSError as error:
        return Pruned(directory=str(path), problem=f"{error.strerror}: `{error.filename}`")


def page(pruned: list[Pruned], yes: bool) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.figures import size

    table = Table.grid(padding=(0, 2, 0, 0))
    names = ("run", "last seen", "size", "freed" if yes else "would free", "")
    for name in names:
        table.add_column(justify="right" if name in names[2:4] else "left", overflow="fold")
    table.add_row(*(Text(name, "dim") for name in names))
    for run in pruned:
        table.add_row(*cells(run))
    total = size(sum(run.bytes for run in pruned))
    runs = f"{sum(bool(run.bytes) for run in pruned)} of {len(pruned)} runs"
    end = f"freed {total} in {runs}" if yes else f"would free {total} in {runs}; `--yes` does it"
    return Group(table, Text(), Text(end))


def cells(run: Pruned) -> tuple[RenderableType, ...]:
    from rich.text import Text

    from ..view.figures import line, size

    seen = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.seen)) if run.seen else ""
    said = [f"{run.attempts} attempts"] if run.attempts else []
    said += [f"{run.blobs} media"] if run.blobs else []
    said += [f"{run.logs} logs compressed"] if run.logs else []
    about = Text(f"failed: {line(run.problem)}", "red") if run.problem else Text(run.left or ", ".join(said))
    return Text(line(run.directory)), seen, size(run.size), size(run.bytes), about
