"""Runs inside a sandbox and tries to get out by way of processes and the kernel; prints what succeeded.

A program that knows the standard library alone: `python3 escape_attacks.py HOST_PID` prints a JSON list.
No attack does harm where it succeeds: it opens files and writes none, and gives calls bad arguments.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

LIBC = ctypes.CDLL(None, use_errno=True)
AT = 0 if platform.machine() == "x86_64" else 1
MOST_FILES = 100_000
REFUSALS = (errno.EPERM, errno.ENOSYS)
NEW = {
    "mount": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "time": 0x00000080,
}
# name -> (number on x86_64, on aarch64), arguments
CALLS: dict[str, tuple[tuple[int, int], tuple[object, ...]]] = {
    "keyctl": ((250, 219), (0, -3, 0)),  # the id of the session's keyring
    "keyctl user keyring": ((250, 219), (0, -4, 0)),
    "add_key": ((248, 217), (0, 0, 0, 0, -3)),
    "request_key": ((249, 218), (b"user", b"holdwater", 0, 0)),
    "bpf": ((321, 280), (-1, 0, 0)),
    "userfaultfd": ((323, 282), (1,)),  # user mode only: needs no privilege
    "perf_event_open": ((298, 241), (0, 0, -1, -1, 0)),
    "mount": ((165, 40), (b"none", b"/not/there", b"tmpfs", 0, 0)),
    "umount2": ((166, 39), (b"/not/there", 0)),
    "pivot_root": ((155, 41), (b"/not/there", b"/not/there")),
    "fsopen": ((430, 430), (b"tmpfs", 0)),
    "open_tree": ((428, 428), (-100, b"/", 0)),
    "move_mount": ((429, 429), (-1, b"", -1, b"", 0)),
    "mount_setattr": ((442, 442), (-100, b"/", 0, 0, 0)),
    "setns": ((308, 268), (-1, 0)),
    "kexec_load": ((246, 104), (0, -1, 0, 0)),
    "init_module": ((175, 105), (0, 0, 0)),
    "finit_module": ((313, 273), (-1, b"", 0)),
    "delete_module": ((176, 106), (b"", 0)),
    "reboot": ((169, 142), (0, 0, 0, 0)),  # without its magic numbers
    "swapon": ((167, 224), (b"/not/there", 0)),
    "acct": ((163, 89), (b"/not/there",)),
    "quotactl": ((179, 60), (-1, 0, 0, 0)),
    "open_by_handle_at": ((304, 265), (-1, 0, 0)),
    "io_uring_setup": ((425, 425), (0, 0)),
    "fanotify_init": ((300, 262), (0x200, 0)),  # reports file ids: needs no privilege
    "mq_open": ((240, 180), (0, 0, 0, 0)),
    "syslog": ((103, 116), (10, 0, 0)),
    "clone3": ((435, 435), (0, 0)),
    "personality": ((135, 92), (0x0040000,)),  # addresses that are not random
}


def call(numbers: tuple[int, int], *arguments: object) -> int:
    """The call's error number; 0: it succeeded."""
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    return 0 if LIBC.syscall(ctypes.c_long(numbers[AT]), *words) >= 0 else ctypes.get_errno()


def refused_calls() -> Iterator[str]:
    for name, (numbers, arguments) in CALLS.items():
        if (error := call(numbers, *arguments)) not in REFUSALS:
            yield f"{name}: {errno.errorcode.get(error, 'done')}"


def namespaces() -> Iterator[str]:
    for name, flag in NEW.items():
        if in_child(lambda flag=flag: call((272, 97), flag) == 0):
            yield f"unshare {name}"
        if name != "time" and in_child(lambda flag=flag: cloned(flag)):
            yield f"clone {name}"


def cloned(flag: int) -> bool:
    number = (56, 220)[AT]
    child = LIBC.syscall(ctypes.c_long(number), ctypes.c_long(flag | signal.SIGCHLD), 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    return bool(child > 0)


def in_child(succeeds: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(1 if succeeds() else 0)
    return os.waitpid(child, 0)[1] != 0


def foreign_calls() -> Iterator[str]:
    """Calls by numbers of another ABI, which a filter for this one would take for other calls."""
    if platform.machine() != "x86_64":
        return
    if LIBC.syscall(ctypes.c_long(0x40000000 | 39)) > 0:
        yield "x32 getpid"
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3")  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0:
        yield "i386 getpid"


def kernel_files() -> Iterator[str]:
    """Files of the whole machine below `/proc` that can be opened to be written."""
    for directory, names, files in os.walk("/proc"):
        if directory == "/proc":
            names[:] = [name for name in names if not name.isdigit() and name not in ("self", "thread-self")]
        for name in files:
            path = Path(directory, name)
            if not path.is_symlink() and opens(path, os.O_WRONLY):
                yield f"write {path}"


def kernel_secrets() -> Iterator[str]:
    for name in ("keys", "kcore", "timer_list", "sched_debug"):
        try:
            with Path("/proc", name).open("rb") as file:
                if file.read(64):
                    yield f"read /proc/{name}"
        except OSError:
            continue


def opens(path: Path, flags: int) -> bool:
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def others(host: int) -> Iterator[str]:
    """Processes of the host, by their numbers there."""
    try:
        os.kill(host, 0)
        yield "signal a process of the host"
    except ProcessLookupError:
        pass
    except PermissionError:
        yield "see a process of the host"
    if call((101, 117), 16, host, 0, 0) == 0:
        yield "trace a process of the host"
    if Path(f"/proc/{host}").exists():
        yield "look at a process of the host"


def first_process() -> Iterator[str]:
    """The process that ends the sandbox with its launcher: who changes it outlives the sandbox."""
    seize = 0x4206
    if in_child(lambda: call((101, 117), seize, 1, 0, 0) == 0):
        yield "trace the first process"
    if call((311, 271), 1, 0, 0, 0, 0, 0) == 0:
        yield "write to the first process"


def devices() -> Iterator[str]:
    """Devices of the host whose mode can be set; it is set to what it was."""
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        path = Path("/dev", name)
        try:
            path.chmod(path.stat().st_mode & 0o7777)
        except OSError:
            continue
        yield f"change {path}"


def privileges() -> Iterator[str]:
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if status["NoNewPrivs"] != "1":
        yield "gain privileges by an exec"
    if int(status["CapEff"], 16):
        yield f"use capabilities {status['CapEff']}"


def sockets() -> Iterator[str]:
    for name in ("AF_VSOCK", "AF_ALG", "AF_BLUETOOTH", "AF_CAN"):
        try:
            socket.socket(
                getattr(socket, name), socket.SOCK_SEQPACKET if name == "AF_ALG" else socket.SOCK_STREAM
            )
        except OSError as e:
            if e.errno == errno.EAFNOSUPPORT:
                continue
        yield f"a socket of {name}"


def open_files() -> Iterator[str]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > MOST_FILES:
        yield f"open {hard} files"
    kept = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while len(kept) <= MOST_FILES:
            kept.append(os.open("/dev/null", os.O_RDONLY))
        yield f"open {MOST_FILES} files"
    except OSError:
        pass
    finally:
        for fd in kept:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def attack(host: int) -> list[str]:
    found = [*kernel_files(), *kernel_secrets(), *others(host), *privileges(), *sockets(), *open_files()]
    found += [*first_process(), *devices()]
    return [*found, *refused_calls(), *namespaces(), *foreign_calls()]


if __name__ == "__main__":
    print(json.dumps(attack(int(sys.argv[1]))))
