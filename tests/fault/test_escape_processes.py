"""An agent that tries to leave its sandbox by way of processes and the kernel: nothing succeeds."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.escape_runner import play
from tests.harbor_tasks import task
from tests.server_harness import server
from tests.user_commands import name_user, staged, users
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.records import Limits, Network, SandboxSpec
from holdwater.sandbox.cgroup import CgroupHome
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

ATTACKS = Path(__file__).parents[1] / "escape_attacks.py"
EVIL = """
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void escape(void) {
    char path[4096];
    snprintf(path, sizeof path, "%s/escaped-%d", PLACE, getpid());
    close(open(path, O_CREAT | O_WRONLY, 0666));
}
"""
# What the doctor calls it -> how attacks begin that succeed where commands are not kept from it.
SIGNS = {
    "kernel": ("write /proc/sys/",),
    "processes": ("signal a process", "see a process", "trace a process"),
    "privileges": ("gain privileges", "use capabilities"),
    "namespaces": ("unshare user", "unshare net"),
    "keyring": ("keyctl: done",),
    "system calls": ("bpf", "perf_event_open", "io_uring", "userfaultfd"),
    "limits": ("mq_open",),
}
# Clears the setting by which the sandbox's first process dies with bubblewrap, and leaves a process behind.
OUTLIVE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.ptrace.restype, libc.ptrace.argtypes = ctypes.c_long, [ctypes.c_long] * 4
ATTACH, DETACH, STEP, GET, SET, WALL = 16, 17, 9, 12, 13, 0x40000000
NAMES = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss a b c d e f"
class Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in NAMES.split()]
if libc.ptrace(ATTACH, 1, 0, 0):
    sys.exit("refused")
os.waitpid(1, WALL)
before = Registers()
libc.ptrace(GET, 1, 0, ctypes.addressof(before))
call = Registers.from_buffer_copy(before)
call.rip, call.rax, call.orig_rax = before.rip - 2, 157, 2**64 - 1  # prctl in the place of wait4
call.rdi, call.rsi, call.rdx, call.r10, call.r8 = 1, 0, 0, 0, 0  # PR_SET_PDEATHSIG, none
libc.ptrace(SET, 1, 0, ctypes.addressof(call))
libc.ptrace(STEP, 1, 0, 0)
os.waitpid(1, WALL)
before.rip, before.rax, before.orig_rax = before.rip - 2, 61, 2**64 - 1
libc.ptrace(SET, 1, 0, ctypes.addressof(before))
libc.ptrace(DETACH, 1, 0, 0)
if os.fork() == 0:
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    for number in range(600):
        open("alive", "w").write(str(number))
        time.sleep(0.05)
    os._exit(0)
time.sleep(600)
"""
SUITE = """
import holdwater as hw

def instances():
    yield hw.Instance(id="none")

async def grade(instance, sandbox, answer):
    loaded = await sandbox.run("grep -c evil /proc/self/maps")
    return hw.Grade(passed=loaded.ok, score=float(loaded.ok))

async def solve(instance, sandbox, model):
    await sandbox.run("true")

suite = hw.Suite(name="scene", instances=instances, grade=grade)
"""

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)


@pytest.fixture
def place() -> Iterator[Path]:
    with staged(os.geteuid()) as place:
        yield place


@pytest.fixture
def evil(place: Path) -> bytes:
    """A library that writes a file to `place`, which no sandbox can, into whatever process it is loaded."""
    if shutil.which("gcc") is None:
        assert os.environ.get("CI") != "true"
        pytest.skip("there is no gcc")
    source, library = place / "evil.c", place / "evil.so"
    source.write_text(EVIL)
    flags = ["-shared", "-fPIC", f'-DPLACE="{place}"']
    subprocess.run(["gcc", *flags, "-o", str(library), str(source)], check=True)
    return library.read_bytes()


@pytest.mark.parametrize("user", users(), ids=name_user)
def test_no_attack_by_processes_or_the_kernel_succeeds(user: int) -> None:
    assert play(user, ATTACKS, str(os.getpid())).successes == []


@pytest.mark.parametrize(
    ("user", "kind"),
    [*((user, "bubblewrap") for user in users()), (users()[-1], "plain")],
    ids=name_user,
)
def test_the_doctor_says_what_a_process_inside_can_do(user: int, kind: str) -> None:
    played = play(user, ATTACKS, str(os.getpid()), kind=kind)

    said = {what: played.doctor[what] for what in SIGNS}
    done = {
        what: any(success.startswith(signs) for success in played.successes) for what, signs in SIGNS.items()
    }
    assert said == done, played
    assert any(done.values()) == (kind == "plain")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the attack knows the registers of x86_64 alone")
async def test_a_process_that_changed_the_first_one_ends_with_its_command(tmp_path: Path) -> None:
    """Given a machine without control groups, and a sandbox without the filter that refuses the attack."""
    machine = msgspec.structs.replace(probe(), cgroup=CgroupHome(kind="none"), filter=b"")
    boxes = ProcessSandboxes(tmp_path / "scratch", f"outlive-{os.getpid()}", Network.NONE, machine=machine)

    async with boxes.open(1, Limits(), None) as box:
        ran = await box.run(["python3", "-c", OUTLIVE], timeout=stretch(0.75))
        first = await box.read("alive")
        await asyncio.sleep(0.5)
        second = await box.read("alive")
    boxes.close()

    assert ran.timed_out
    assert first == second


async def test_a_sandbox_cannot_close_the_gateway_of_others(tmp_path: Path) -> None:
    boxes = ProcessSandboxes(tmp_path / "scratch", f"closed-{os.getpid()}", Network.GATEWAY)
    gateway = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(gateway))
        listening.listen()
        async with boxes.open(1, Limits(), gateway) as box:
            changed = await box.run("chmod 000 /run/holdwater/gateway.sock")
            connect = "import socket; socket.create_connection(('127.0.0.1', 4141), 9).sendall(b'x')"
            reached = await box.run(["python3", "-c", connect])
    boxes.close()

    assert not changed.ok
    assert reached.ok, reached.stderr
    assert gateway.stat().st_mode & 0o200


def test_a_harbor_tasks_variables_stay_inside_its_sandbox(place: Path, evil: bytes) -> None:
    """Given a task whose variables name a library that its agent leaves in the working directory."""
    toml = '[environment]\nenv = { LD_PRELOAD = "./evil.so" }\n'
    task(place / "tree" / "one", toml, tests__test_sh="grep -q evil /proc/self/maps && reward 1 || reward 0")

    async def leave(instance, sandbox, model):
        await sandbox.write("evil.so", evil)
        assert (await sandbox.run("grep evil /proc/self/maps")).ok

    summary = hw.run(str(place / "tree"), agent=leave, out=place / "run", retries=0, workers=0)

    assert summary.outcomes == {"passed": 1}  # it was loaded, inside
    assert list(place.glob("escaped-*")) == []


async def test_an_orders_variables_stay_inside_its_sandbox(place: Path, evil: bytes) -> None:
    """Given a server and an order of a whole instance, whose variables name a library among its files."""
    instance = hw.Instance(
        id="evil", files={"evil.so": evil}, setup="true", start=SandboxSpec(env={"LD_PRELOAD": "./evil.so"})
    )

    with server(place, "--model", "scripted", suite=SUITE) as served:
        async with served.client() as client:
            await served.ready(client)
            rollout = await client.run(instance)

    assert rollout.reward == 1.0  # it was loaded, inside
    assert list(place.glob("escaped-*")) == []
