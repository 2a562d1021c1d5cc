"""Finds the runs below some directories and opens them for a page.

A reader is opened for each page and closed after it: a run that grows, moves or vanishes is seen as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from ..core.errors import BadInput
from ..core.summary import RunSummary
from ..ledger.directory import RunDirectory
from ..ledger.reader import LedgerReader

DEEPEST = 3  # levels of directories between a root and a run
MOST_RUNS = 2000
ID_LENGTH = 12


LedgerState = tuple[tuple[int, int], ...]


class FoundRun(NamedTuple):
    """A run below one of the roots."""

    id: str  # names it in addresses
    path: Path
    name: str  # its path as the user knows it


class RunPool:
    """The runs that the pages show."""

    def __init__(self, roots: Sequence[str | os.PathLike[str]], cache: Path) -> None:
        """`cache`: a directory for what cannot be kept beside a run."""
        self.roots = tuple(Path(root) for root in roots)
        self.cache = cache
        self.summaries: dict[str, tuple[LedgerState, RunSummary]] = {}  # of ended runs; bound: MOST_RUNS
        self._known: dict[str, FoundRun] = {}  # bound: MOST_RUNS

    def list_runs(self) -> list[FoundRun]:
        """Return the runs below the roots as they are now."""
        found = [run for root in self.roots for run in _search(root, DEEPEST)]
        self._known = {run.id: run for run in found[:MOST_RUNS]}
        self.summaries = {run: kept for run, kept in self.summaries.items() if run in self._known}
        return list(self._known.values())

    def find(self, run: str) -> FoundRun:
        """Return a run by its id."""
        if run not in self._known:
            self.list_runs()
        if run not in self._known:
            raise BadInput("no such run below the directories of this view", "it may have been moved")
        return self._known[run]

    def is_controllable(self, run: str) -> bool:
        """Return whether a process conducts the run that takes requests of this user."""
        directory = RunDirectory(self.find(run).path)
        try:
            owner = directory.path.stat().st_uid
        except OSError:
            return False
        return os.geteuid() in (0, owner) and directory.find_holder() is not None

    @contextmanager
    def open(self, run: str) -> Iterator[LedgerReader]:
        """Open the ledger of a run for one page."""
        found = self.find(run)
        try:
            reader = LedgerReader(RunDirectory.open(found.path))
        except FileNotFoundError:
            raise BadInput(f"the directory of the run has vanished: `{found.path}`") from None
        with reader:
            yield reader


def read_state(directory: RunDirectory) -> LedgerState:
    """Return sizes and times of the files of a ledger, which only grows: they say whether it has changed."""
    database = directory.database
    return tuple(read_status(path) for path in (database, database.with_name(database.name + "-wal")))


def read_status(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _search(place: Path, depth: int) -> Iterator[FoundRun]:
    """Yield the run in a directory, or the runs below it; the directory of a run holds no other."""
    if (place / "run.json").is_file():
        id_ = blake3(os.fsencode(place.resolve())).hexdigest()[:ID_LENGTH]
        yield FoundRun(id_, place, str(place))
        return
    if depth == 0:
        return
    try:
        entries = sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError:  # no directory, or one that may not be read
        return
    for entry in entries:
        if not entry.name.startswith("."):
            yield from _search(entry, depth - 1)
