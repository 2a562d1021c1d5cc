"""Which records of a build cache are ours. Pure: records and traces in, records out; `janitor.py` acts.

A record carries no name of its maker. What can be told of one: when it was made, its RUN command, its size
and what it was made from. So each build of ours leaves a trace of that beforehand, and a record is taken for
ours only if it was made while a build of ours ran and looks like what that build makes, or is built from such
a record or under one. A record of a base's own layer (`from local`) is ours if it was made then and nothing
of anybody else is built from it: an image that has the layer keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

import msgspec

from ...core.records import Record
from ...docker.cache import CacheRecord

SLACK = 10.0  # seconds in which a daemon still makes something of a build that was broken off
UNFINISHED = 3600.0  # seconds in which a build whose end nobody saw may have made something
SOURCE = "source.local"

_SAID = "(?:-c|exec|RUN){}(?:withid.*)?$"  # how a description ends, once squeezed
_FLAG = re.compile(r"^--\w[\w-]*(?:=\S*)?\s+")


class Trace(Record, frozen=True):
    """What is known of a build of ours: enough to find again what it leaves."""

    begun: float  # seconds since the epoch, on the daemon's clock
    commands: tuple[str, ...] = ()  # of its RUN steps
    sizes: tuple[int, ...] = ()  # bytes of files that it adds
    sources: tuple[int, ...] = ()  # bytes of what is sent to be built: its Dockerfile, its context
    ended: float | None = None
    whole: bool = False  # it came to its end, and everything was sent

    def covers(self, record: CacheRecord) -> bool:
        until = self.begun + UNFINISHED if self.ended is None else self.ended
        return self.begun <= record.created <= until + (0.0 if self.whole else SLACK)

    def tells_of(self, record: CacheRecord) -> bool:
        """Whether a build with this trace makes such a record."""
        if record.kind == SOURCE:
            if record.size in (0, *self.sources):
                return True
            return not self.whole and record.size <= max(self.sources, default=0)
        if "fileop" in record.description or " ADD " in record.description:
            return record.size in self.sizes
        said = squeezed(record.description)
        return any(re.search(_SAID.format(re.escape(command)), said) for command in self.commands)


def merged(one: Trace, other: Trace) -> Trace | None:
    """Both as one, where they tell the same of a time that is one."""
    if not (one.whole and other.whole) or one.ended is None or other.ended is None:
        return None
    if (one.commands, one.sizes, one.sources) != (other.commands, other.sizes, other.sources):
        return None
    if max(one.begun, other.begun) > min(one.ended, other.ended):
        return None
    begun, ended = min(one.begun, other.begun), max(one.ended, other.ended)
    return msgspec.structs.replace(one, begun=begun, ended=ended)


def commands_of(steps: Iterable[str]) -> tuple[str, ...]:
    """The commands of RUN lines, as `Trace` keeps them."""
    found = []
    for step in filter(str.strip, steps):
        word, *more = step.split(maxsplit=1)
        if word.upper() != "RUN" or not more:
            continue
        rest = more[0].strip()
        while flag := _FLAG.match(rest):
            rest = rest[flag.end() :]
        found.append(squeezed(_argv(rest)))
    return tuple(found)


def squeezed(text: str) -> str:
    """Without white space and line continuations, which a builder sets in its own way."""
    return re.sub(r"\\\n|\s", "", text)


def ours(records: Sequence[CacheRecord], traces: Sequence[Trace]) -> list[CacheRecord]:
    """The records that builds with these traces made, children first; none that others build upon."""
    inside = {record.id: record for record in records if any(trace.covers(record) for trace in traces)}
    found = {
        record.id
        for record in inside.values()
        if any(trace.covers(record) and trace.tells_of(record) for trace in traces)
    }
    _grow(inside, found)
    found |= {record.id for record in inside.values() if _of_a_base(record)}
    _withdraw(records, found)
    return _children_first([inside[one] for one in found])


def unfinished(records: Sequence[CacheRecord], traces: Sequence[Trace]) -> list[Trace]:
    """The traces of which a record is still there that may be theirs: others build upon it, or use it."""
    return [
        trace
        for trace in traces
        if any(trace.covers(one) and (trace.tells_of(one) or _of_a_base(one)) for one in records)
    ]


def _of_a_base(record: CacheRecord) -> bool:
    return record.description.startswith(("from local", "pulled from"))


def _grow(inside: dict[str, CacheRecord], found: set[str]) -> None:
    """First what is built from ours, then what all of it is built from, where it was made at that time."""
    while more := {r.id for r in inside.values() if found.intersection(r.parents)} - found:
        found |= more
    while more := {p for one in found for p in inside[one].parents if p in inside} - found:
        found |= more


def _withdraw(records: Sequence[CacheRecord], found: set[str]) -> None:
    """Leave out what is in use, and what is under it or under anything that is not ours."""
    while True:
        needed = {parent for record in records if record.id not in found for parent in record.parents}
        kept = {r.id for r in records if r.id in found and (r.in_use or r.id in needed)}
        if not kept:
            return
        found -= kept


def _children_first(records: list[CacheRecord]) -> list[CacheRecord]:
    left = {record.id: record for record in records}
    order: list[CacheRecord] = []
    while left:
        parents = {parent for record in left.values() for parent in record.parents}
        leaves = [record for record in left.values() if record.id not in parents] or list(left.values())
        order += leaves
        for record in leaves:
            del left[record.id]
    return order


def _argv(text: str) -> str:
    """The exec form's words, as a builder prints them; any other form as it is."""
    if not text.startswith("["):
        return text
    try:
        return " ".join(json.loads(text))
    except (ValueError, TypeError):
        return text
