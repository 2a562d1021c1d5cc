"""The page that searches one run or all runs of the view, and the work behind it.

A page has the form alone; the hits come as events while the search goes on, and it stops with the page.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import dropwhile
from urllib.parse import urlencode

from ..conversation.text_search import START, TranscriptSearch, TurnPlace, build_index, open_search
from ..core.errors import BadInput, HoldwaterError
from ..ledger.search import SearchHit, SearchPattern, find_rows
from ..ledger.search_index import find_index
from ..view.formatting import format_count, size
from .control_pages import check_form
from .live import PageEvent, PageWork
from .page import PageRequest, PageResponse, load_templates, render_page
from .run_pool import FoundRun

MOST_HITS = 50  # turns of a page; further ones are on the next
PROGRESS_SECONDS = 0.5


def show_search(asked: PageRequest) -> PageResponse:
    """Show the form and an empty table, which the page fills from the events of `search_runs`."""
    text, runs = asked.query.get("text", ""), asked.pool.list_runs()
    chosen = asked.query.get("run", "")
    indexed = None
    if text:
        SearchPattern(text)
        _read_place(asked)
    if chosen:
        with asked.pool.open(chosen) as reader:
            indexed = find_index(reader.directory, asked.pool.cache) is not None
    query = urlencode({name: value for name, value in asked.query.items() if value})
    values = {"text": text, "runs": runs, "chosen": chosen, "indexed": indexed, "query": query}
    return render_page("search.html", asked=asked, **values)


def search_runs(asked: PageRequest) -> PageWork:
    """Yield hits as rows of the table: of names, failures and answers first, then of transcripts."""
    pattern = SearchPattern(asked.query.get("text", ""))
    work = _PageSearch(asked, pattern, *_read_place(asked))
    yield from work.search()


class _PageSearch:
    """A search for one page."""

    def __init__(self, asked: PageRequest, pattern: SearchPattern, run: str, after: TurnPlace) -> None:
        self._asked = asked
        self._pattern = pattern
        self._first = run  # where an earlier page ended
        self._after = after
        self._hits = 0
        self._bytes = self._attempts = 0  # of the runs before the current one
        self._told = self._begun = time.monotonic()
        self._row = load_templates().get_template("search_hit.html")

    def search(self) -> PageWork:
        for found in self._list_runs():
            try:
                yield from self._search_run(found)
            except (HoldwaterError, OSError) as error:
                yield PageEvent("problem", f"{found.name}: {error}")
            if self._hits >= MOST_HITS:
                return
        yield PageEvent("end", f"{self._describe()}. That is all.")

    def _list_runs(self) -> Iterator[FoundRun]:
        chosen = self._asked.query.get("run", "")
        runs = [self._asked.pool.find(chosen)] if chosen else self._asked.pool.list_runs()
        return dropwhile(lambda found: self._first not in ("", found.id), runs)

    def _search_run(self, found: FoundRun) -> PageWork:
        continues = found.id == self._first
        with self._asked.pool.open(found.id) as reader:
            for hit in () if continues else find_rows(reader, self._pattern):
                yield self._render(found, hit)
            after = self._after if continues else START
            with open_search(reader, self._pattern, self._asked.pool.cache, after) as search:
                yield from self._search_transcripts(found, search)
                yield from (PageEvent("problem", f"{found.name}: {text}") for text in search.problems)

    def _search_transcripts(self, found: FoundRun, search: TranscriptSearch) -> PageWork:
        for hit in search.find_hits():
            if hit is not None:
                yield self._render(found, hit)
                self._hits += 1
                if self._hits >= MOST_HITS:
                    place = f"{found.id}.{hit.attempt}.{hit.turn}"
                    yield PageEvent("more", self._asked.change(after=place))
                    return
            if time.monotonic() >= self._told + PROGRESS_SECONDS:
                self._told = time.monotonic()
                yield PageEvent("progress", self._describe(search))
            else:
                yield None
        self._bytes += search.bytes
        self._attempts += search.attempts

    def _render(self, found: FoundRun, hit: SearchHit) -> PageEvent:
        several = not self._asked.query.get("run")
        return PageEvent("hit", self._row.render(run=found, hit=hit, several=several))

    def _describe(self, search: TranscriptSearch | None = None) -> str:
        attempts, read = self._attempts, self._bytes
        if search is not None:
            attempts, read = attempts + search.attempts, read + search.bytes
        seconds = time.monotonic() - self._begun
        return f"{format_count(attempts, 'attempt')}, {size(read)} read in {seconds:.1f} s"


def build_search_index(asked: PageRequest) -> PageWork:
    """Build the index of a run, or bring it up to date, and yield the progress."""
    check_form(asked)
    told = 0.0
    with asked.pool.open(asked.query.get("run", "")) as reader:
        total = reader.counts().attempts
        for progress in build_index(reader, asked.pool.cache):
            if progress.note:
                yield PageEvent("problem", progress.note)
            elif time.monotonic() >= told + PROGRESS_SECONDS:
                told = time.monotonic()
                yield PageEvent(
                    "progress", f"{progress.attempts} of {total} attempts, {size(progress.bytes)}"
                )
            else:
                yield None
    yield PageEvent("end", "the index is complete")


def _read_place(asked: PageRequest) -> tuple[str, TurnPlace]:
    """Return the run and the turn after which the search goes on."""
    text = asked.query.get("after", "")
    if not text:
        return "", START
    run, *numbers = text.split(".")
    if len(numbers) != 2 or not all(number.isdecimal() and len(number) < 19 for number in numbers):
        raise BadInput(f"invalid position in the search: `{text[:100]}`")
    return run, (int(numbers[0]), int(numbers[1]))
