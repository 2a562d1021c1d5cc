"""Detects which sandbox features this machine has, and describes the effects of missing ones.

`holdwater doctor` prints the findings. Each feature is tested once per process. Nothing is decided here:
`process.py` uses the record.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from pathlib import Path

from ..core.config import SandboxRoot
from ..core.environment import SYSTEM_PATH, build_environment
from ..core.records import Record
from .bubblewrap import PAUSES, build_base, is_mount_trouble, make_root
from .cgroup import CgroupHome, locate_home
from .kernel_protection import build_filter
from .launcher import DescriptorHandover, build_bwrap_argv

PATIENCE = 10.0  # seconds


class MachineFeatures(Record, frozen=True):
    """The sandbox features of this machine."""

    bubblewrap: str | None = None  # path of the program
    version: str = ""
    works: bool = False
    why_not: str = ""
    filter: bytes = b""  # the system call filter that works here; empty if none does
    why_no_filter: str = ""
    user_namespaces: bool = False
    cgroup: CgroupHome = CgroupHome(kind="none")
    root: bool = False

    @property
    def bwrap(self) -> str | None:
        """The path of bubblewrap, if it works."""
        return self.bubblewrap if self.works else None


class DoctorFinding(Record, frozen=True):
    """One line of `holdwater doctor`."""

    what: str
    value: str
    note: str = ""  # the weakness, and a hint
    filesystem: str = ""  # of a disk: its type, such as `tmpfs` or `overlay`


@functools.cache
def probe() -> MachineFeatures:
    path = shutil.which("bwrap", path=SYSTEM_PATH)
    machine = os.uname().machine
    found = build_filter(machine)
    why_no_filter = "" if found else f"not available for {machine}"
    why_not = _why_not(path, found)
    if why_not and found and not (without := _why_not(path, b"")):  # a kernel without filters
        found, why_no_filter, why_not = b"", why_not, without
    return MachineFeatures(
        filter=found,
        why_no_filter=why_no_filter,
        bubblewrap=path,
        version=_read_version(path) if path else "",
        works=not why_not,
        why_not=why_not,
        user_namespaces=_allows_user_namespaces(),
        cgroup=locate_home(),
        root=os.geteuid() == 0,
    )


def list_findings(machine: MachineFeatures | None = None) -> list[DoctorFinding]:
    """Return the findings about `machine` for a reader."""
    machine = machine or probe()
    home = machine.cgroup
    return [
        choose_finding(
            "bubblewrap",
            machine.works,
            f"{machine.version} works",
            f"not used: {machine.why_not}",
            "commands see the host's files and processes and can write what this user can write; "
            "if a worker is killed, its commands live on until the next start sweeps them. "
            "hint: install the package `bubblewrap`; in a container, allow user namespaces",
        ),
        choose_finding(
            "network",
            machine.works,
            "`gateway`, `none` and `open`",
            "`open` only",
            "`gateway` does not keep commands from the network, and `none` is refused: both need bubblewrap",
        ),
        choose_finding(
            "control groups",
            home.usable,
            f"{home.kind}, one for each attempt",
            f"not used: {home.why}",
            "the limits on sandboxes are weaker, as described below. "
            "hint: run as root, or in a delegated group, such as "
            "`systemd-run --user --scope -p Delegate=yes`",
        ),
        choose_finding(
            "sandbox memory",
            home.usable,
            "enforced by a control group",
            "watched each second; each process by rlimit",
            "memory that many processes take within a second is detected late",
        ),
        _describe_cpu(home),
        _describe_pids(machine),
        DoctorFinding(what="sandbox disk", value="watched; a single file by rlimit"),
        DoctorFinding(what="sandbox output", value="counted as it is read"),
        _describe_user(machine),
    ]


def choose_finding(what: str, holds: bool, value: str, otherwise: str, note: str) -> DoctorFinding:
    """Return a finding with `value` if the feature holds; else the weaker one, and a note about it."""
    if holds:
        return DoctorFinding(what=what, value=value)
    return DoctorFinding(what=what, value=otherwise, note=note)


def _describe_cpu(home: CgroupHome) -> DoctorFinding:
    cores = "cores enforced by a control group" if home.cpu else "cores not limited"
    seconds = "watched in a control group" if home.cpuacct else "for each process by rlimit"
    note = "" if home.cpu else "a sandbox can use every core: there is no cpu controller"
    return DoctorFinding(what="sandbox cpu", value=f"{cores}; CPU time {seconds}", note=note)


def _describe_pids(machine: MachineFeatures) -> DoctorFinding:
    if machine.cgroup.pids:
        return DoctorFinding(what="sandbox pids", value="enforced by a control group")
    if machine.root:
        return DoctorFinding(
            what="sandbox pids",
            value="not limited",
            note="there is no pids controller, and no rlimit holds for root. hint: run as an ordinary user",
        )
    return DoctorFinding(
        what="sandbox pids",
        value="by rlimit, which counts all processes of this user",
        note="there is no pids controller: hitting the limit is not detected, the command just fails",
    )


def _describe_user(machine: MachineFeatures) -> DoctorFinding:
    if not machine.root:
        value = "an ordinary user" + ("" if machine.user_namespaces else ", without user namespaces")
        return DoctorFinding(what="user", value=value)
    note = "" if machine.works else "commands run as root on the host itself: use a container or bubblewrap"
    return DoctorFinding(what="user", value="root", note=note)


def _why_not(bwrap: str | None, filter_: bytes) -> str:
    """Return why bubblewrap cannot run as sandboxes need it; empty if it can."""
    if bwrap is None:
        return "it is not installed"
    for pause in (*PAUSES, 0.0):
        handover = DescriptorHandover()
        try:
            words = build_bwrap_argv(
                handover, bwrap, build_base(False, make_root(SandboxRoot.SYSTEM)), filter_
            )
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
    return told[:300] or f"it exited with status {tried.returncode}"


def _read_version(bwrap: str) -> str:
    try:
        told = subprocess.run(
            [bwrap, "--version"], capture_output=True, timeout=PATIENCE, env=build_environment(), check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.decode(errors="replace").strip().removeprefix("bubblewrap ")[:40]


def _allows_user_namespaces() -> bool:
    """Whether the kernel's settings allow them to an ordinary user; a missing setting forbids nothing."""
    most = _read_switch("user/max_user_namespaces", otherwise=1)
    allowed = _read_switch("kernel/unprivileged_userns_clone", otherwise=1)
    restricted = _read_switch("kernel/apparmor_restrict_unprivileged_userns", otherwise=0)
    return most > 0 and allowed == 1 and restricted == 0


def _read_switch(name: str, otherwise: int) -> int:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return otherwise
