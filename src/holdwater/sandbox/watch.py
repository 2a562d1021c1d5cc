"""Enforces a sandbox's limits while its commands run: measures everything that the kernel does not enforce.

It watches memory, CPU time, disk, processes and output of one attempt, stops commands and says why.
`command.py` runs the commands; `cgroup.py` and `launcher.py` set the limits that the kernel enforces.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import msgspec

from ..core.errors import (
    AttemptError,
    AttemptOver,
    LimitReached,
    ResourceExhausted,
    RunFailed,
    SandboxFailed,
)
from ..core.limits import compute_headroom
from ..core.records import Limits, MiB
from . import resource_usage
from .cgroup import ControlGroup
from .command import finish_anyway
from .resource_usage import MeasurePace

T = TypeVar("T")

FIRST = 0.025  # seconds to the first check of a group, and while it grows; doubled otherwise, up to `TICK`
TICK = 0.2
GROWING = 1 * MiB  # bytes from one check to the next
WORTH_A_LOOK = 256 * 1024  # bytes by which a group's usage must change for a closer look
TREE = 1.0  # seconds between checks of a tree without a group
DISK = 0.5  # seconds between checks of the file system of a directory with a quota
SETTLED = 5.0  # seconds between measurements of a directory without a quota, or far below it
NEAR = 4 * MiB  # bytes below a memory limit; the kernel charges in batches, and kills before the last one
OWN_PROCESSES = 3  # left at the end of a command that started none: bubblewrap's and the forwarder
LEAST_ROOM = 1 * MiB  # bytes; a command that fails on a disk with less may have failed because of it
SMALL_SHARE = 0.001  # of a core, for measurements without a specific reason


class KernelCounts(msgspec.Struct, frozen=True):
    """The kernel's counters before a command started."""

    oom_kills: int = 0
    pids_hits: int = 0


class WatchedCommand(Protocol):
    """A command that is watched."""

    timed_out: bool
    stopped: AttemptError | None  # why it was stopped early
    left: int  # processes in the sandbox when it exited

    @property
    def pid(self) -> int: ...

    def stop(self, error: AttemptError) -> None:
        """Request an immediate kill; `error` says why."""

    async def kill(self) -> None:
        """Kill the whole process tree."""


class LimitWatch:
    """Measures the resources of one sandbox and stops its commands at a limit."""

    def __init__(
        self, directory: str, limits: Limits, threads: Executor, processes: Callable[[list[int]], list[int]]
    ) -> None:
        self.limits = limits
        self.group: ControlGroup | None = None
        self.commands: set[WatchedCommand] = set()  # running commands; bound: one per caller
        self.disk = 0
        self.peak_disk = 0
        self._directory = directory
        self._threads = threads
        self._processes = processes  # finds the process tree of commands, if there is no group
        self._pace = MeasurePace(SETTLED, SMALL_SHARE)
        self._urgent_pace = MeasurePace(DISK)
        self._free = 0  # free bytes on the file system when the directory was measured
        self._raised_from: int | None = None  # the memory limit before the last change
        self.memory = 0  # bytes in use at the last check
        self._peak = 0
        self._tree_cpu = 0.0  # of living processes, if there is no group
        self._printed = 0
        self._cpu_before = 0.0  # CPU time of earlier phases
        self._disk_before = 0  # usage above the quota that the agent left: not charged to the grader
        self._too_deep = self._too_deep_before = False  # part of the directory cannot be measured
        self._task: asyncio.Task[None] | None = None

    @property
    def peak_memory(self) -> int:
        """The peak seen by checks; if no command ran long enough, the kernel's peak, page cache included."""
        return self._peak or (self.group.peak() if self.group else 0)

    @property
    def cpu_seconds(self) -> float:
        """CPU time used by the processes so far."""
        return self.group.cpu_seconds() if self.group else self._tree_cpu

    def allow(self, memory: int) -> None:
        """Change the memory limit."""
        self._note_limit(memory)
        if self.group:
            self.group.allow(memory)

    def _note_limit(self, memory: int) -> None:
        name = "memory" if self.limits.memory else "lease"
        self.limits = msgspec.structs.replace(self.limits, **{name: memory})
        if self.group:
            self._raised_from = self.group.memory_limit()

    def leave_group(self) -> ControlGroup | None:
        """Detach and return the group before its removal. Call it on the event loop, as all users do."""
        self._peak, group, self.group = self.peak_memory, self.group, None
        return group

    def read_counts(self) -> KernelCounts:
        if self.group is None:
            return KernelCounts()
        return KernelCounts(oom_kills=self.group.oom_kills(), pids_hits=self.group.pids_hits())

    async def begin_phase(self) -> None:
        """Count output and CPU time from here: usage by an agent must not prevent its grading."""
        self._printed = 0
        self._cpu_before = self.group.cpu_seconds() if self.group else 0.0
        if self.limits.disk is None:
            return
        await self.measure_disk()  # the last one may be older than the files of a command that ended early
        if self.check_disk():
            self._disk_before, self._too_deep_before = self.disk, self._too_deep

    def count_output(self, more: int) -> LimitReached | None:
        """Count `more` bytes of output; return an error above the limit."""
        self._printed += more
        if self._printed <= self.limits.output:
            return None
        return LimitReached(f"killed at {format_size(self.limits.output)}: sandbox output", kind="output")

    def population(self) -> int:
        return self.group.population() if self.group else 0

    @asynccontextmanager
    async def watch_command(self, command: WatchedCommand) -> AsyncIterator[None]:
        """Watch while the command runs."""
        self.commands.add(command)
        if self._task is None:
            self._task = asyncio.ensure_future(self._follow())
        try:
            yield
        finally:
            self.commands.discard(command)
            if not self.commands:
                task, self._task = self._task, None
                await finish_anyway(_end(task))
                self.memory = self.group.memory_in_use() if self.group else 0

    def blame(self, command: WatchedCommand, code: int, before: KernelCounts) -> AttemptError | None:
        """Return the error of the limit that ended the command, if any."""
        now, limits = self.read_counts(), self.limits
        if now.oom_kills > before.oom_kills and self.group:
            return self._blame_memory(self.group)
        if command.stopped:
            return command.stopped
        left = command.left > OWN_PROCESSES and not self.commands
        if now.pids_hits > before.pids_hits and (code or command.timed_out or left):
            return LimitReached(f"stopped at {limits.pids} processes: sandbox pids", kind="pids")
        if limits.cpu_seconds and code == 128 + signal.SIGXCPU:
            return make_cpu_error(limits.cpu_seconds)
        return self.check_cpu()

    def _blame_memory(self, group: ControlGroup) -> ResourceExhausted:
        """Return the error for the limit in force, or for an outer group's if this one never came near it."""
        peak = group.peak()
        limits = (group.memory_limit(), self._raised_from)  # the limit may have been raised a moment too late
        limit = next((one for one in limits if one and not 0 < peak < one - NEAR), None)
        if limit is None:
            return ResourceExhausted("killed by the machine, out of memory: sandbox memory")
        self._peak = max(self._peak, limit)
        return ResourceExhausted(f"killed at {format_size(limit)}: sandbox memory")

    async def blame_disk(self, code: int) -> ResourceExhausted | None:
        """Return an error if the disk quota is exceeded; measure if the command failed or it is cheap."""
        now, most = time.monotonic(), self.limits.disk
        if most is None:
            wanted = self._pace.due(now)
        else:
            wanted = bool(code or self.check_disk()) or self._urgent_pace.affordable(now)
        if wanted:
            await self.measure_disk()
        if most is not None and code == 128 + signal.SIGXFSZ:  # a single file, though it may be sparse
            return _make_quota_error(most)
        return self.check_disk()

    async def admit(self, more: int) -> None:
        """Count `more` bytes that are written from outside; raise if they do not fit."""
        if self.check_disk(more):
            await self.measure_disk()
        if error := self.check_disk(more):
            raise error
        self.disk += more  # an estimate until the next measurement; the bytes may replace as many

    async def measure_disk(self) -> None:
        free = resource_usage.read_free_bytes(self._directory)
        measured = await self._in_thread(self._measure, self._pids)
        for pace in (self._pace, self._urgent_pace):
            pace.record_cost(time.monotonic(), measured.cost)
        self._free = free
        self.disk, self._too_deep = measured.used, measured.too_deep
        self.peak_disk = max(self.peak_disk, measured.used)

    def check_disk(self, more: int = 0) -> ResourceExhausted | None:
        """Return an error if the known usage, plus `more` bytes, exceeds the quota."""
        most = self.limits.disk
        if most is None:
            return None
        hidden = self._too_deep and not self._too_deep_before
        return _make_quota_error(most) if hidden or self.disk + more > most + self._disk_before else None

    def check_room(self) -> RunFailed | None:
        """Return an error if the disk is nearly full and this sandbox uses much of it.

        It applies only without a quota, when nothing else bounds the usage.
        """
        room = resource_usage.read_space(self._directory) if self.limits.disk is None else None
        if room is None or not _nearly_full(*room) or self.disk < compute_headroom(room[1]):
            return None
        return _make_full_error(
            f"the sandboxes' disk is nearly full, and this sandbox uses {format_size(self.disk)} of it"
        )

    def check_disk_full(self) -> RunFailed | None:
        """Return an error if the disk is full: a command may have failed because of it."""
        room = resource_usage.read_space(self._directory)
        return _make_full_error("the sandboxes' disk is full") if room and room[0] < LEAST_ROOM else None

    def check_cpu(self) -> LimitReached | None:
        most = self.limits.cpu_seconds
        if most is None or self.group is None or self.group.cpu_seconds() - self._cpu_before <= most:
            return None
        return make_cpu_error(most)

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_disk())
            tasks.create_task(self._follow_group(self.group) if self.group else self._follow_tree())

    async def _follow_group(self, group: ControlGroup) -> None:
        wait, seen = FIRST, 0
        while True:
            await asyncio.sleep(wait)
            usage = group.charged_memory()
            wait = FIRST if usage - seen >= GROWING else min(TICK, wait * 2)
            if abs(usage - seen) >= WORTH_A_LOOK:
                seen = usage
                self.memory = group.memory_in_use()
                self._peak = max(self._peak, self.memory)
            self._stop(self.check_cpu())

    async def _follow_tree(self) -> None:
        pace = MeasurePace(TREE)
        while True:
            await asyncio.sleep(pace.wait(time.monotonic()))
            pids, used, cost = await self._in_thread(self._measure_tree, self._pids)
            pace.record_cost(time.monotonic(), cost)
            self.memory = used
            self._tree_cpu = await self._in_thread(resource_usage.sum_cpu_seconds, pids)
            self._peak = max(self._peak, used)
            limit = self.limits.memory_limit
            if not limit or used <= limit:
                continue
            if await self._in_thread(resource_usage.sum_proportional, pids) > limit:
                self._stop(ResourceExhausted(f"killed at {format_size(limit)}: sandbox memory"))

    async def _follow_disk(self) -> None:
        while True:
            await asyncio.sleep(DISK)
            if self._pace.due(time.monotonic()) or self._disk_doubtful():
                await self.measure_disk()
                self._stop(self.check_disk() or self.check_room())

    def _disk_doubtful(self) -> bool:
        """Whether the file system has lost so much space that the sandbox may exceed its quota."""
        if not self._urgent_pace.due(time.monotonic()):
            return False
        if self.limits.disk is None:
            room = resource_usage.read_space(self._directory)
            return room is not None and _nearly_full(*room)
        return self.check_disk(self._free - resource_usage.read_free_bytes(self._directory)) is not None

    def _stop(self, error: AttemptError | None) -> None:
        if error:
            for command in self.commands:
                command.stop(error)

    @property
    def _pids(self) -> list[int]:
        return [command.pid for command in self.commands]

    def _measure(self, commands: list[int]) -> resource_usage.DiskUsage:
        group = self.group
        pids = group.processes() if group else self._processes(commands) if commands else ()
        return resource_usage.measure(self._directory, pids)

    def _measure_tree(self, commands: list[int]) -> tuple[list[int], int, float]:
        """Return the processes of these commands, their memory, and the CPU time of this measurement."""
        started = time.thread_time()
        pids = self._processes(commands)
        return pids, resource_usage.sum_resident(pids), time.thread_time() - started

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


class WatchedSandbox:
    """The part that both kinds of sandbox share: usage as the watch sees it, and whether they are open."""

    _watch: LimitWatch
    _closed = False

    @property
    def memory(self) -> int:
        return self._watch.memory

    @property
    def peak_memory(self) -> int:
        return self._watch.peak_memory

    @property
    def cpu_seconds(self) -> float:
        return self._watch.cpu_seconds

    @property
    def disk(self) -> int:
        return self._watch.disk

    @property
    def peak_disk(self) -> int:
        return self._watch.peak_disk

    def _check_open(self) -> None:
        if self._closed:
            raise AttemptOver("the attempt has ended")


def format_size(limit: int) -> str:
    return f"{limit // MiB} MiB" if limit >= MiB else f"{limit // 1024} KiB"


def _make_quota_error(most: int) -> ResourceExhausted:
    return ResourceExhausted(f"killed at {format_size(most)}: sandbox disk", kind="disk")


def _nearly_full(left: int, total: int) -> bool:
    """Whether less than half of the headroom is left; below the full headroom nothing new starts."""
    return left < compute_headroom(total) // 2


def _make_full_error(message: str) -> RunFailed:
    return RunFailed(message, "make space, then `holdwater resume`", kind="disk")


def make_cpu_error(seconds: float) -> LimitReached:
    return LimitReached(f"killed after {seconds:g} s of CPU: sandbox CPU", kind="cpu")


async def _end(task: asyncio.Task[None] | None) -> None:
    assert task is not None
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise SandboxFailed(f"cannot watch a sandbox: {error!r}") from error
