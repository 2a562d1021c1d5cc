"""What process sandboxes of this machine keep a command from: tried in a real one, and said in plain words.

`holdwater doctor` prints all of it, the start of a run what is missing. `tries.py` does the tries.
"""

from __future__ import annotations

import os
import pwd
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..core.errors import SandboxFailed
from ..core.records import Limits, Network, Record
from .probe import Finding, Machine
from .process import ProcessSandboxes

TRIES = Path(__file__).with_name("tries.py")
SECONDS = 60.0
MANY_INSTANCES = 8192  # of inotify: each takes memory, which counts for its sandbox
HOST_PLACES = ("/", "/etc", "/usr", "/var", "/opt", "/home", "/root")


class Tried(Record, frozen=True):
    """What a process in a sandbox could do outside of it."""

    writes: tuple[str, ...]  # directories of the host
    home: tuple[str, ...]  # entries of this user's home that it sees
    processes: bool  # signal one of the host's
    network: bool  # connect to a service of this machine, with network `gateway`
    kernel: bool  # write settings of the kernel
    keyring: bool
    namespaces: bool
    calls: tuple[str, ...]  # that no filter refuses
    privileges: bool  # has capabilities, or gains privileges by an exec
    queues: bool  # POSIX message queues, whose bytes count for the whole user
    files: int  # open at once in one process


def describe_missing_isolation(machine: Machine) -> str:
    """What commands can do outside of their sandbox; empty where bubblewrap keeps them in."""
    if machine.bwrap:
        return ""
    user = "root" if machine.root else "this user"
    return (
        f"sandboxes are not isolated, because bubblewrap is not used: {machine.why_not or 'not available'}. "
        f"Commands read and write every file that {user} can, see and trace other processes with the keys in "
        "their memory, and reach the network whatever `--network` says. "
        "hint: install the package `bubblewrap`, or add `--sandbox docker`"
    )


async def try_isolation(machine: Machine) -> Tried:
    """Start a sandbox and try what a process in it can do."""
    python = os.path.realpath(sys.executable)
    with tempfile.TemporaryDirectory(prefix="holdwater-doctor-") as scratch, socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen()
        words = [python, "-I", "-S", "tries.py", str(os.getpid()), str(service.getsockname()[1]), find_home()]
        place, run = Path(scratch, "sandboxes"), f"doctor-{os.getpid()}"
        boxes = ProcessSandboxes(place, run, Network.GATEWAY, (), machine)
        try:
            async with boxes.open(1, Limits(), None) as box:
                await box.write("tries.py", TRIES.read_bytes())
                result = await box.run([*words, *HOST_PLACES], timeout=SECONDS)
        finally:
            boxes.threads.shutdown()
    if not result.ok:
        raise SandboxFailed(f"the tries ended with {result.exit_code}: {result.stderr.strip()[-300:]}")
    return msgspec.json.decode(result.stdout, type=Tried)


def describe_isolation(tried: Tried, machine: Machine) -> list[Finding]:
    """One line for each thing that a sandbox should keep a command from."""
    no_filter = f"there is no filter of system calls: {machine.why_no_filter}"
    without = no_filter if machine.works and not machine.filter else ""
    written = ", ".join(tried.writes)
    return [
        _line("files", tried.writes, "the host's cannot be written", f"writes to {written}"),
        _on_home(tried.home),
        _line("processes", tried.processes, "the host's are out of reach", "sees and signals the host's"),
        _line(
            "network",
            tried.network,
            "`gateway` reaches no service of this machine",
            "reaches services of this machine",
        ),
        _line("kernel", tried.kernel, "`/proc/sys` is read-only", "writes `/proc/sys`"),
        _line("privileges", tried.privileges, "none, and none to gain", "has those of its user"),
        _line(
            "system calls",
            tried.calls,
            "bpf, perf, io_uring, userfaultfd and others are refused",
            f"{', '.join(tried.calls)} can be called",
            without,
        ),
        _line("namespaces", tried.namespaces, "no new ones", "makes new ones", without),
        _line("keyring", tried.keyring, "out of reach", "reads the keys of its user", without),
        _line(
            "limits",
            tried.queues,
            f"{tried.files} open files a process; no message queues",
            f"{tried.files} open files a process; message queues are shared with this user",
            without,
        ),
        _on_inotify(),
    ]


def find_home() -> str:
    """The home directory of this user, as the machine has it; empty: the user has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def _on_home(seen: Sequence[str]) -> Finding:
    try:
        there = set(os.listdir(find_home() or "/nowhere"))  # noqa: PTH208
    except OSError:
        there = set()
    shown = len(there & set(seen))
    value = f"{shown} of {len(there)} entries of this user's home can be seen"
    note = "commands see what lies there" if shown and shown == len(there) else ""
    return Finding(what="isolation: home", value=value, note=note)


def _on_inotify() -> Finding:
    """The kernel counts instances for a user, in whatever sandbox: no limit holds for one alone."""
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    value = f"{most} instances for all of this user"
    if most >= MANY_INSTANCES:
        return Finding(what="isolation: inotify", value=value)
    weaker = "one sandbox can use up all of them, and programs that watch files fail in the others. "
    hint = f"hint: `sysctl fs.inotify.max_user_instances={MANY_INSTANCES}`"
    return Finding(what="isolation: inotify", value=value, note=f"{weaker}{hint}")


def _line(what: str, escaped: object, held: str, open_: str, note: str = "") -> Finding:
    if not escaped:
        return Finding(what=f"isolation: {what}", value=held)
    return Finding(what=f"isolation: {what}", value=open_, note=note or "bubblewrap keeps commands from it")
