"""The directory with a run's sandboxes: marked as ours, locked while the run has a conductor, and swept.

It may be in a directory that others use too (`--scratch`). Only directories with our marker are ever removed
there. A sweep also ends the processes and removes the control groups that a killed run left. It runs at the
next start, when the run's lock is held and none of its sandboxes can be alive.
"""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import BadInput, RunLocked
from ..core.records import Record
from ..ledger.durable_files import cannot_write
from . import cgroup, process_marks
from .confined_paths import remove_tree
from .probe import probe

PREFIX = "holdwater-"
MARKER = ".holdwater"  # in each of our directories; a lock on it means that its run is alive
TICK = 0.02  # seconds between two tries to lock
PATIENCE = 600.0  # seconds to wait for another run that removes this run's leftovers

SECONDS = 5.0  # for the processes of a dead run to end


def list_temporary_places() -> list[Path]:
    """Return directories for a run's small temporary files, fastest first: memory if available."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)
    return [*([memory] if usable else []), Path(tempfile.gettempdir())]


def temporary_prefix(run: str) -> str:
    """Return the name prefix of a run's temporary directories; a later conductor sweeps them."""
    return f"{PREFIX}{run}-"


@contextmanager
def claim(place: Path) -> Iterator[None]:
    """Create and lock the directory `place`; at the end remove it if it is empty."""
    try:
        fd = _take(place)
    except OSError as e:
        raise cannot_write(place, e) from e
    try:
        yield
    finally:
        with suppress(OSError):  # left for the next sweep
            _leave(place)
        os.close(fd)


def claim_temporary(directory: Path) -> int:
    """Mark a temporary directory as in use; return the descriptor that keeps the mark while it is open."""
    new = _marker_path(directory).with_suffix(".new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    new.replace(_marker_path(directory))  # the marker never exists without its lock
    return fd


def remove_dead_runs(scratch: Path) -> int:
    """Remove the directories of dead runs in `scratch`; return how many. Blocks.

    A run is dead if its marker exists and is not locked. A directory without a marker is not ours.
    """
    places = [entry for entry in _list_entries(scratch) if entry.name.startswith(PREFIX)]
    return sum(_remove_dead(place) for place in places)


def remove_sandboxes(place: Path) -> int:
    """Remove all sandboxes of the run that holds `place`; return how many are gone. Blocks."""
    return sum(not remove_tree(entry) for entry in _list_entries(place) if entry.name != MARKER)


def _take(place: Path) -> int:
    """Return the locked marker. Wait if another run is removing leftovers of a dead conductor of this one."""
    until = time.monotonic() + PATIENCE
    while True:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _marker_path(place).exists() and _list_entries(place):
            raise BadInput(
                f"the directory for sandboxes holds other files and has no `{MARKER}`: `{place}`",
                hint="use another `--scratch`",
            )
        try:
            fd = os.open(_marker_path(place), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # removed a moment ago
        if _lock(fd, place):
            return fd
        os.close(fd)
        if time.monotonic() > until:
            raise RunLocked(f"another process holds the sandboxes' directory: `{place}`")
        time.sleep(TICK)


def _leave(place: Path) -> None:
    """Remove `place` if it is empty; otherwise its marker stays, and a later sweep tries again."""
    if [entry.name for entry in _list_entries(place)] == [MARKER]:
        _marker_path(place).unlink(missing_ok=True)
        place.rmdir()


def _remove_dead(place: Path) -> bool:
    if place.is_symlink():
        return False
    try:
        fd = os.open(_marker_path(place), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # not ours, or owned by another user
    try:
        if not _lock(fd, place):
            return False
        remove_sandboxes(place)
        _leave(place)
        return not place.exists()
    except OSError:
        return False  # left for the next sweep
    finally:
        os.close(fd)


def _lock(fd: int, place: Path) -> bool:
    """Lock the marker; return whether the lock was free and the marker is still the one in `place`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), _marker_path(place).lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _marker_path(place: Path) -> Path:
    return place / MARKER


def _list_entries(place: Path) -> list[Path]:
    return list(place.iterdir()) if place.is_dir() else []


class SweepReport(Record, frozen=True):
    """The number of leftovers that were removed."""

    processes: int = 0
    directories: int = 0
    cgroups: int = 0


def sweep(run: str, place: Path) -> SweepReport:
    """Kill every process with the mark of `run`; remove its groups and its sandboxes. Blocks."""
    processes = process_marks.kill_all({process_marks.RUN: run}, SECONDS)
    groups = cgroup.find_leftovers(run)
    processes += sum(_empty_group(group) for group in groups)
    return SweepReport(
        processes=processes,
        cgroups=sum(not group.exists() for group in groups),
        directories=remove_sandboxes(place),
    )


def sweep_attempts(run: str, place: Path, attempts: Iterable[int]) -> SweepReport:
    """Sweep single attempts of a run that goes on, whose worker is dead. Blocks."""
    home, found = probe().cgroup, list(attempts)
    processes = sum(
        process_marks.kill_all({process_marks.RUN: run, process_marks.ATTEMPT: str(n)}, SECONDS)
        for n in found
    )
    names = [f"{cgroup.group_prefix(run)}{number}" for number in found] if home.usable else []
    groups = [
        group
        for name in names
        for group in cgroup.ControlGroup(home, name, cpu=True).directories
        if group.exists()
    ]
    processes += sum(_empty_group(group) for group in groups)
    directories = [place / str(number) for number in found if (place / str(number)).exists()]
    return SweepReport(
        processes=processes,
        cgroups=sum(not group.exists() for group in groups),
        directories=sum(not remove_tree(directory) for directory in directories),
    )


def _empty_group(group: Path) -> int:
    """Kill processes that hid their marks and remove the group; return how many were killed."""
    until = time.monotonic() + SECONDS
    cgroup.forbid_forks(group)
    killed: set[int] = set()
    while not cgroup.remove_group(group) and time.monotonic() < until:
        found = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        process_marks.signal_pids(found, signal.SIGKILL)
        killed |= found
        time.sleep(process_marks.LOOK_AGAIN)
    return len(killed)
