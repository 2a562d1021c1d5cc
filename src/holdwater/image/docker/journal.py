"""What a run has put on a daemon, line by line in a file that the living run holds a lock of.

It survives the run: a journal whose lock is free belongs to a dead one, and `janitor.py` removes what it
tells of. Nothing is decided here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import msgspec

from ...core.records import Record
from ...ledger.private import write_private
from .locks import locked
from .traces import Trace, merged
from .warmth import Holding

SUFFIX = ".jsonl"
MOST_TRACES = 100  # that are handed on from run to run
_PLAIN = re.compile(r"[a-z0-9]+(?:[._-][a-z0-9]+)*")


class Pulled(Record, frozen=True, tag="pulled"):
    """A base that was not on the daemon before."""

    base: Holding


class Named(Record, frozen=True, tag="named"):
    """A tag outside of our own name space that was not there before."""

    reference: str


class Gone(Record, frozen=True, tag="gone"):
    """One of these is not there any more, or not ours: whoever has it from now on owns it."""

    reference: str


class Begun(Record, frozen=True, tag="begun"):
    build: int
    trace: Trace


class Ended(Record, frozen=True, tag="ended"):
    build: int
    at: float
    whole: bool


class Found(Record, frozen=True, tag="found"):
    """Bytes that were used on the daemon's disk when the run began: what came since may be its own."""

    used: int


Line = Pulled | Named | Gone | Begun | Ended | Found


class Told(msgspec.Struct):
    """What a journal's lines come to."""

    bases: dict[str, Holding] = msgspec.field(default_factory=dict)
    names: dict[str, None] = msgspec.field(default_factory=dict)
    traces: dict[int, Trace] = msgspec.field(default_factory=dict)  # bound: builds apart from each other
    found: int | None = None

    def take(self, line: Line) -> None:
        match line:
            case Pulled(base):
                self.bases[base.reference] = base
            case Named(reference):
                self.names[reference] = None
            case Gone(reference):
                self.bases.pop(reference, None)
                self.names.pop(reference, None)
            case Begun(build, trace):
                self.traces[build] = trace
            case Found(used):
                self.found = used
            case Ended(build, at, whole):
                if build in self.traces:
                    self._end(build, msgspec.structs.replace(self.traces[build], ended=at, whole=whole))

    def _end(self, build: int, trace: Trace) -> None:
        """Builds one beside the other have one trace in the end: there may be thousands of them."""
        for other, earlier in list(self.traces.items()):
            if other != build and (both := merged(trace, earlier)) is not None:
                trace = both
                del self.traces[other]
        self.traces[build] = trace


class Journal:
    """A run's own: locked from its making until `close`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self.told = read(path)

    def write(self, line: Line) -> None:
        """On disk when this returns, as far as the death of this process goes."""
        content = msgspec.json.encode(line) + b"\n"
        while content:
            content = content[os.write(self._fd, content) :]
        self.told.take(line)

    def close(self, *, remove: bool) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def slug(run: str) -> str:
    """The run's name as a file's and a repository's: its own where it can be that."""
    return run if _PLAIN.fullmatch(run) and len(run) <= 64 else sha256(run.encode()).hexdigest()[:16]


def taken(path: Path) -> Journal | None:
    """The journal there, made if need be, with its lock; None: a living run has it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        if not locked(fd):
            os.close(fd)
            return None
        try:
            current = os.path.samestat(os.fstat(fd), path.stat())
        except FileNotFoundError:
            current = False
        if current:
            return Journal(path, fd)
        os.close(fd)  # its last owner removed it between the two


def opened(state: Path, run: str) -> Journal:
    """A journal of this run's own: with another process of the same run, under a name beside it."""
    name, number = slug(run), 1
    while True:
        found = taken(state / f"{name}{'' if number == 1 else f'-{number}'}{SUFFIX}")
        if found is not None:
            return found
        number += 1


def read(path: Path) -> Told:
    """What a journal tells; a line that was cut off by a death is left out."""
    told = Told()
    with path.open("rb") as lines:
        for line in lines:
            try:
                told.take(_lines.decode(line))
            except msgspec.DecodeError:
                continue
    return told


def bequeathed(path: Path) -> Told:
    """What runs that ended left on purpose: a journal with nobody's lock, changed by a janitor alone."""
    return read(path) if path.exists() else Told()


def bequeath(path: Path, bases: Iterable[Holding], traces: Iterable[Trace]) -> None:
    """Put these in its place: bases that stay warm, and traces of what others needed at the time."""
    newest = sorted(traces, key=lambda trace: trace.begun)[-MOST_TRACES:]
    lines: list[Line] = [Pulled(base) for base in bases]
    lines += [Begun(number, trace) for number, trace in enumerate(newest)]
    new = path.with_name(path.name + ".new")
    write_private(new, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    new.replace(path)


# Made at import: msgspec crashes when two threads meet a type for the first time at once.
_lines = msgspec.json.Decoder(Line)
