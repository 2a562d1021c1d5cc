"""The files of an attempt: logs with their growing end and search, downloads, and the files in its salvage.

Files are read in pieces, compressed ones too. A name from an address only selects among the files that exist.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from ..core.errors import BadInput, HoldwaterError, LedgerCorrupt
from ..ledger.attempt_files import COMPRESSED_SUFFIX, attempt_files, salvage_path, taken_out_path
from ..ledger.reader import LedgerReader
from ..ledger.record_encoding import open_expanded
from ..ledger.rows import AttemptRow
from ..sandbox.salvage_archive import open_archive, read_members
from .page import OCTETS, PageRequest, PageResponse, render_page

LOG_BYTES = 64 * 1024  # of a window
PIECE = 1 << 18
MOST_HITS = 100
LONGEST_LINE = 300  # bytes of a line that are shown around a hit
MOST_ENTRIES = 2000  # of an archive


class LogHit(NamedTuple):
    """A place in a log."""

    at: int  # byte
    before: str
    found: str
    after: str


class SalvagedEntry(NamedTuple):
    """An entry of a salvage, or of the files that the suite took out of the sandbox."""

    path: str
    size: int
    kind: str  # `file`, `link`, `directory`, `deleted` or `other`
    target: str = ""  # of a link


def show_log(asked: PageRequest) -> PageResponse:
    """Show a window of a log, at first its end."""
    path = find_entry(asked)
    with open_log(path) as file:
        size = measure_log(path, file)
        start = max(0, min(asked.read_number("from", size - LOG_BYTES), size))
        text = read_window(file, start).decode("utf-8", "replace")
    values = {"name": path.name, "text": text, "start": start, "size": size, "step": LOG_BYTES}
    end = min(start + LOG_BYTES, size)
    template = "log_part.html" if asked.fragment else "log.html"
    return render_page(
        template, asked=asked, run=asked.run, attempt=asked.read_part("attempt"), end=end, **values
    )


def find_in_log(asked: PageRequest) -> PageResponse:
    """Search a whole log for a text; upper and lower case of ASCII are the same."""
    path, query = find_entry(asked), asked.query.get("q", "").strip()[:500]
    hits: list[LogHit] = []
    if query:
        with open_log(path) as file:
            for hit in search_file(file, query):
                hits.append(hit)
                if len(hits) == MOST_HITS:
                    break
    values = {"hits": hits, "query": query, "name": path.name, "most": MOST_HITS}
    return render_page(
        "log_hits.html", asked=asked, run=asked.run, attempt=asked.read_part("attempt"), **values
    )


def search_file(file: BinaryIO, query: str) -> Iterator[LogHit]:
    """Yield the places that have a text, from the beginning; one piece and its neighbour are in memory."""
    needle = query.lower().encode("utf-8", "replace")
    margin = LONGEST_LINE + len(needle)
    base, text, done = 0, b"", 0  # `base`: the byte where `text` begins; hits before `done` are known
    while True:
        piece = file.read(PIECE)
        text += piece
        limit = len(text) - margin if piece else len(text)
        lowered, at = text.lower(), done - base
        while 0 <= (found := lowered.find(needle, at)) < limit:
            yield _make_hit(text, found, len(needle), base)
            at = found + len(needle)
        if not piece:
            return
        done = base + max(at, limit)
        kept = max(0, limit - LONGEST_LINE)
        base, text = base + kept, text[kept:]


def _make_hit(text: bytes, at: int, length: int, base: int) -> LogHit:
    before = text[max(0, at - LONGEST_LINE) : at].rpartition(b"\n")[2]
    after = text[at + length : at + length + LONGEST_LINE].partition(b"\n")[0]
    parts = (part.decode("utf-8", "replace") for part in (before, text[at : at + length], after))
    return LogHit(base + at, *parts)


@contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """Open a log for reading, decompressed if it is compressed."""
    try:
        with open_entry(path) as file, open_expanded(file, squeezed=path.suffix == COMPRESSED_SUFFIX) as log:
            yield log
    except zstandard.ZstdError as error:
        raise LedgerCorrupt(f"the log is damaged: `{path.name}`: {error}") from None


def measure_log(path: Path, file: BinaryIO) -> int:
    """Return the bytes of an open log. A compressed one is read to its end."""
    if path.suffix != COMPRESSED_SUFFIX:
        return os.fstat(file.fileno()).st_size
    with open_log(path) as log:
        return sum(len(piece) for piece in iter(lambda: log.read(PIECE), b""))


def read_window(file: BinaryIO, start: int) -> bytes:
    """Return the bytes of a window of an open log."""
    file.seek(start)
    return file.read(LOG_BYTES)


def send_file(asked: PageRequest) -> PageResponse:
    """Send a file of an attempt as a download."""
    return PageResponse(b"", OCTETS, charset=None, file=find_entry(asked))


def list_salvaged(asked: PageRequest) -> PageResponse:
    """List the files in an attempt's salvage and those that the suite took out of its sandbox."""
    with asked.pool.open(asked.run) as reader:
        row = find_attempt_row(reader, asked.read_part("attempt"))
        archive = salvage_path(reader.directory, row.attempt)
        beside = taken_out_path(reader.directory, row.attempt)
    entries = chain(
        _list_archive(archive) if archive.exists() else (),
        _list_directory(beside) if beside.is_dir() and not beside.is_symlink() else (),
    )
    values = {"entries": list(islice(entries, MOST_ENTRIES)), "hidden": sum(1 for _ in entries)}
    return render_page("salvage.html", run=asked.run, attempt=row.attempt, **values)


def send_salvaged(asked: PageRequest) -> PageResponse:
    """Send one file out of an attempt's salvage."""
    with asked.pool.open(asked.run) as reader:
        row = find_attempt_row(reader, asked.read_part("attempt"))
        archive = salvage_path(reader.directory, row.attempt)
        beside = taken_out_path(reader.directory, row.attempt)
    path = asked.query.get("path", "")
    name = path.rpartition("/")[2]
    for found in _walk_directory(beside) if path.startswith(f"{beside.name}/") else ():
        if f"{beside.name}/{found.relative_to(beside)}" == path:
            return PageResponse(b"", OCTETS, charset=None, file=found)
    if not archive.exists():
        raise BadInput("the attempt has no such file, or it is not kept")
    return PageResponse(b"", OCTETS, charset=None, pieces=_read_member(archive, path), name=name)


def _list_archive(archive: Path) -> Iterator[SalvagedEntry]:
    try:
        with open_archive(archive) as tar:
            for member in read_members(tar):
                yield from _describe_member(tar, member)
    except HoldwaterError as error:
        raise LedgerCorrupt(f"the salvage is damaged: `{archive.name}`: {error.message}") from None


def _describe_member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[SalvagedEntry]:
    if not member.name.startswith("work/"):
        listed = tar.extractfile(member)
        content = listed.read(PIECE) if listed is not None else b""
        kind = "deleted" if member.name == "deleted" else "left out"
        for path in content.split(b"\0")[:-1]:
            yield SalvagedEntry(path.decode("utf-8", "replace"), 0, kind)
        return
    is_link = member.issym() or member.islnk()
    kind = "file" if member.isreg() else "link" if is_link else "directory" if member.isdir() else "other"
    yield SalvagedEntry(member.name.removeprefix("work/"), member.size, kind, member.linkname)


def _read_member(archive: Path, path: str) -> Iterator[bytes]:
    with open_archive(archive) as tar:
        for member in read_members(tar):
            if member.isreg() and member.name == f"work/{path}":
                content = tar.extractfile(member)
                assert content is not None
                while piece := content.read(PIECE):
                    yield piece
                return
    raise BadInput("the salvage has no such file")


def _list_directory(directory: Path) -> Iterator[SalvagedEntry]:
    for path in _walk_directory(directory):
        yield SalvagedEntry(f"{directory.name}/{path.relative_to(directory)}", path.lstat().st_size, "file")


def _walk_directory(directory: Path) -> Iterator[Path]:
    """Yield the regular files below a directory; links are not followed."""
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            path = Path(folder, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def find_entry(asked: PageRequest) -> Path:
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
