"""The allocator of this process: which one it is, how large it has become, how it gives memory back.

Which one a worker is started with is decided in `run/allocator.py`; when it gives back, in `trim.py`.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

JEMALLOC = "jemalloc"
GLIBC = "glibc"
OTHER = "other"  # musl's, for one

_ALL_ARENAS = b"arena.4096.purge"  # jemalloc's number for all of them
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MiB = 1024 * 1024
_GLIBC_BOUNDS = {-1: _MiB, -3: _MiB, -8: 2}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX


def in_force() -> str:
    """The allocator that this process really has, whatever it was started with."""
    if f"lib{JEMALLOC}" in Path("/proc/self/maps").read_text(errors="replace"):
        return JEMALLOC
    return GLIBC if hasattr(ctypes.CDLL(None), "gnu_get_libc_version") else OTHER


def give_back() -> None:
    """Return to the kernel what is not used. Raises where the allocator has no way.

    It takes as long as there is memory to look through, and stalls whatever allocates meanwhile.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallctl"):
        library.malloc_trim(0)
    elif status := library.mallctl(_ALL_ARENAS, None, None, None, 0):
        raise OSError(status, os.strerror(status))


def keep_bounded() -> None:
    """What is large and freed goes back to the kernel at once, in a process that was started by someone else.

    glibc raises its threshold with every large block that is freed, and keeps the next ones: here it stays.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallctl") and hasattr(library, "mallopt"):
        for parameter, value in _GLIBC_BOUNDS.items():
            library.mallopt(parameter, value)


def resident() -> int:
    """Bytes of this process in memory. It is asked many times a second."""
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(fd, 128).split()[1]) * _PAGE
    finally:
        os.close(fd)
