"""The directory in which a run keeps its sandboxes: marked as ours, and locked while the run has a conductor.

It may lie in a place that others use too (`--scratch`). Nothing is ever removed there but such directories.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..core.errors import BadInput, RunLocked
from ..ledger.disk import cannot_write
from .remove import remove_tree

PREFIX = "holdwater-"
MARKER = ".holdwater"  # in each directory of ours; a lock on it says that its run lives
TICK = 0.02  # seconds between two looks at a lock
PATIENCE = 600.0  # seconds for another run that removes what this one had left


def temporary_places() -> list[Path]:
    """Directories for a run's small temporary files, the fastest first: memory where there is some."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK | os.X_OK)
    return [*([memory] if usable else []), Path(tempfile.gettempdir())]


def temporary_prefix(run: str) -> str:
    """The beginning of the name of a run's temporary directories: a later conductor sweeps them."""
    return f"{PREFIX}{run}-"


@contextmanager
def claim(place: Path) -> Iterator[None]:
    """Make and hold the directory `place`. At the end it is removed, if nothing is left in it."""
    try:
        fd = _take(place)
    except OSError as e:
        raise cannot_write(place, e) from e
    try:
        yield
    finally:
        with suppress(OSError):  # it stays for the next sweep
            _leave(place)
        os.close(fd)


def claim_temporary(directory: Path) -> int:
    """Mark a temporary directory as that of a living process, as long as the descriptor is open."""
    new = _marker(directory).with_suffix(".new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    new.replace(_marker(directory))  # never there without its lock
    return fd


def bury(scratch: Path) -> int:
    """Remove the directories of dead runs in `scratch`; how many. Blocks.

    Dead is a run whose marker is there and not locked. A directory without a marker is not ours.
    """
    places = [entry for entry in _entries(scratch) if entry.name.startswith(PREFIX)]
    return sum(_remove_dead(place) for place in places)


def empty(place: Path) -> int:
    """Remove all sandboxes of the run that holds `place`; how many are gone. Blocks."""
    return sum(not remove_tree(entry) for entry in _entries(place) if entry.name != MARKER)


def _take(place: Path) -> int:
    """The marker, locked. Another run may be removing what a dead conductor of this one had left."""
    until = time.monotonic() + PATIENCE
    while True:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _marker(place).exists() and _entries(place):
            raise BadInput(
                f"the directory for sandboxes holds files of others, it has no `{MARKER}`: `{place}`",
                hint="give another `--scratch`",
            )
        try:
            fd = os.open(_marker(place), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:
            continue  # it was removed a moment ago
        if _lock(fd, place):
            return fd
        os.close(fd)
        if time.monotonic() > until:
            raise RunLocked(f"another process holds the sandboxes' directory: `{place}`")
        time.sleep(TICK)


def _leave(place: Path) -> None:
    """What could not be removed keeps its marker: a later sweep tries again."""
    if [entry.name for entry in _entries(place)] == [MARKER]:
        _marker(place).unlink(missing_ok=True)
        place.rmdir()


def _remove_dead(place: Path) -> bool:
    if place.is_symlink():
        return False
    try:
        fd = os.open(_marker(place), os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False  # not ours, or another user's
    try:
        if not _lock(fd, place):
            return False
        empty(place)
        _leave(place)
        return not place.exists()
    except OSError:
        return False  # it stays for the next sweep
    finally:
        os.close(fd)


def _lock(fd: int, place: Path) -> bool:
    """Whether the lock was free, is held now, and is still that of the marker in `place`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), _marker(place).lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _marker(place: Path) -> Path:
    return place / MARKER


def _entries(place: Path) -> list[Path]:
    return list(place.iterdir()) if place.is_dir() else []
