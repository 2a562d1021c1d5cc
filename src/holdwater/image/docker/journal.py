"""The journal of everything that a run has put on a daemon: a file of JSON lines, locked by the live run.

The journal survives the run: a journal with a free lock belongs to a dead run, and `janitor.py` removes the
objects that it lists. This module makes no decisions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from ...core.records import Record
from ...ledger.durable_files import lock_file, replace_file, write_all
from .ownership import BuildTrace, OwnedBase, merge_traces

SUFFIX = ".jsonl"
MOST_TRACES = 100  # traces that pass from run to run
_PLAIN = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")


class BasePulled(Record, frozen=True, tag="pulled"):
    """The run pulls a base that was absent from the daemon."""

    base: OwnedBase


class TagCreated(Record, frozen=True, tag="named"):
    """The run creates a tag outside of holdwater's namespace that was absent."""

    reference: str


class ReferenceGone(Record, frozen=True, tag="gone"):
    """A base or tag is removed, or no longer owned: a later image with this name belongs to its creator."""

    reference: str


class BuildBegun(Record, frozen=True, tag="begun"):
    build: int
    trace: BuildTrace


class BuildEnded(Record, frozen=True, tag="ended"):
    build: int
    at: float
    whole: bool


class DiskBaseline(Record, frozen=True, tag="found"):
    """Bytes used on the daemon's disk when the run began; the run may own any later growth."""

    used: int


JournalLine = BasePulled | TagCreated | ReferenceGone | BuildBegun | BuildEnded | DiskBaseline


class JournalContents(msgspec.Struct):
    """The state that a journal's lines add up to."""

    bases: dict[str, OwnedBase] = msgspec.field(default_factory=dict)
    names: dict[str, None] = msgspec.field(default_factory=dict)
    traces: dict[int, BuildTrace] = msgspec.field(default_factory=dict)  # bound: builds that do not overlap
    disk_used: int | None = None

    def apply_line(self, line: JournalLine) -> None:
        match line:
            case BasePulled(base):
                self.bases[base.reference] = base
            case TagCreated(reference):
                self.names[reference] = None
            case ReferenceGone(reference):
                self.bases.pop(reference, None)
                self.names.pop(reference, None)
            case BuildBegun(build, trace):
                self.traces[build] = trace
            case DiskBaseline(used):
                self.disk_used = used
            case BuildEnded(build, at, whole):
                if build in self.traces:
                    self._end_build(build, msgspec.structs.replace(self.traces[build], ended=at, whole=whole))

    def _end_build(self, build: int, trace: BuildTrace) -> None:
        """Merge the trace with those of concurrent builds, because a run may have thousands of builds."""
        for other, earlier in list(self.traces.items()):
            if other != build and (both := merge_traces(trace, earlier)) is not None:
                trace = both
                del self.traces[other]
        self.traces[build] = trace


class DaemonJournal:
    """The journal of one run: locked from construction until `close`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self.contents = read_journal(path)

    def write(self, line: JournalLine) -> None:
        """Append a line; it survives the death of this process once this returns."""
        write_all(self._fd, msgspec.json.encode(line) + b"\n")
        self.contents.apply_line(line)

    def close(self, *, remove: bool) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def slug(run: str) -> str:
    """Return a run's name for files and repositories: the name itself if it is valid, otherwise a hash."""
    return run if _PLAIN.fullmatch(run) and len(run) <= 64 else sha256(run.encode()).hexdigest()[:16]


def lock_journal(path: Path) -> DaemonJournal | None:
    """Open or create the journal and lock it; None: a live run holds the lock."""
    fd = lock_file(path)
    return None if fd is None else DaemonJournal(path, fd)


def open_journal(state: Path, run: str) -> DaemonJournal:
    """Return a locked journal for this run; a second process of the run gets a numbered name."""
    name, number = slug(run), 1
    while (journal := lock_journal(state / f"{name}{SUFFIX}")) is None:
        number += 1
        name = f"{slug(run)}-{number}"
    return journal


def read_journal(path: Path) -> JournalContents:
    """Return the contents of a journal, without a line that a crash cut off."""
    told = JournalContents()
    with path.open("rb") as lines:
        for line in lines:
            try:
                told.apply_line(_line_decoder.decode(line))
            except msgspec.DecodeError:
                continue
    return told


def read_retained(path: Path) -> JournalContents:
    """Return the contents that ended runs left on purpose: an unlocked journal that only janitors change."""
    return read_journal(path) if path.exists() else JournalContents()


def write_retained(path: Path, bases: Iterable[OwnedBase], traces: Iterable[BuildTrace]) -> None:
    """Replace the file: retained bases, and traces of builds whose records were still needed by others."""
    newest = sorted(traces, key=lambda trace: trace.begun)[-MOST_TRACES:]
    lines: list[JournalLine] = [BasePulled(base) for base in bases]
    lines += [BuildBegun(number, trace) for number, trace in enumerate(newest)]
    replace_file(path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


# Created at import: msgspec crashes when two threads use a new type for the first time at once.
_line_decoder = msgspec.json.Decoder(JournalLine)
