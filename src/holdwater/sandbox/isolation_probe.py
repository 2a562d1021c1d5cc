"""Runs inside a sandbox: tests actions that the sandbox should prevent, and prints the results as JSON.

Runs as a script: `python -I -S isolation_probe.py PID PORT HOME PATH...`; it imports nothing from holdwater.
No test changes anything. `isolation.py` starts it and explains the results.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import socket
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
REFUSALS = (errno.EPERM, errno.ENOSYS)
AT = 0 if os.uname().machine == "x86_64" else 1
# name -> numbers on x86_64 and aarch64, and arguments that the kernel rejects with other errors than a filter
CALLS = {
    "bpf": (321, 280, -1, 0, 0),
    "io_uring": (425, 425, 0, 0),
    "perf_event_open": (298, 241, 0, 0, -1, -1, 0),
    "userfaultfd": (323, 282, -1),
}
KERNEL_FILES = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/ns_last_pid", "/proc/sysrq-trigger")
SESSION_KEYRING = (250, 219, 0, -3, 0)  # keyctl: get the id of the session keyring
UNSHARE = (272, 97)
MESSAGE_QUEUE = (240, 180, 0, 0, 0, 0)

libc = ctypes.CDLL(None, use_errno=True)


def main(pid: int, port: int, home: str, paths: list[str]) -> None:
    status = _read_status()
    found = {
        "writes": [path for path in paths if os.access(path, os.W_OK)],
        "home": _list_names(home),
        "processes": _is_process(pid),
        "network": _connects(port),
        "kernel": any(map(_opens, KERNEL_FILES)),
        "keyring": _call(*SESSION_KEYRING) == 0,
        "namespaces": _unshares(CLONE_NEWUSER) or _unshares(CLONE_NEWNET),
        "calls": [name for name, words in CALLS.items() if _call(*words) not in REFUSALS],
        "privileges": status["NoNewPrivs"] != "1" or int(status["CapEff"], 16) != 0,
        "queues": _call(*MESSAGE_QUEUE) not in REFUSALS,
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    }
    print(json.dumps(found))  # noqa: T201


def _read_status() -> dict[str, str]:
    with open("/proc/self/status") as file:  # noqa: PTH123 - `pathlib` takes long to import
        return dict(line.rstrip("\n").split(":\t", 1) for line in file)


def _list_names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208
    except OSError:
        return []


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 2.0).close()
    except OSError:
        return False
    return True


def _opens(path: str) -> bool:
    """Whether the file can be opened for writing; nothing is written."""
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        return False
    return True


def _unshares(flag: int) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(_call(*UNSHARE, flag) == 0)
    return os.waitpid(child, 0)[1] != 0


def _call(on_x86: int, on_arm: int, *arguments: int) -> int:
    """Return the error number of a system call; 0 if it succeeded."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) for word in ((on_x86, on_arm)[AT], *arguments)]
    return 0 if libc.syscall(*words) >= 0 else ctypes.get_errno()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
