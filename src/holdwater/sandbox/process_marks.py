"""Finds and ends processes by marks in their environment, never by name.

Every process of a sandbox inherits the marks of its run, attempt and command, unless it hides them.
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
ATTEMPT_PREFIX = f"{ATTEMPT}=".encode()

LOOK_AGAIN = 0.002  # seconds
LONGEST_ENVIRON = 1024 * 1024
FRESH = 0.5  # seconds for which a scan of `/proc` stays valid


class ProcessIndex:
    """Maps each process of a run to its attempt; one scan serves all lookups within `FRESH` seconds."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._found: dict[str, list[int]] = {}  # bound: the processes of the run's sandboxes
        self._at = -FRESH

    def find_processes(self, attempt: str) -> list[int]:
        """Return the processes of an attempt. Blocks."""
        with self._lock:
            if time.monotonic() > self._at + FRESH:
                self._found = self._scan()
                self._at = time.monotonic()
            return self._found.get(attempt, [])

    def _scan(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for pid in find_marked({RUN: self._run}):
            found.setdefault(_read_attempt(_read_environ(pid)).decode(errors="replace"), []).append(pid)
        return found


def find_attempt(run: str, pid: int) -> int | None:
    """Return the attempt of a run to which a process belongs, by its marks."""
    environ = _read_environ(pid)
    if f"{RUN}={run}".encode() not in environ:
        return None
    attempt = _read_attempt(environ)
    return int(attempt) if attempt.isdigit() else None


def find_marked(marks: Mapping[str, str]) -> list[int]:
    """Return the processes whose environment has all of `marks`, except this one and its ancestors."""
    spared = _list_ancestors()
    wanted = _encode_marks(marks)
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    return [pid for pid in pids if pid not in spared and _carries(pid, wanted)]


def signal_all(marks: Mapping[str, str], number: int) -> set[int]:
    """Send a signal to every process that carries `marks`; return their pids."""
    wanted = _encode_marks(marks)
    return {pid for pid in find_marked(marks) if _signal(pid, number, wanted)}


def kill_all(marks: Mapping[str, str], seconds: float = 2.0) -> int:
    """Kill every process that carries `marks` and wait until all are gone; return how many. Blocks."""
    killed: set[int] = set()
    until = time.monotonic() + seconds
    while found := _stop_all(marks, until):  # again: a new process may have started during the scan
        killed |= found
        signal_all(marks, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(LOOK_AGAIN)
    return len(killed)


def _stop_all(marks: Mapping[str, str], until: float) -> set[int]:
    """Stop all processes before the first kill: a fork bomb would fill each slot that becomes free."""
    stopped: set[int] = set()
    while (found := signal_all(marks, signal.SIGSTOP)) - stopped:
        stopped |= found
        if time.monotonic() > until:
            break
    return stopped


def signal_pids(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes that are known to be ours; skip processes that are gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def list_descendants(root: int) -> list[int]:
    """Return the children of `root`, their children, and so on, parents first."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        children = _list_children(waiting.pop())
        found += children
        waiting += children
    return found


def _list_children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass  # the process ended during the scan
    return found


def _list_ancestors() -> set[int]:
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


def _encode_marks(marks: Mapping[str, str]) -> list[bytes]:
    return [f"{name}={value}".encode() for name, value in marks.items()]


def _read_attempt(environ: list[bytes]) -> bytes:
    return next((row.partition(b"=")[2] for row in environ if row.startswith(ATTEMPT_PREFIX)), b"")


def _carries(pid: int, wanted: list[bytes]) -> bool:
    content = _read_content(pid)
    if not all(mark in content for mark in wanted):  # of most processes of the machine
        return False
    environ = content.split(b"\0")
    return all(mark in environ for mark in wanted)


def _read_environ(pid: int) -> list[bytes]:
    return _read_content(pid).split(b"\0")


def _read_content(pid: int) -> bytes:
    """Read a process's environment with few calls: a sweep reads that of each process of the machine."""
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(fd, LONGEST_ENVIRON)  # the kernel returns as much as there is
    except OSError:
        return b""
    finally:
        os.close(fd)


def _signal(pid: int, number: int, wanted: list[bytes]) -> bool:
    """Signal a process if it carries the marks; a pidfd pins it meanwhile, so a reused pid is never hit."""
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
