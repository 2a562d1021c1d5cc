"""Decide which objects on a docker daemon belong to holdwater, and which idle bases stay. Pure.

A build-cache record does not name the build that made it. It shows only its creation time, its RUN command,
its size and its parents. Each build of holdwater therefore journals a trace of these facts before it starts.
A record counts as own only if it was created while such a build ran and matches the build's trace, or if it
is a child or a parent of such a record. The record of a base's layer (`from local`) counts as own if it was
created in that time and no foreign record is built from it: an image that has the layer keeps the layer.
`janitor.py` removes the objects.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import sha256

import msgspec

from ...core.records import Record
from ...docker.build import CacheRecord

SLACK = 10.0  # seconds in which a daemon may still make records for an interrupted build
UNFINISHED = 3600.0  # seconds in which a build without a recorded end may have made records
SOURCE_KIND = "source.local"

_COMMAND_END = "(?:-c|exec|RUN){}(?:withid.*)?$"  # how a description ends, without white space
_FLAG = re.compile(r"^--\w[\w-]*(?:=\S*)?\s+")


class OwnedBase(Record, frozen=True):
    """A base image on the daemon that a run of holdwater pulled."""

    reference: str  # `repository@sha256:...`
    chain: tuple[str, ...] = ()  # a short hash for each layer together with all layers below it
    size: int = 0  # bytes, unpacked; 0: not measured yet
    used: float = 0.0  # time of the last use, in seconds since the epoch
    warm: bool = False  # an earlier run retained it


def chain_of(diff_ids: Iterable[str]) -> tuple[str, ...]:
    """Return one hash per layer, each of the layer together with all layers below it."""
    found: list[str] = []
    for diff_id in diff_ids:
        below = found[-1] if found else ""
        found.append(sha256(f"{below} {diff_id}".encode()).hexdigest()[:16])
    return tuple(found)


def choose_kept_bases(
    idle: Collection[OwnedBase], busy: Iterable[OwnedBase], planned: Counter[str], cap: int
) -> set[str]:
    """Return the idle bases to keep: one for each chain that several planned images share, within the cap.

    A busy base holds its chain already. Of two bases that hold the same chain, the smaller one stays. Bases
    that an earlier run retained stay as far as the cap allows. A base of unknown size is not kept.
    """
    held = {link for base in busy for link in base.chain}
    kept: set[str] = set()
    worth = [(base, shared) for base in idle if (shared := [x for x in base.chain if planned[x] > 1])]
    for base, shared in sorted(worth, key=lambda one: (-len(one[1]), one[0].size, one[0].reference)):
        if shared[-1] not in held and 0 < base.size <= cap:
            kept.add(base.reference)
            held.update(base.chain)
            cap -= base.size
    for base in sorted(idle, key=lambda one: -one.used):
        if base.warm and base.reference not in kept and 0 < base.size <= cap:
            kept.add(base.reference)
            cap -= base.size
    return kept


class BuildTrace(Record, frozen=True):
    """The facts about one of holdwater's builds that identify its records in the build cache."""

    begun: float  # seconds since the epoch, on the daemon's clock
    commands: tuple[str, ...] = ()  # the commands of the RUN steps
    sizes: tuple[int, ...] = ()  # bytes of the files that each ADD or COPY adds
    sources: tuple[int, ...] = ()  # bytes that the client sends to the builder: Dockerfile, context
    ended: float | None = None
    whole: bool = False  # the build finished, so everything was sent

    def covers(self, record: CacheRecord) -> bool:
        until = self.begun + UNFINISHED if self.ended is None else self.ended
        return self.begun <= record.created <= until + (0.0 if self.whole else SLACK)

    def matches(self, record: CacheRecord) -> bool:
        """Return whether a build with this trace makes such a record."""
        if record.kind == SOURCE_KIND:
            if record.size in (0, *self.sources):
                return True
            return not self.whole and record.size <= max(self.sources, default=0)
        if "fileop" in record.description or " ADD " in record.description:
            return record.size in self.sizes
        said = strip_whitespace(record.description)
        return any(re.search(_COMMAND_END.format(re.escape(command)), said) for command in self.commands)


def merge_traces(one: BuildTrace, other: BuildTrace) -> BuildTrace | None:
    """Return one trace for both, if the builds were alike and overlapped in time; None otherwise."""
    if not (one.whole and other.whole) or one.ended is None or other.ended is None:
        return None
    if (one.commands, one.sizes, one.sources) != (other.commands, other.sizes, other.sources):
        return None
    if max(one.begun, other.begun) > min(one.ended, other.ended):
        return None
    begun, ended = min(one.begun, other.begun), max(one.ended, other.ended)
    return msgspec.structs.replace(one, begun=begun, ended=ended)


def parse_commands(steps: Iterable[str]) -> tuple[str, ...]:
    """Return the commands of the RUN lines in the form of `BuildTrace.commands`."""
    found = []
    for step in filter(str.strip, steps):
        word, *more = step.split(maxsplit=1)
        if word.upper() != "RUN" or not more:
            continue
        rest = more[0].strip()
        while flag := _FLAG.match(rest):
            rest = rest[flag.end() :]
        found.append(strip_whitespace(_join_argv(rest)))
    return tuple(found)


def strip_whitespace(text: str) -> str:
    """Return the text without white space and line continuations, which each builder prints differently."""
    return re.sub(r"\\\n|\s", "", text)


def find_own_records(records: Sequence[CacheRecord], traces: Sequence[BuildTrace]) -> list[CacheRecord]:
    """Return the records of builds with these traces, children first, without ancestors of foreign ones."""
    inside = {record.id: record for record in records if any(trace.covers(record) for trace in traces)}
    found = {
        record.id
        for record in inside.values()
        if any(trace.covers(record) and trace.matches(record) for trace in traces)
    }
    _add_relatives(inside, found)
    found |= {record.id for record in inside.values() if _is_base_layer(record)}
    _drop_needed(records, found)
    return _sort_children_first([inside[one] for one in found])


def find_unfinished(records: Sequence[CacheRecord], traces: Sequence[BuildTrace]) -> list[BuildTrace]:
    """Return the traces that may still have a record in the cache, which a foreign build or image uses."""
    return [
        trace
        for trace in traces
        if any(trace.covers(one) and (trace.matches(one) or _is_base_layer(one)) for one in records)
    ]


def _is_base_layer(record: CacheRecord) -> bool:
    return record.description.startswith(("from local", "pulled from"))


def _add_relatives(inside: dict[str, CacheRecord], found: set[str]) -> None:
    """Add the descendants of the found records, then all their ancestors, if created in the same time."""
    while more := {r.id for r in inside.values() if found.intersection(r.parents)} - found:
        found |= more
    while more := {p for one in found for p in inside[one].parents if p in inside} - found:
        found |= more


def _drop_needed(records: Sequence[CacheRecord], found: set[str]) -> None:
    """Drop records that are in use, and all ancestors of records that are in use or foreign."""
    while True:
        needed = {parent for record in records if record.id not in found for parent in record.parents}
        kept = {r.id for r in records if r.id in found and (r.in_use or r.id in needed)}
        if not kept:
            return
        found -= kept


def _sort_children_first(records: list[CacheRecord]) -> list[CacheRecord]:
    left = {record.id: record for record in records}
    order: list[CacheRecord] = []
    while left:
        parents = {parent for record in left.values() for parent in record.parents}
        leaves = [record for record in left.values() if record.id not in parents] or list(left.values())
        order += leaves
        for record in leaves:
            del left[record.id]
    return order


def _join_argv(text: str) -> str:
    """Return the words of the exec form as a builder prints them; any other form unchanged."""
    if not text.startswith("["):
        return text
    try:
        return " ".join(json.loads(text))
    except (ValueError, TypeError):
        return text
