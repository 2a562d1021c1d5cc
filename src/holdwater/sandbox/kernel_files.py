"""Makes the machine-wide kernel files below `/proc` and devices below `/dev` read-only in a sandbox.

Root needs no capability to write them, and `/proc/sys/kernel/core_pattern` names a program that the kernel
runs on the host. One remount covers all of `/proc`: separate mounts cost three times as much. Writes to a
process's own files, such as `/proc/self/oom_score_adj`, fail too: programs work without them.
"""

from __future__ import annotations

import ctypes
import functools
import os

# Files about the machine's processes and keys, which container runtimes mask as well.
EMPTY = ("kcore", "keys", "latency_stats", "sched_debug", "timer_list", "timer_stats")
NEW_MOUNTS = 0x00020000  # from `linux/sched.h`; the next ones from `linux/mount.h`
READ_ONLY, REMOUNT, BIND, SLAVE = 0x1, 0x20, 0x1000, 0x4000 | 0x80000
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")  # that bubblewrap takes from the host


@functools.cache
def protect_kernel_files() -> tuple[str, ...]:
    """Return bubblewrap's arguments to mask the files that this user can read; put them after `--proc`."""
    paths = [path for path in (f"/proc/{name}" for name in EMPTY) if os.access(path, os.R_OK)]
    masks = [word for path in paths for word in ("--ro-bind", "/dev/null", path)]
    return (*masks, "--remount-ro", "/proc")


def protect_devices() -> bool:
    """Give this process a view of the host's devices in which root cannot change their modes; return success.

    The devices stay writable. Bubblewrap takes devices from the process that starts it and has no such
    setting. The view applies to all processes that this one starts, and to no others.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or library.unshare(NEW_MOUNTS) != 0:
        return False  # other users own no devices; without this right bubblewrap does not work either
    paths = [path for path in (f"/dev/{name}".encode() for name in DEVICES) if os.path.exists(path)]  # noqa: PTH110
    steps: list[tuple[bytes | None, bytes, int]] = [
        (None, b"/", SLAVE)
    ]  # later mounts of the host stay visible
    steps += [
        step for path in paths for step in ((path, path, BIND), (None, path, BIND | REMOUNT | READ_ONLY))
    ]
    return all(library.mount(source, path, None, flags, None) == 0 for source, path, flags in steps)
