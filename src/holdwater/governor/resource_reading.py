"""The records of one meter reading: memory bounds, file systems, pressure. `meter.py` fills them."""

from __future__ import annotations

from ..core.records import Record

SHORT_SHARE = 0.1  # share of the memory that a run could use: below this a node counts as short of memory


class ResourceBound(Record, frozen=True):
    """One memory limit that applies to us, and the use that counts against it, in bytes."""

    name: str  # `budget`, `container`, `pod`, `machine`
    limit: int
    used: int
    source: str  # source of the limit, for display

    @property
    def room(self) -> int:
        return max(0, self.limit - self.used)


class DiskReading(Record, frozen=True):
    """One file system that we write to, in bytes."""

    path: str
    free: int
    total: int  # 0: unknown, and `free` is meaningless
    memory: bool  # a tmpfs: its bytes are memory
    names: tuple[str, ...]  # our places on it: `run`, `scratch`, `temp`


class ResourceReading(Record, frozen=True):
    """One reading of the meter."""

    bounds: tuple[ResourceBound, ...]  # the tightest first; never empty
    disks: tuple[DiskReading, ...]  # in the order of the places
    pressure: float | None  # percent of the last 10 s in which some task waited for memory
    oom_kills: int  # OOM kills so far in our own group; a sandbox with its own group counts its own

    @property
    def bound(self) -> ResourceBound:
        """The tightest bound that applies now."""
        return self.holding[0]

    @property
    def holding(self) -> tuple[ResourceBound, ...]:
        """The bounds that apply now.

        A pod's request applies only while its node is short of memory, because only then pods are evicted.
        """
        machine = next((bound for bound in self.bounds if bound.name == "machine"), None)
        short = machine is not None and machine.room < SHORT_SHARE * machine.limit
        return tuple(bound for bound in self.bounds if bound.name != "pod" or short) or self.bounds

    def disk(self, name: str) -> DiskReading:
        """Return the file system of the place `name`."""
        return next(disk for disk in self.disks if name in disk.names)
