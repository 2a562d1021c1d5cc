"""Finds and ends processes by what they carry in their environment, never by name.

Every process of a sandbox inherits the marks of its run, its attempt and its command, unless it hides them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

RUN = "HOLDWATER_RUN"
ATTEMPT = "HOLDWATER_ATTEMPT"
COMMAND = "HOLDWATER_COMMAND"
OF_ATTEMPT = f"{ATTEMPT}=".encode()

LOOK_AGAIN = 0.002  # seconds
LONGEST_ENVIRON = 1024 * 1024
FRESH = 0.5  # seconds for which what a roll has found is still good


class Roll:
    """Which attempt of a run each process belongs to: looked up once for all who ask within a while."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._found: dict[str, list[int]] = {}  # bound: the processes of the run's sandboxes
        self._at = -FRESH

    def of(self, attempt: str) -> list[int]:
        """The processes of an attempt. Blocks."""
        with self._lock:
            if time.monotonic() > self._at + FRESH:
                self._found = self._call()
                self._at = time.monotonic()
            return self._found.get(attempt, [])

    def _call(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for pid in carrying({RUN: self._run}):
            environ = _environ(pid)
            attempt = next((row.partition(b"=")[2] for row in environ if row.startswith(OF_ATTEMPT)), b"")
            found.setdefault(attempt.decode(errors="replace"), []).append(pid)
        return found


def attempt_of(run: str, pid: int) -> int | None:
    """The attempt of a run that a process belongs to, by what it carries."""
    environ = _environ(pid)
    if f"{RUN}={run}".encode() not in environ:
        return None
    attempt = next((row.partition(b"=")[2] for row in environ if row.startswith(OF_ATTEMPT)), b"")
    return int(attempt) if attempt.isdigit() else None


def carrying(marks: Mapping[str, str]) -> list[int]:
    """The processes whose environment has all of `marks`, but never this one or its ancestors."""
    spared = _ancestors()
    wanted = [f"{name}={value}".encode() for name, value in marks.items()]
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid not in spared and _carries(pid, wanted)]


def signal_all(marks: Mapping[str, str], number: int) -> set[int]:
    """Send a signal to every process that carries `marks`; which they were."""
    wanted = [f"{name}={value}".encode() for name, value in marks.items()]
    return {pid for pid in carrying(marks) if _signal(pid, number, wanted)}


def kill_all(marks: Mapping[str, str], seconds: float = 2.0) -> int:
    """Kill every process that carries `marks` and wait until they are gone; how many there were. Blocks."""
    killed: set[int] = set()
    until = time.monotonic() + seconds
    while found := _stopped(marks, until):  # again: one may have come while we looked
        killed |= found
        signal_all(marks, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(LOOK_AGAIN)
    return len(killed)


def _stopped(marks: Mapping[str, str], until: float) -> set[int]:
    """Stop all before the first is killed: what forks without end would fill each place that becomes free."""
    stopped: set[int] = set()
    while (found := signal_all(marks, signal.SIGSTOP)) - stopped:
        stopped |= found
        if time.monotonic() > until:
            break
    return stopped


def end(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes that are known to be ours; those that are gone are left out."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def descendants(root: int) -> list[int]:
    """The children of `root`, their children, and so on, parents first."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass  # it has gone while we looked
    return found


def _ancestors() -> set[int]:
    found = set()
    pid = os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
    return found


def _carries(pid: int, wanted: list[bytes]) -> bool:
    environ = _environ(pid)
    return all(mark in environ for mark in wanted)


def _environ(pid: int) -> list[bytes]:
    try:
        with Path(f"/proc/{pid}/environ").open("rb") as file:
            return file.read(LONGEST_ENVIRON).split(b"\0")
    except OSError:
        return []


def _signal(pid: int, number: int, wanted: list[bytes]) -> bool:
    """A pidfd holds on to the process while we look again: a reused pid is never hit."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not _carries(pid, wanted):
            return False
        signal.pidfd_send_signal(fd, number)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(fd)
