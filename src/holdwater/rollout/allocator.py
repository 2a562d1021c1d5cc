"""The memory allocator of this process: detects it, measures its memory, gives memory back to the kernel.

`run/fleet/allocator.py` chooses the allocator of a worker; `memory_trimmer.py` decides when to give back.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

JEMALLOC = "jemalloc"
GLIBC = "glibc"
OTHER = "other"  # for example musl's

_ALL_ARENAS = b"arena.4096.purge"  # jemalloc's number for all arenas
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MiB = 1024 * 1024
_GLIBC_BOUNDS = {-1: _MiB, -3: _MiB, -8: 2}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX


def detect_allocator() -> str:
    """Return the allocator that this process really uses, independent of its environment."""
    if f"lib{JEMALLOC}" in Path("/proc/self/maps").read_text(errors="replace"):
        return JEMALLOC
    return GLIBC if hasattr(ctypes.CDLL(None), "gnu_get_libc_version") else OTHER


def give_back() -> None:
    """Return unused memory to the kernel. Raises if the allocator does not support that.

    The time grows with the memory of the process. Threads that allocate meanwhile stall.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallctl"):
        library.malloc_trim(0)
    elif status := library.mallctl(_ALL_ARENAS, None, None, None, 0):
        raise OSError(status, os.strerror(status))


def keep_bounded() -> None:
    """Make freed large blocks return to the kernel at once, in a process that we did not start.

    By default glibc raises its threshold with every large block that is freed, and keeps the next ones. This
    fixes the threshold.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallctl") and hasattr(library, "mallopt"):
        for parameter, value in _GLIBC_BOUNDS.items():
            library.mallopt(parameter, value)


def measure_resident() -> int:
    """Return the resident bytes of this process. Cheap: it is called many times a second."""
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(fd, 128).split()[1]) * _PAGE
    finally:
        os.close(fd)
