"""Files of the kernel below `/proc` and devices below `/dev`, of the whole machine: read-only in a sandbox.

Root needs no capability to write them, and `/proc/sys/kernel/core_pattern` names a program that the kernel
runs on the host. One remount covers all that this kernel has: mounts for each cost three times as much.
Writes to a process's own files, such as `/proc/self/oom_score_adj`, fail too: programs do without them.
"""

from __future__ import annotations

import ctypes
import functools
import os

# Files that tell of processes and keys of the machine; those that container runtimes empty.
EMPTY = ("kcore", "keys", "latency_stats", "sched_debug", "timer_list", "timer_stats")
NEW_MOUNTS = 0x00020000  # of `linux/sched.h`, and the next ones of `linux/mount.h`
READ_ONLY, REMOUNT, BIND, SLAVE = 0x1, 0x20, 0x1000, 0x4000 | 0x80000
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")  # that bubblewrap takes from the host


@functools.cache
def protect_kernel_files() -> tuple[str, ...]:
    """Bubblewrap's arguments for the files that this user can read; they follow those that mount `/proc`."""
    paths = [path for path in (f"/proc/{name}" for name in EMPTY) if os.access(path, os.R_OK)]
    masks = [word for path in paths for word in ("--ro-bind", "/dev/null", path)]
    return (*masks, "--remount-ro", "/proc")


def protect_devices() -> bool:
    """Give this process a view of the host's devices in which root cannot change their modes; whether it has.

    They can be written to all the same. Bubblewrap takes devices from the process that starts it, and has no
    such setting. The view is that of all that this process starts, and of no other process.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or library.unshare(NEW_MOUNTS) != 0:
        return False  # other users own none of them; without this right bubblewrap does not work either
    paths = [path for path in (f"/dev/{name}".encode() for name in DEVICES) if os.path.exists(path)]  # noqa: PTH110
    steps: list[tuple[bytes | None, bytes, int]] = [
        (None, b"/", SLAVE)
    ]  # what the host mounts later is seen all the same
    steps += [
        step for path in paths for step in ((path, path, BIND), (None, path, BIND | REMOUNT | READ_ONLY))
    ]
    return all(library.mount(source, path, None, flags, None) == 0 for source, path, flags in steps)
