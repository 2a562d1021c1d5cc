"""Searches runs for a text, as `holdwater search` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..conversation.text_search import build_index, open_search
from ..core.errors import BadInput, HoldwaterError
from ..ledger.directory import LATEST, RUNS, find_run
from ..ledger.reader import LedgerReader
from ..ledger.search import SearchHit as SearchHit
from ..ledger.search import SearchPattern, find_rows
from ..run.setup.config import read_environment
from ..viewer.run_pool import RunPool

ReportText = Callable[[str], None]


class RunHit(NamedTuple):
    """A hit, and the directory of its run."""

    run: Path
    hit: SearchHit


def search_runs(
    text: str, runs: Sequence[str | Path], report: ReportText, tell: ReportText, *, index: bool = False
) -> Iterator[RunHit]:
    """Yield the places of a text in runs: directories of runs, or with runs in them (default: `runs/`).

    `report` gets what could not be searched. With `index`, the index of each run is built first, and `tell`
    gets the progress.
    """
    pattern = SearchPattern(text)
    cache = read_environment().cache
    for path in list_directories(runs):
        try:
            with LedgerReader(path) as reader:
                if index:
                    _build(reader, cache, tell)
                yield from (RunHit(path, hit) for hit in find_rows(reader, pattern))
                with open_search(reader, pattern, cache) as search:
                    yield from (RunHit(path, hit) for hit in search.find_hits() if hit is not None)
                    for problem in search.problems:
                        report(f"{path}: {problem}")
        except (HoldwaterError, OSError) as error:
            report(f"{path}: {error}")


def list_directories(names: Sequence[str | Path]) -> list[Path]:
    """Return the run directories that are named, or below the directories that are named."""
    places = [find_run(LATEST) if str(name) == LATEST else Path(name) for name in names] or [RUNS]
    found: list[Path] = []
    for place in places:
        if not place.is_dir():
            raise BadInput(f"no such directory: `{place}`", "make a run: `holdwater run demo`")
        below = [run.path for run in RunPool([place], Path()).list_runs()]
        if not below:
            raise BadInput(f"no run in `{place}`")
        found += below
    return found


def _build(reader: LedgerReader, cache: Path, tell: ReportText) -> None:
    path, total = reader.directory.path, reader.counts().attempts
    for progress in build_index(reader, cache):
        tell(f"{path}: index: {progress.attempts} of {total} attempts {progress.note}".rstrip())
