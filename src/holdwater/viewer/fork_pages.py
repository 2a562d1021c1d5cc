"""The branches of an attempt: the forks of it among the shown runs, as a tree of turns that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec

from ..conversation.branches import read_branch_tree
from ..core.errors import HoldwaterError
from ..core.fork_origin import ForkOrigin
from .page import PageRequest, PageResponse, render_page
from .run_pool import FoundRun, RunPool

MOST_FORKS = 50  # on a page


def show_branches(asked: PageRequest) -> PageResponse:
    """Show the tree of a fork, or the trees of an instance's attempts that were forked."""
    with asked.pool.open(asked.run) as reader:
        run, own = reader.config.id, reader.config.fork
        path = str(reader.directory.path.absolute())
    name = asked.query.get("instance", "")
    if own is not None and not name:
        run, path, name = own.run, own.directory, own.instance
    forks: dict[int, list[FoundRun]] = {}
    for found, origin in find_forks(asked.pool):
        wanted = own is None or name != own.instance or origin.attempt == own.attempt
        if (origin.run, origin.instance) == (run, name) and wanted:
            forks.setdefault(origin.attempt, []).append(found)
    trees, problems = [], []
    for _, runs in sorted(forks.items()):
        try:
            with ExitStack() as stack:
                readers = [stack.enter_context(asked.pool.open(found.id)) for found in runs[:MOST_FORKS]]
                trees.append(read_branch_tree(readers))
        except HoldwaterError as error:
            problems.append(error.message)
    ids = {str(found.path): found.id for found in asked.pool.list_runs()}
    ids |= {str(found.path.absolute()): found.id for found in asked.pool.list_runs()}
    values = {"trees": trees, "problems": problems, "ids": ids, "origin": ids.get(path)}
    return render_page("branches.html", asked=asked, run=asked.run, instance=name, **values)


def find_forks(pool: RunPool) -> Iterator[tuple[FoundRun, ForkOrigin]]:
    """Yield the shown runs that are forks."""
    for found in pool.list_runs():
        try:
            origin = _origins.decode((found.path / "run.json").read_bytes()).fork
        except (OSError, msgspec.MsgspecError):
            continue  # the list of runs says what is wrong with it
        if origin is not None:
            yield found, origin


class _OriginField(msgspec.Struct):
    """The part of a run's configuration that says what it repeats."""

    fork: ForkOrigin | None = None


_origins = msgspec.json.Decoder(_OriginField)
