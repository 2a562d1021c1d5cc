"""The records of measurements: memory bounds, file systems and pressure of the machine, and a fleet's use.

`meter.py` fills the first; a fleet (`run/fleet/`) reports its own use.
"""

from __future__ import annotations

import msgspec

from ..core.endpoints import EndpointUse
from ..core.records import ModelUsage, Record

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
    filesystem: str = ""  # its type, such as `ext4`; empty: unknown


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


class AttemptUse(Record, frozen=True):
    """The current use of one attempt, in bytes."""

    sandbox: int = 0  # memory of its processes
    worker: int = 0  # its share of the worker's growth since it began
    disk: int = 0
    throttled: bool = False  # it waits for a rate limit
    cpu: float = 0.0  # seconds that its sandbox has used so far

    @property
    def memory(self) -> int:
        return self.sandbox + self.worker


class FleetCensus(Record, frozen=True):
    """The workers at one moment."""

    workers: int
    draining: int = 0
    pids: tuple[int, ...] = ()
    lag: float = 0.0
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    usage: ModelUsage = ModelUsage()  # of the attempts that are not settled
    uses: dict[int, AttemptUse] = msgspec.field(default_factory=dict)  # by attempt
    endpoints: tuple[EndpointUse, ...] = ()  # the model's servers, if there are several

    @property
    def sandboxes(self) -> int:
        """Bytes of memory in all sandboxes."""
        return sum(use.sandbox for use in self.uses.values())
