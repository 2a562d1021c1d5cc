"""Protects the kernel from sandboxes: a system call filter, and read-only files below `/proc` and `/dev`.

The filter is a classic BPF program that bubblewrap installs. It refuses calls that reach beyond a sandbox
(keyrings, kernel modules, mounts, namespaces), expose much of the kernel (bpf, io_uring, userfaultfd) or
change the sandbox's first process. `ptrace` of other processes is allowed: in a pid namespace a debugger
finds only processes of its own sandbox.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Sequence

# Offsets into `struct seccomp_data`, and codes of `linux/filter.h` and `linux/seccomp.h`.
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000  # the lower half of REFUSE holds the error number
X32 = 0x40000000  # numbers from here on belong to the x32 ABI
SKIPPED = 0xFFFFFFFF  # set by a tracer that makes the kernel skip the call

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# name -> number on x86_64 and on aarch64; None: the architecture lacks the call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "_sysctl": (156, None),
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clock_settime": (227, 112),
    "create_module": (174, None),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),  # the bytes of all queues of a user are counted together
    "nfsservctl": (180, 42),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
UNKNOWN = {"clone3": (435, 435)}  # its flags are in memory, invisible to a filter: libc falls back to `clone`
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* except CLONE_NEWTIME
NEW_TIME = 0x80  # CLONE_NEWTIME, where it is not a signal number
# Calls that are allowed depending on an argument: name -> numbers.
CLONE, UNSHARE = (56, 220), (272, 97)
PTRACE, READ_MEMORY, WRITE_MEMORY = (101, 117), (310, 270), (311, 271)
PERSONALITY, SOCKET, SOCKETPAIR = (135, 92), (41, 198), (53, 199)
PERSONALITIES = (0, 0x0008, 0x20000, 0x20008, 0xFFFFFFFF)  # Linux, 32 bits, old kernel names; a query
# Unspecified, unix, IPv4, IPv6, netlink, packet. Others, such as vsock, belong to no network namespace.
FAMILIES = (0, 1, 2, 10, 16, 17)

FEW = 3  # calls compared one by one
Instruction = tuple[int, int, int, int]  # code, steps to skip if true, if false, operand

# Files about the machine's processes and keys, which container runtimes mask as well.
EMPTY = ("kcore", "keys", "latency_stats", "sched_debug", "timer_list", "timer_stats")
NEW_MOUNTS = 0x00020000  # from `linux/sched.h`; the next ones from `linux/mount.h`
READ_ONLY, REMOUNT, BIND, SLAVE = 0x1, 0x20, 0x1000, 0x4000 | 0x80000
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")  # that bubblewrap takes from the host


@functools.cache
def build_filter(machine: str) -> bytes:
    """Return the program for an architecture as named by `uname -m`; empty if there is none."""
    if machine not in ARCHITECTURES:
        return b""
    at = list(ARCHITECTURES).index(machine)
    blocks = {numbers[at]: [_refuse()] for numbers in REFUSED.values()}
    blocks |= {numbers[at]: [_refuse(errno.ENOSYS)] for numbers in UNKNOWN.values()}
    blocks |= {
        CLONE[at]: _refuse_any_bit(NEW_NAMESPACES),
        UNSHARE[at]: _refuse_any_bit(NEW_NAMESPACES | NEW_TIME),
    }
    blocks[PTRACE[at]] = _refuse_first_process(SECOND_ARGUMENT)
    blocks |= {numbers[at]: _refuse_first_process(FIRST_ARGUMENT) for numbers in (READ_MEMORY, WRITE_MEMORY)}
    blocks[PERSONALITY[at]] = _allow_only(PERSONALITIES, errno.EPERM)
    blocks |= {numbers[at]: _allow_only(FAMILIES, errno.EAFNOSUPPORT) for numbers in (SOCKET, SOCKETPAIR)}
    known = sorted((number, block) for number, block in blocks.items() if number is not None)
    program = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, ARCHITECTURES[machine]), _refuse()]
    program += [(LOAD, 0, 0, NUMBER), (EQUAL, 0, 1, SKIPPED), _allow(), (AT_LEAST, 0, 1, X32), _refuse()]
    program += _search(known)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _search(blocks: Sequence[tuple[int, Sequence[Instruction]]]) -> list[Instruction]:
    """Find a call's block by binary search: at load the kernel runs the program for every call number."""
    if len(blocks) <= FEW:
        tests = [((EQUAL, 0, len(block), number), *block) for number, block in blocks]
        return [*(instruction for test in tests for instruction in test), _allow()]
    half = len(blocks) // 2
    below, above = _search(blocks[:half]), _search(blocks[half:])
    return [(AT_LEAST, len(below), 0, blocks[half][0]), *below, *above]


def _refuse_any_bit(bits: int) -> list[Instruction]:
    return [(LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, bits), _refuse(), _allow()]


def _refuse_first_process(argument: int) -> list[Instruction]:
    """Refuse access to the first process, bubblewrap's: by changing it, code could outlive the sandbox."""
    return [(LOAD, 0, 0, argument), (EQUAL, 0, 1, 1), _refuse(), _allow()]


def _allow_only(values: Sequence[int], error: int) -> list[Instruction]:
    tests = [(EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [(LOAD, 0, 0, FIRST_ARGUMENT), *tests, _refuse(error), _allow()]


def _refuse(error: int = errno.EPERM) -> Instruction:
    return (RETURN, 0, 0, REFUSE | error)


def _allow() -> Instruction:
    return (RETURN, 0, 0, ALLOW)


@functools.cache
def protect_kernel_files() -> tuple[str, ...]:
    """Return bubblewrap's arguments to protect the kernel's files; put them after `--proc`.

    Root needs no capability to write these files, and `/proc/sys/kernel/core_pattern` names a program that
    the kernel runs on the host. One remount covers all of `/proc`: separate mounts cost three times as much.
    Writes to a process's own files, such as `/proc/self/oom_score_adj`, fail too: programs work without them.
    """
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
