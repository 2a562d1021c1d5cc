"""What of this machine a process sandbox shows, and whether that is enough for what an agent's command names.

The mounts themselves are made by `bubblewrap.py`; containers have mounts of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..core.errors import BadInput
from .bubblewrap import REPLACED, is_below, is_ours, is_replaced
from .probe import Machine

Mounts = Sequence[tuple[str, str]]  # (here, there), read-only


def visible_mounts(mounts: Mounts) -> tuple[tuple[str, str], ...]:
    """A run's mounts, and the current directory: it may lie in a place that sandboxes replace."""
    here = os.path.realpath(Path.cwd())
    return (*mounts, (here, here))


def search_path(mounts: Mounts) -> list[str]:
    """The directories that come first on PATH."""
    return [f"{there}/bin" for here, there in mounts if Path(here, "bin").is_dir()]


def check_mounts(mounts: Mounts, machine: Machine) -> None:
    """Refuse mounts that no process sandbox of this machine can have."""
    for here, there in mounts:
        if here == there:
            continue
        if not machine.bwrap:
            why = machine.why_not or "it is not there"
            raise BadInput(f"`--mount` needs bubblewrap or containers: {why}", "add `--sandbox docker`")
        if is_ours(there):
            raise BadInput(f"invalid place for `--mount` in a process sandbox, which has its own: `{there}`")


def check_paths(paths: Iterable[str], mounts: Mounts, machine: Machine) -> None:
    """Refuse an agent whose program or files lie where a sandbox shows its own directories."""
    if not machine.bwrap:
        return
    shown = [there for _, there in visible_mounts(mounts)]
    for path in paths:
        real = os.path.realpath(path)
        if is_replaced(real) and not is_below(real, shown) and not is_below(path, shown):
            place = next(place for place in REPLACED if is_below(real, [place]))
            above, there = Path(real).parent, f"/opt/{Path(real).parent.name}"
            raise BadInput(
                f"sandboxes do not see a file of the agent's command, `{place}` is private there: `{path}`",
                hint=f"add `--mount {above}:{there}` and name it `{there}/{Path(real).name}`",
            )
