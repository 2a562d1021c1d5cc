"""Keeps a sandbox to its limits while its commands run: what the kernel does not hold is measured here.

Memory, CPU time, disk, processes and output of one attempt. It stops commands and says why; how they are run
is `command.py`'s part, what the kernel enforces `cgroup.py`'s and `entrance.py`'s.
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

from ..core.errors import AttemptError, LimitReached, ResourceExhausted, RunFailed, SandboxFailed
from ..core.headroom import headroom
from ..core.records import Limits, MiB
from . import quota, tree
from .cgroup import Cgroup
from .command import finish_anyway
from .quota import Pace

T = TypeVar("T")

FIRST = 0.025  # seconds to the first look at a group, and while it grows; else twice as long each time, up to
TICK = 0.2
GROWING = 1 * MiB  # from one look to the next
WORTH_A_LOOK = 256 * 1024  # bytes by which the use of a group has changed
TREE = 1.0  # seconds between looks at a tree that has no group
DISK = 0.5  # seconds between looks at the file system of a directory that has a quota
SETTLED = 5.0  # seconds between measurings of a directory that has none, or cannot have reached it
NEAR = 4 * MiB  # below a limit on memory; the kernel charges in batches, and kills before the last one
OWN = 3  # processes that a command without any of its own has at its end: bubblewrap's and the forwarder
LEAST_ROOM = 1 * MiB  # a command that fails on a disk with less may have failed for that
SMALL_SHARE = 0.001  # of a core, for measuring what nothing hints at


class Counts(msgspec.Struct, frozen=True):
    """What the kernel had counted before a command began."""

    oom_kills: int = 0
    pids_hits: int = 0


class Running(Protocol):
    """A command that is watched."""

    timed_out: bool
    stopped: AttemptError | None  # why it was stopped before its end
    left: int  # processes of the sandbox when it had exited

    @property
    def pid(self) -> int: ...

    def stop(self, error: AttemptError) -> None:
        """Have it killed at once; `error` says why."""

    async def kill(self) -> None:
        """End the whole tree, whatever it does."""


class Watch:
    """What one sandbox uses, and whether it may."""

    def __init__(
        self, directory: str, limits: Limits, threads: Executor, processes: Callable[[list[int]], list[int]]
    ) -> None:
        self.limits = limits
        self.group: Cgroup | None = None
        self.commands: set[Running] = set()  # those that run; bounded by the callers: one each
        self.disk = 0
        self.peak_disk = 0
        self._directory = directory
        self._threads = threads
        self._processes = processes  # the tree of these commands, where there is no group
        self._pace = Pace(SETTLED, SMALL_SHARE)
        self._hurry = Pace(DISK)
        self._free = 0  # bytes on the file system when the directory was measured
        self._raised_from: int | None = None  # the limit on memory before the last change
        self.memory = 0  # bytes in use, when it was last looked at
        self._peak = 0
        self._tree_cpu = 0.0  # of the processes that live, where there is no group
        self._printed = 0
        self._cpu_before = 0.0  # CPU time of earlier phases
        self._disk_before = 0  # what the agent left above its quota does not count against the grader
        self._too_deep = self._too_deep_before = False  # some of the directory cannot be measured
        self._task: asyncio.Task[None] | None = None

    @property
    def peak_memory(self) -> int:
        """The most that was seen; what the kernel says, page cache and all, if nothing ran long enough."""
        return self._peak or (self.group.peak() if self.group else 0)

    @property
    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far."""
        return self.group.cpu_seconds() if self.group else self._tree_cpu

    def allow(self, memory: int) -> None:
        """Change the limit on memory."""
        name = "memory" if self.limits.memory else "lease"
        self.limits = msgspec.structs.replace(self.limits, **{name: memory})
        if self.group:
            self._raised_from = self.group.memory_limit()
            self.group.allow(memory)

    def leave_group(self) -> Cgroup | None:
        """The group, which is about to be removed. On the loop, as all that uses it."""
        self._peak, group, self.group = self.peak_memory, self.group, None
        return group

    def counts(self) -> Counts:
        if self.group is None:
            return Counts()
        return Counts(oom_kills=self.group.oom_kills(), pids_hits=self.group.pids_hits())

    async def begin_phase(self) -> None:
        """Output and CPU time count from here: what an agent used up must not keep it from being graded."""
        self._printed = 0
        self._cpu_before = self.group.cpu_seconds() if self.group else 0.0
        if self.disk_over():
            await self.measure_disk()
            self._disk_before, self._too_deep_before = self.disk, self._too_deep

    def printed(self, more: int) -> LimitReached | None:
        """So many bytes more were printed: whether that is too much."""
        self._printed += more
        if self._printed <= self.limits.output:
            return None
        return LimitReached(f"killed at {size(self.limits.output)}: sandbox output", kind="output")

    def population(self) -> int:
        return self.group.population() if self.group else 0

    @asynccontextmanager
    async def over(self, command: Running) -> AsyncIterator[None]:
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
                self.memory = self.group.use() if self.group else 0

    def blame(self, command: Running, code: int, before: Counts) -> AttemptError | None:
        """Which limit ended the command, if one did."""
        now, limits = self.counts(), self.limits
        if now.oom_kills > before.oom_kills and self.group:
            return self._blame_memory(self.group)
        if command.stopped:
            return command.stopped
        left = command.left > OWN and not self.commands
        if now.pids_hits > before.pids_hits and (code or command.timed_out or left):
            return LimitReached(f"stopped at {limits.pids} processes: sandbox pids", kind="pids")
        if limits.cpu_seconds and code == 128 + signal.SIGXCPU:
            return cpu_used_up(limits.cpu_seconds)
        return self.cpu_over()

    def _blame_memory(self, group: Cgroup) -> ResourceExhausted:
        """By the limit that is in force, unless the group never came near it: then one around it was hit."""
        peak = group.peak()
        limits = (group.memory_limit(), self._raised_from)  # it may have been raised since, a moment too late
        limit = next((one for one in limits if one and not 0 < peak < one - NEAR), None)
        if limit is None:
            return ResourceExhausted("killed by the machine, out of memory: sandbox memory")
        self._peak = max(self._peak, limit)
        return ResourceExhausted(f"killed at {size(limit)}: sandbox memory")

    async def blame_disk(self, code: int) -> ResourceExhausted | None:
        """The same for the quota of its directory: measured when it failed, or when that is cheap."""
        now, most = time.monotonic(), self.limits.disk
        if most is None:
            wanted = self._pace.due(now)
        else:
            wanted = bool(code or self.disk_over()) or self._hurry.affordable(now)
        if wanted:
            await self.measure_disk()
        if most is not None and code == 128 + signal.SIGXFSZ:  # one file alone, though it may be sparse
            return _quota_reached(most)
        return self.disk_over()

    async def admit(self, more: int) -> None:
        """`more` bytes are written from outside: refuse them where they do not fit."""
        if self.disk_over(more):
            await self.measure_disk()
        if error := self.disk_over(more):
            raise error
        self.disk += more  # until it is measured; it may replace as much

    async def measure_disk(self) -> None:
        free = quota.free(self._directory)
        measured = await self._in_thread(self._measured, self._pids)
        for pace in (self._pace, self._hurry):
            pace.ended(time.monotonic(), measured.cost)
        self._free = free
        self.disk, self._too_deep = measured.used, measured.too_deep
        self.peak_disk = max(self.peak_disk, measured.used)

    def disk_over(self, more: int = 0) -> ResourceExhausted | None:
        """Whether it has taken more than it may, as far as is known; or would, with `more` bytes."""
        most = self.limits.disk
        if most is None:
            return None
        hidden = self._too_deep and not self._too_deep_before
        return _quota_reached(most) if hidden or self.disk + more > most + self._disk_before else None

    def room_gone(self) -> RunFailed | None:
        """Whether its disk is nearly full and it has much of that. Without a quota nothing else bounds it."""
        room = quota.room(self._directory) if self.limits.disk is None else None
        if room is None or not _nearly_full(*room) or self.disk < headroom(room[1]):
            return None
        return _full(f"the sandboxes' disk is nearly full, and {size(self.disk)} of it are this one's")

    def disk_full(self) -> RunFailed | None:
        """Whether its disk has no room at all: a command that failed may have failed for that."""
        room = quota.room(self._directory)
        return _full("the sandboxes' disk is full") if room and room[0] < LEAST_ROOM else None

    def cpu_over(self) -> LimitReached | None:
        most = self.limits.cpu_seconds
        if most is None or self.group is None or self.group.cpu_seconds() - self._cpu_before <= most:
            return None
        return cpu_used_up(most)

    async def _follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_disk())
            tasks.create_task(self._follow_group(self.group) if self.group else self._follow_tree())

    async def _follow_group(self, group: Cgroup) -> None:
        wait, seen = FIRST, 0
        while True:
            await asyncio.sleep(wait)
            usage = group.usage()
            wait = FIRST if usage - seen >= GROWING else min(TICK, wait * 2)
            if abs(usage - seen) >= WORTH_A_LOOK:
                seen = usage
                self.memory = group.use()
                self._peak = max(self._peak, self.memory)
            self._stop(self.cpu_over())

    async def _follow_tree(self) -> None:
        pace = Pace(TREE)
        while True:
            await asyncio.sleep(pace.wait(time.monotonic()))
            pids, used, cost = await self._in_thread(self._tree, self._pids)
            pace.ended(time.monotonic(), cost)
            self.memory = used
            self._tree_cpu = await self._in_thread(tree.cpu_seconds, pids)
            self._peak = max(self._peak, used)
            limit = self.limits.held_to
            if limit and used > limit and await self._in_thread(tree.proportional, pids) > limit:
                self._stop(ResourceExhausted(f"killed at {size(limit)}: sandbox memory"))

    async def _follow_disk(self) -> None:
        while True:
            await asyncio.sleep(DISK)
            if self._pace.due(time.monotonic()) or self._disk_doubtful():
                await self.measure_disk()
                self._stop(self.disk_over() or self.room_gone())

    def _disk_doubtful(self) -> bool:
        """Whether the file system has lost so much that the sandbox may have taken more than it may."""
        if not self._hurry.due(time.monotonic()):
            return False
        if self.limits.disk is None:
            room = quota.room(self._directory)
            return room is not None and _nearly_full(*room)
        return self.disk_over(self._free - quota.free(self._directory)) is not None

    def _stop(self, error: AttemptError | None) -> None:
        if error:
            for command in self.commands:
                command.stop(error)

    @property
    def _pids(self) -> list[int]:
        return [command.pid for command in self.commands]

    def _measured(self, commands: list[int]) -> quota.Measured:
        group = self.group
        pids = group.processes() if group else self._processes(commands) if commands else ()
        return quota.measure(self._directory, pids)

    def _tree(self, commands: list[int]) -> tuple[list[int], int, float]:
        """The processes of these commands, the memory that they use, and the CPU time of looking."""
        started = time.thread_time()
        pids = self._processes(commands)
        return pids, tree.resident(pids), time.thread_time() - started

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def size(limit: int) -> str:
    return f"{limit // MiB} MiB" if limit >= MiB else f"{limit // 1024} KiB"


def _quota_reached(most: int) -> ResourceExhausted:
    return ResourceExhausted(f"killed at {size(most)}: sandbox disk", kind="disk")


def _nearly_full(left: int, total: int) -> bool:
    """From low on nothing new is started; this is half as much."""
    return left < headroom(total) // 2


def _full(message: str) -> RunFailed:
    return RunFailed(message, "make space, then `holdwater resume`", kind="disk")


def cpu_used_up(seconds: float) -> LimitReached:
    return LimitReached(f"killed after {seconds:g} s of CPU: sandbox CPU", kind="cpu")


async def _end(task: asyncio.Task[None] | None) -> None:
    assert task is not None
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise SandboxFailed(f"cannot watch a sandbox: {error!r}") from error
