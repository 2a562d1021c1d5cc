"""Tests in a real process sandbox which actions it keeps a command from, and describes the result.

`holdwater doctor` prints all findings; the start of a run prints the missing isolation. `isolation_probe.py`
runs the tests.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..core.errors import SandboxFailed
from ..core.records import Limits, Network, Record
from .bubblewrap import find_home
from .probe import DoctorFinding, MachineFeatures, choose_finding
from .process_sandboxes import ProcessSandboxes

PROBE_SCRIPT = Path(__file__).with_name("isolation_probe.py")
SECONDS = 60.0
MANY_INSTANCES = 8192  # of inotify: each takes memory, charged to its sandbox
HOST_PLACES = ("/", "/etc", "/usr", "/var", "/opt", "/home", "/root")


class IsolationReport(Record, frozen=True):
    """The actions outside of a sandbox that a process in it could do."""

    writes: tuple[str, ...]  # writable directories of the host
    home: tuple[str, ...]  # visible entries of this user's home
    processes: bool  # can signal a process of the host
    network: bool  # can connect to a service of this machine, with network `gateway`
    kernel: bool  # can write kernel settings
    keyring: bool
    namespaces: bool
    calls: tuple[str, ...]  # that no filter refuses
    privileges: bool  # has capabilities, or can gain privileges by exec
    queues: bool  # can use POSIX message queues, whose bytes count for the whole user
    files: int  # limit of open files per process


def describe_missing_isolation(machine: MachineFeatures) -> str:
    """Describe what commands can do outside of their sandbox; empty if bubblewrap isolates them."""
    if machine.bwrap:
        return ""
    user = "root" if machine.root else "this user"
    return (
        f"sandboxes are not isolated, because bubblewrap is not used: {machine.why_not or 'not available'}. "
        f"Commands read and write every file that {user} can, see and trace other processes with the keys in "
        "their memory, and reach the network with any `--network`. "
        "hint: install the package `bubblewrap`, or add `--sandbox docker`"
    )


async def try_isolation(machine: MachineFeatures) -> IsolationReport:
    """Start a sandbox and test what a process in it can do."""
    python = os.path.realpath(sys.executable)
    with tempfile.TemporaryDirectory(prefix="holdwater-doctor-") as scratch, socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen()
        words = [
            python,
            "-I",
            "-S",
            "isolation_probe.py",
            str(os.getpid()),
            str(service.getsockname()[1]),
            find_home(),
        ]
        place, run = Path(scratch, "sandboxes"), f"doctor-{os.getpid()}"
        boxes = ProcessSandboxes(place, run, Network.GATEWAY, (), machine)
        try:
            async with boxes.open(1, Limits(), None) as box:
                await box.write("isolation_probe.py", PROBE_SCRIPT.read_bytes())
                result = await box.run([*words, *HOST_PLACES], timeout=SECONDS)
        finally:
            boxes.threads.shutdown()
    if not result.ok:
        raise SandboxFailed(
            f"the isolation probe exited with status {result.exit_code}: {result.stderr.strip()[-300:]}"
        )
    return msgspec.json.decode(result.stdout, type=IsolationReport)


def describe_isolation(tried: IsolationReport, machine: MachineFeatures) -> list[DoctorFinding]:
    """Return one finding for each thing that a sandbox should keep a command from."""
    no_filter = f"there is no system call filter: {machine.why_no_filter}"
    without = no_filter if machine.works and not machine.filter else ""
    written = ", ".join(tried.writes)
    return [
        _make_finding("files", tried.writes, "the host's cannot be written", f"writes to {written}"),
        _describe_home(tried.home),
        _make_finding(
            "processes", tried.processes, "the host's are out of reach", "sees and signals the host's"
        ),
        _make_finding(
            "network",
            tried.network,
            "`gateway` reaches no service of this machine",
            "reaches services of this machine",
        ),
        _make_finding("kernel", tried.kernel, "`/proc/sys` is read-only", "writes `/proc/sys`"),
        _make_finding(
            "privileges", tried.privileges, "none, and none to gain", "has the privileges of its user"
        ),
        _make_finding(
            "system calls",
            tried.calls,
            "bpf, perf, io_uring, userfaultfd and others are refused",
            f"{', '.join(tried.calls)} can be called",
            without,
        ),
        _make_finding("namespaces", tried.namespaces, "no new ones", "makes new ones", without),
        _make_finding("keyring", tried.keyring, "out of reach", "reads the keys of its user", without),
        _make_finding(
            "limits",
            tried.queues,
            f"{tried.files} open files a process; no message queues",
            f"{tried.files} open files a process; message queues are shared with this user",
            without,
        ),
        _describe_inotify(),
    ]


def _describe_home(seen: Sequence[str]) -> DoctorFinding:
    try:
        there = set(os.listdir(find_home() or "/nowhere"))  # noqa: PTH208
    except OSError:
        there = set()
    shown = len(there & set(seen))
    value = f"{shown} of {len(there)} entries of this user's home can be seen"
    note = "commands see the files in it" if shown and shown == len(there) else ""
    return DoctorFinding(what="isolation: home", value=value, note=note)


def _describe_inotify() -> DoctorFinding:
    """Describe the inotify limit: the kernel counts instances per user, so no limit is per sandbox."""
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    value = f"{most} instances for all of this user"
    if most >= MANY_INSTANCES:
        return DoctorFinding(what="isolation: inotify", value=value)
    weaker = "one sandbox can use up all of them, and programs that watch files fail in the others. "
    hint = f"hint: `sysctl fs.inotify.max_user_instances={MANY_INSTANCES}`"
    return DoctorFinding(what="isolation: inotify", value=value, note=f"{weaker}{hint}")


def _make_finding(what: str, escaped: object, held: str, open_: str, note: str = "") -> DoctorFinding:
    note = note or "bubblewrap would prevent this"
    return choose_finding(f"isolation: {what}", not escaped, held, open_, note)
