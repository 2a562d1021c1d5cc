"""What the meter tells: the bounds on memory, the file systems, the pressure. It is read in `meter.py`."""

from __future__ import annotations

from ..core.records import Record

SHORT = 0.1  # of what a run could use of its machine: below this a node counts as short of memory


class Bound(Record, frozen=True):
    """One limit on memory that applies to us, and what counts against it, in bytes."""

    name: str  # `budget`, `container`, `pod`, `machine`
    limit: int
    used: int
    source: str  # who says so, for people

    @property
    def room(self) -> int:
        return max(0, self.limit - self.used)


class Disk(Record, frozen=True):
    """One file system that we write to, in bytes."""

    path: str
    free: int
    total: int  # 0: it does not tell, and its `free` says nothing
    memory: bool  # a tmpfs: its bytes are memory
    names: tuple[str, ...]  # what of ours lies there: `run`, `scratch`, `temp`


class Reading(Record, frozen=True):
    """One reading."""

    bounds: tuple[Bound, ...]  # the tightest first; never empty
    disks: tuple[Disk, ...]  # in the order of the places
    pressure: float | None  # percent of the last 10 s in which some task waited for memory
    oom_kills: int  # so far, of processes in our own group: sandboxes with a group count their own

    @property
    def bound(self) -> Bound:
        """The tightest that holds now."""
        return self.holding[0]

    @property
    def holding(self) -> tuple[Bound, ...]:
        """The bounds without a pod's request, which counts only where a node is short: then it evicts."""
        machine = next((bound for bound in self.bounds if bound.name == "machine"), None)
        short = machine is not None and machine.room < SHORT * machine.limit
        return tuple(bound for bound in self.bounds if bound.name != "pod" or short) or self.bounds

    def disk(self, name: str) -> Disk:
        """The file system that `name` lies on."""
        return next(disk for disk in self.disks if name in disk.names)
