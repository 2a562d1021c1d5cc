"""Gives memory back to the kernel that the allocator keeps. For a process that has nothing to do just now:
it stalls whatever allocates meanwhile.
"""

from __future__ import annotations

import ctypes
import gc


def trim() -> bool:
    """Whether anything could be done: not every libc has a way."""
    gc.collect()
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False  # musl, for one, has none
