"""What this machine gives a sandbox, and what is weaker without the rest. `holdwater doctor` prints it.

It tries each thing once in a process's life; nothing here decides: `process.py` takes the record.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from pathlib import Path

from ..core.config import SandboxRoot
from ..core.helper_environment import SYSTEM_PATH, build_environment
from ..core.records import Record
from .bubblewrap import PAUSES, base, is_mount_trouble
from .cgroup import CgroupHome, locate
from .handover import Handover, start_bubblewrap
from .root import make_root
from .seccomp import build_filter

PATIENCE = 10.0  # seconds


class Machine(Record, frozen=True):
    """What this machine gives a sandbox."""

    bubblewrap: str | None = None  # where it is
    version: str = ""
    works: bool = False
    why_not: str = ""
    filter: bytes = b""  # the system call filter that works here; empty: none
    why_no_filter: str = ""
    user_namespaces: bool = False
    cgroup: CgroupHome = CgroupHome(kind="none")
    root: bool = False

    @property
    def bwrap(self) -> str | None:
        """The bubblewrap to use, if it works."""
        return self.bubblewrap if self.works else None


class Finding(Record, frozen=True):
    """One line of `holdwater doctor`."""

    what: str
    value: str
    note: str = ""  # what is weaker, and what to do about it


@functools.cache
def probe() -> Machine:
    path = shutil.which("bwrap", path=SYSTEM_PATH)
    machine = os.uname().machine
    found = build_filter(machine)
    why_no_filter = "" if found else f"there is none for {machine}"
    why_not = _why_not(path, found)
    if why_not and found and not (without := _why_not(path, b"")):  # a kernel without filters
        found, why_no_filter, why_not = b"", why_not, without
    return Machine(
        filter=found,
        why_no_filter=why_no_filter,
        bubblewrap=path,
        version=_version(path) if path else "",
        works=not why_not,
        why_not=why_not,
        user_namespaces=_user_namespaces(),
        cgroup=locate(),
        root=os.geteuid() == 0,
    )


def findings(machine: Machine | None = None) -> list[Finding]:
    """What `machine` gives, in plain words."""
    machine = machine or probe()
    return [
        _on_bubblewrap(machine),
        _on_network(machine),
        _on_cgroup(machine),
        *_on_limits(machine),
        _on_user(machine),
    ]


def _on_bubblewrap(machine: Machine) -> Finding:
    if machine.works:
        return Finding(what="bubblewrap", value=f"{machine.version} works")
    return Finding(
        what="bubblewrap",
        value=f"not used: {machine.why_not}",
        note="commands see the host's files and processes and can write what this user can write; "
        "if a worker is killed, its commands live on until the next start sweeps them. "
        "hint: install the package `bubblewrap`; in a container, allow user namespaces",
    )


def _on_network(machine: Machine) -> Finding:
    if machine.works:
        return Finding(what="network", value="`gateway`, `none` and `open`")
    return Finding(
        what="network",
        value="`open` only",
        note="`gateway` does not keep commands from the network, and `none` is refused: both need bubblewrap",
    )


def _on_cgroup(machine: Machine) -> Finding:
    home = machine.cgroup
    if home.usable:
        return Finding(what="control groups", value=f"{home.kind}, one for each attempt")
    return Finding(
        what="control groups",
        value=f"not used: {home.why}",
        note="the limits on sandboxes are weaker, as said below. "
        "hint: run as root, or in a delegated group, such as `systemd-run --user --scope -p Delegate=yes`",
    )


def _on_limits(machine: Machine) -> list[Finding]:
    """Which limits on a sandbox hold here, and how."""
    return [
        _on_memory(machine.cgroup.usable),
        _on_cpu(machine.cgroup),
        _on_pids(machine),
        Finding(what="sandbox disk", value="watched; a single file by rlimit"),
        Finding(what="sandbox output", value="counted as it is read"),
    ]


def _on_memory(grouped: bool) -> Finding:
    if grouped:
        return Finding(what="sandbox memory", value="enforced by a control group")
    return Finding(
        what="sandbox memory",
        value="watched each second; each process by rlimit",
        note="what many processes take within a second is seen only then",
    )


def _on_cpu(home: CgroupHome) -> Finding:
    cores = "cores enforced by a control group" if home.cpu else "cores not limited"
    seconds = "watched in a control group" if home.cpuacct else "for each process by rlimit"
    note = "" if home.cpu else "a sandbox can use every core: there is no cpu controller"
    return Finding(what="sandbox cpu", value=f"{cores}; CPU time {seconds}", note=note)


def _on_pids(machine: Machine) -> Finding:
    if machine.cgroup.pids:
        return Finding(what="sandbox pids", value="enforced by a control group")
    if machine.root:
        return Finding(
            what="sandbox pids",
            value="not limited",
            note="there is no pids controller, and no rlimit holds for root. hint: run as an ordinary user",
        )
    return Finding(
        what="sandbox pids",
        value="by rlimit, with all that this user runs",
        note="there is no pids controller: that the limit was hit is not known, the command just fails",
    )


def _on_user(machine: Machine) -> Finding:
    if not machine.root:
        value = "an ordinary user" + ("" if machine.user_namespaces else ", without user namespaces")
        return Finding(what="user", value=value)
    note = "" if machine.works else "commands run as root on the host itself: use a container or bubblewrap"
    return Finding(what="user", value="root", note=note)


def _why_not(bwrap: str | None, filter_: bytes) -> str:
    """Why bubblewrap cannot be used as sandboxes use it; empty if it can."""
    if bwrap is None:
        return "it is not installed"
    for pause in (*PAUSES, 0.0):
        handover = Handover()
        try:
            words = start_bubblewrap(handover, bwrap, base(False, make_root(SandboxRoot.SYSTEM)), filter_)
            tried = subprocess.run(
                [*words, "/bin/sh", "-c", ":"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PATIENCE,
                env=build_environment(),
                pass_fds=handover.fds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            return f"it cannot be run: {e}"
        finally:
            handover.close()
        if tried.returncode == 0:
            return ""
        told = tried.stderr.decode(errors="replace").strip()
        if not is_mount_trouble(told):
            break
        time.sleep(pause)
    return told[:300] or f"it ended with {tried.returncode}"


def _version(bwrap: str) -> str:
    try:
        told = subprocess.run(
            [bwrap, "--version"], capture_output=True, timeout=PATIENCE, env=build_environment(), check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.decode(errors="replace").strip().removeprefix("bubblewrap ")[:40]


def _user_namespaces() -> bool:
    """Whether the kernel's switches allow them to an ordinary user; a missing switch forbids nothing."""
    most = _switch("user/max_user_namespaces", otherwise=1)
    allowed = _switch("kernel/unprivileged_userns_clone", otherwise=1)
    restricted = _switch("kernel/apparmor_restrict_unprivileged_userns", otherwise=0)
    return most > 0 and allowed == 1 and restricted == 0


def _switch(name: str, otherwise: int) -> int:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return otherwise
