"""The filter of system calls, played by an interpreter of BPF and compared with the kernel's headers."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest

from holdwater.sandbox import kernel_protection
from holdwater.sandbox.kernel_protection import ALLOW, ARCHITECTURES, REFUSE, REFUSED, build_filter

I386, ARM = 0x40000003, 0x40000028
HEADERS = {
    "x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
    "aarch64": "/usr/include/asm-generic/unistd.h",
}
NUMBERS = {
    "clone": kernel_protection.CLONE,
    "unshare": kernel_protection.UNSHARE,
    "personality": kernel_protection.PERSONALITY,
    "process_vm_readv": kernel_protection.READ_MEMORY,
    "process_vm_writev": kernel_protection.WRITE_MEMORY,
    "ptrace": kernel_protection.PTRACE,
    "socket": kernel_protection.SOCKET,
    "socketpair": kernel_protection.SOCKETPAIR,
    **kernel_protection.REFUSED,
    **kernel_protection.UNKNOWN,
}
ORDINARY = {
    "read": (0, 63),
    "execve": (59, 221),
    "openat": (257, 56),
    "futex": (202, 98),
    "ptrace": (101, 117),
}
MACHINES = list(ARCHITECTURES)


def judge(
    machine: str, number: int, argument: int = 0, second: int = 0, architecture: int | None = None
) -> int:
    """The error that a call gets; 0: it is allowed."""
    program = list(struct.iter_unpack("<HBBI", build_filter(machine)))
    found = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, found, 0, argument, second, 0, 0, 0, 0)
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x06:  # return
            return 0 if operand == ALLOW else operand ^ REFUSE
        if code == 0x20:  # load
            (accumulator,) = struct.unpack_from("<I", data, operand)
            continue
        holds = {
            0x15: accumulator == operand,
            0x35: accumulator >= operand,
            0x45: bool(accumulator & operand),
        }
        at += if_true if holds[code] else if_false


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_its_calls_and_allows_others(machine: str) -> None:
    at = MACHINES.index(machine)

    refused = {name: judge(machine, number) for name, n in REFUSED.items() if (number := n[at])}
    assert set(refused.values()) == {errno.EPERM}
    assert judge(machine, 435) == errno.ENOSYS  # clone3
    assert {name: judge(machine, numbers[at]) for name, numbers in ORDINARY.items()} == dict.fromkeys(
        ORDINARY, 0
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_looks_at_flags_personalities_and_families(machine: str) -> None:
    clone, unshare, personality, socket = (
        NUMBERS[name][MACHINES.index(machine)] for name in ("clone", "unshare", "personality", "socket")
    )

    namespaces = (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
    assert {judge(machine, clone, flag | 17) for flag in namespaces} == {errno.EPERM}
    assert {judge(machine, unshare, flag) for flag in (*namespaces, 0x80)} == {errno.EPERM}
    assert judge(machine, clone, 0x3D0F00) == judge(machine, clone, 17) == 0  # a thread, a child
    assert judge(machine, unshare, 0x400) == 0  # files
    assert [judge(machine, personality, value) for value in (0, 0xFFFFFFFF, 0x40000)] == [0, 0, errno.EPERM]
    families = {family: judge(machine, socket, family) for family in (1, 2, 10, 16, 38, 40)}
    assert families == {1: 0, 2: 0, 10: 0, 16: 0, 38: errno.EAFNOSUPPORT, 40: errno.EAFNOSUPPORT}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_to_touch_the_first_process(machine: str) -> None:
    ptrace, read, write = (
        NUMBERS[name][MACHINES.index(machine)] for name in ("ptrace", "process_vm_readv", "process_vm_writev")
    )

    assert [judge(machine, ptrace, 16, pid) for pid in (1, 1 << 32 | 1, 2)] == [errno.EPERM, errno.EPERM, 0]
    assert [judge(machine, call, pid) for call in (read, write) for pid in (1, 7)] == [errno.EPERM, 0] * 2


def test_the_filter_refuses_other_architectures_and_x32() -> None:
    assert judge("x86_64", 20, architecture=I386) == errno.EPERM
    assert judge("aarch64", 20, architecture=ARM) == errno.EPERM
    assert judge("x86_64", 0x40000000 | 39) == errno.EPERM
    assert judge("x86_64", -1) == 0  # a tracer has it skipped
    assert build_filter("riscv64") == b""


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip("the kernel's headers are not installed")
    rows = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    known = {name: int(number) for name, number in reversed(rows)}

    ours = {name: numbers[MACHINES.index(machine)] for name, numbers in NUMBERS.items()}
    assert {name: ours[name] for name in ours if name in known} == {
        name: known[name] for name in ours if name in known
    }
    assert {name for name, number in ours.items() if number is not None and name not in known} <= {
        "open_tree_attr"
    }
