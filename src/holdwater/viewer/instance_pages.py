"""The table of instances, and one instance with its attempts, their logs and their files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..core.errors import BadInput
from ..core.records import Verdict
from ..ledger.attempt_files import COMPRESSED_SUFFIX, attempt_files, patch_path
from ..ledger.directory import RunDirectory
from ..ledger.listing import SORTS, ListedSample, SampleFilter, SampleList, list_places, list_tags
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, EventRow
from .page import LONGEST_TEXT, OCTETS, PageRequest, PageResponse, render_page

PAGE_SIZE = 50
LOG_BYTES = 64 * 1024
MOST_ATTEMPTS = 50
MOST_EVENTS = 20
FILTERS = ("kind", "place", "failure", "name", "text", "tag")


def show_instances(asked: PageRequest) -> PageResponse:
    wanted = read_filter(asked)
    with asked.pool.open(asked.run) as reader:
        samples = SampleList(reader, wanted)
        before, after = asked.query.get("before", ""), asked.query.get("after", "")
        rows = samples.read_page(PAGE_SIZE + 1, before or after, backwards=bool(before))
        more = len(rows) > PAGE_SIZE
        rows = rows[-PAGE_SIZE:] if before else rows[:PAGE_SIZE]
        found = samples.count()
        kinds = reader.counts().outcomes
        several = reader.config.samples > 1
        places, tags = list_places(reader), list_tags(reader)
    values = {
        "rows": rows,
        "more": more,
        "found": found,
        "kinds": kinds,
        "several": several,
        "places": places,
        "tags": tags,
    }
    template = "instance_rows.html" if asked.fragment else "instances.html"
    return render_page(template, asked=asked, run=asked.run, wanted=wanted, sorts=SORTS, **values)


def read_filter(asked: PageRequest) -> SampleFilter:
    texts = {name: asked.query.get(name, "") for name in FILTERS}
    return SampleFilter(
        **texts, sort=asked.query.get("sort", "planned"), descending=asked.query.get("order") == "down"
    )


class KeptEntry(NamedTuple):
    """A file of an attempt."""

    name: str
    size: int
    is_log: bool


class ShownAttempt(NamedTuple):
    """An attempt on the page of its instance."""

    row: AttemptRow
    verdict: Verdict | None  # of kept work, with the usage of the attempt in which the agent acted
    events: list[EventRow]
    patch: list[tuple[str, str]]  # its lines, each with the kind of the change
    files: list[KeptEntry]


def show_instance(asked: PageRequest) -> PageResponse:
    name, sample = asked.parts["instance"], asked.read_number("sample")
    with asked.pool.open(asked.run) as reader:
        instance = reader.find_instance(name)
        if instance is None:
            raise BadInput(f"no such instance in the run: `{name[:200]}`")
        samples = SampleList(reader, read_filter(asked))
        row = samples.find(instance.id, sample)
        rows = [found for found in reader.attempts(instance.id) if found.sample == sample][-MOST_ATTEMPTS:]
        values: dict[str, Any] = {
            "instance": instance,
            "row": row,
            "attempts": [_read_attempt(reader, found) for found in rows],
            "samples": reader.config.samples,
            "previous": _find_neighbour(samples, row, backwards=True),
            "following": _find_neighbour(samples, row, backwards=False),
        }
    return render_page("instance.html", asked=asked, run=asked.run, sample=sample, **values)


def _find_neighbour(samples: SampleList, row: ListedSample | None, *, backwards: bool) -> ListedSample | None:
    """Return the row before or after this one in the filtered list."""
    if row is None:
        return None
    found = samples.read_page(1, row.cursor, backwards=backwards)
    return found[0] if found else None


def _read_attempt(reader: LedgerReader, row: AttemptRow) -> ShownAttempt:
    return ShownAttempt(
        row=row,
        verdict=reader.whole_verdict(row.attempt) if row.verdict is not None else None,
        events=reader.events(last=MOST_EVENTS, attempt=row.attempt),
        patch=list(_color_diff(_read_patch(reader.directory, row.attempt))),
        files=list(_list_entries(reader.directory, row)),
    )


def _read_patch(directory: RunDirectory, attempt: int) -> str:
    try:
        with patch_path(directory, attempt).open("rb") as file:
            return file.read(LONGEST_TEXT).decode("utf-8", "replace")
    except OSError:
        return ""


def _color_diff(text: str) -> Iterator[tuple[str, str]]:
    kinds = {"+": "added", "-": "removed", "@": "place"}
    for line in text.splitlines():
        yield ("file" if line.startswith("diff ") else kinds.get(line[:1], "")), line


def _list_entries(directory: RunDirectory, row: AttemptRow) -> Iterator[KeptEntry]:
    for path in attempt_files(directory, row.attempt, row.instance):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            yield KeptEntry(path.name, status.st_size, path.parent == directory.logs)


def show_log(asked: PageRequest) -> PageResponse:
    """Show a window of a log, at first its end."""
    path = _find_entry(asked)
    if path.name.endswith(COMPRESSED_SUFFIX):
        raise BadInput(f"the log is compressed: `{path.name}`", "download it, or `zstdcat` it")
    with open_entry(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, min(asked.read_number("from", size - LOG_BYTES), size))
        file.seek(start)
        text = file.read(LOG_BYTES).decode("utf-8", "replace")
    values = {"name": path.name, "text": text, "start": start, "size": size, "step": LOG_BYTES}
    return render_page("log.html", asked=asked, run=asked.run, **values)


def send_file(asked: PageRequest) -> PageResponse:
    """Send a file of an attempt as a download."""
    path = _find_entry(asked)
    return PageResponse(b"", OCTETS, charset=None, file=path)


def _find_entry(asked: PageRequest) -> Path:
    """Return the path of a file of an attempt by its name; no name leads to another file."""
    with asked.pool.open(asked.run) as reader:
        row = find_attempt_row(reader, asked.read_part("attempt"))
        for path in attempt_files(reader.directory, row.attempt, row.instance):
            if path.name == asked.query.get("name") and stat.S_ISREG(path.lstat().st_mode):
                return path
    raise BadInput("the attempt has no such file, or it is not kept")


def open_entry(path: Path) -> BinaryIO:
    """Open a file of an attempt; a link is not followed."""
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError:
        raise BadInput(f"the file cannot be read: `{path.name}`") from None


def find_attempt_row(reader: LedgerReader, attempt: int) -> AttemptRow:
    found = reader.attempt(attempt)
    if found is None:
        raise BadInput(f"the run has no attempt {attempt}")
    return found
