"""Reports what this machine offers a run, what limits it, and which suites and agents have a name here.

It changes nothing. `governor/` and `sandbox/probe.py` take the readings.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from pathlib import Path

from ..agent.loader import OTHER_AGENTS as OTHER_AGENTS
from ..agent.loader import list_agents as list_agents
from ..core.config import SLOTS_A_WORKER
from ..core.errors import HoldwaterError
from ..governor.cgroups import OwnCgroups
from ..governor.cpu import CpuLimit, count_cores
from ..governor.disks import read_disks
from ..governor.gate import Gate
from ..governor.leases import sandbox_disk, sandbox_memory, worker_memory
from ..governor.meter import ResourceMeter
from ..governor.resource_reading import DiskReading, ResourceBound, ResourceReading
from ..plugin import PluginEntry as PluginEntry
from ..rollout.allocator import choose_settings, measure_effect, name_allocator
from ..run.setup.config import read_environment
from ..sandbox.isolation import describe_isolation, try_isolation
from ..sandbox.probe import DoctorFinding as DoctorFinding
from ..sandbox.probe import list_findings, probe
from ..suite.loader import OTHER_SUITES as OTHER_SUITES
from ..suite.loader import list_suites as list_suites
from ..version import __version__
from ..view.formatting import size
from .process import complete

FEW_FILES = 4096  # open files; with fewer, hundreds of concurrent attempts can run out
LITTLE_DISK = 1 << 30
SETTINGS = {"run": "--out", "scratch": "--scratch", "temp": "TMPDIR", "cache": "HOLDWATER_CACHE"}
LAYERED = {"overlay", "aufs", "fuse-overlayfs"}
IN_MEMORY_NOTE = "files there use memory, and are gone after a restart"
LAYERED_NOTE = "the file system of a container: files there are gone with it, and count as its storage"


def examine_machine(scratch: Path | None = None) -> list[DoctorFinding]:
    """Return the findings for a run from the current directory, with its sandboxes in `scratch`."""
    return [
        report_python(),
        report_cpu(),
        *report_memory_disk(scratch),
        report_allocator(),
        report_files(),
        *list_findings(),
        *report_isolation(),
        report_packaging(),
        report_docker(),
        *report_containers(),
        report_fence(),
    ]


def report_python() -> DoctorFinding:
    value = (
        f"{platform.python_version()} on {platform.system()} {platform.release()}, holdwater {__version__}"
    )
    return DoctorFinding(what="python", value=value)


def report_cpu() -> DoctorFinding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable}" if usable == present else f"{usable} of {present}"
    return DoctorFinding(what="cpu", value=value)


def report_memory_disk(scratch: Path | None = None) -> list[DoctorFinding]:
    """Report what the meter of a run in this directory would read, and from where."""
    environment = read_environment()
    places = {"run": Path.cwd(), "temp": Path(tempfile.gettempdir()), "cache": environment.cache}
    if scratch is not None:
        places["scratch"] = scratch
    meter = ResourceMeter(places, request=environment.memory_request)
    reading = meter.read(own=0)
    return [
        *(report_bound(bound, first=bound is reading.bound) for bound in reading.bounds),
        report_pressure(reading),
        report_group(meter.groups(), reading.oom_kills),
        *(report_disk(disk) for disk in reading.disks),
        report_start(reading, count_cores()),
    ]


def report_start(reading: ResourceReading, cores: float) -> DoctorFinding:
    """Report how many attempts a run would start with, and which limit applies first."""
    gate, disk = Gate(), reading.disk("run")
    gate.memory.set_usage(reading.holding, {})
    if disk.total:
        gate.disk.set_usage((ResourceBound("disk", disk.total, disk.total - disk.free, ""),), {})
    need = sandbox_memory(gate.memory.largest_lease).need + worker_memory().need
    allowed = {
        "slots": SLOTS_A_WORKER * (os.cpu_count() or 1),
        "memory": max(0, gate.memory.room) // need,
        "disk": max(0, gate.disk.room) // sandbox_disk().need,
        "cpu": CpuLimit(cores).most,
    }
    first = min(allowed, key=lambda name: allowed[name])
    told = ", ".join(f"{name} {number}" for name, number in allowed.items() if number < 1_000_000)
    note = "" if allowed[first] else f"no attempt would start: too little {first}"
    value = f"{allowed[first]} attempts at the start, limited by {first} ({told}; {size(need)} each)"
    return DoctorFinding(what="at once", value=value, note=note)


def report_bound(bound: ResourceBound, first: bool) -> DoctorFinding:
    room = f"{size(bound.room)} left of {size(bound.limit)}" if bound.used else size(bound.limit)
    binds = "; binds first" if first else ""
    return DoctorFinding(what="memory", value=f"{bound.name}: {room}, {bound.source}{binds}")


def report_pressure(reading: ResourceReading) -> DoctorFinding:
    if reading.pressure is not None:
        value = f"{reading.pressure:.0f} % of the last 10 s waited for memory (PSI)"
        return DoctorFinding(what="pressure", value=value)
    return DoctorFinding(
        what="pressure",
        value="not reported by this kernel",
        note="memory shortage is detected by usage alone. hint: boot a kernel that has PSI with `psi=1`",
    )


def report_group(groups: OwnCgroups, kills: int) -> DoctorFinding:
    if groups.own is None:
        return DoctorFinding(what="own group", value="none with a memory controller")
    killed = f", where the kernel killed {kills} for memory so far" if kills else ""
    return DoctorFinding(
        what="own group", value=f"`{groups.own.directory}`, control groups version {groups.version}{killed}"
    )


def report_disk(disk: DiskReading) -> DoctorFinding:
    room = f"{size(disk.free)} free of {size(disk.total)}" if disk.total else "of unknown size"
    hint = f"hint: set {' and '.join(f'`{SETTINGS[name]}`' for name in disk.names)} to a directory"
    if disk.memory:
        note = f"{IN_MEMORY_NOTE}. {hint} on a disk"
    elif disk.filesystem in LAYERED:
        note = f"{LAYERED_NOTE}. {hint} on a volume"
    elif disk.total and disk.free < LITTLE_DISK:
        note = f"a run will soon stop for lack of space. {hint} with more"
    else:
        note = ""
    shown = f" ({disk.filesystem})" if disk.filesystem else ""
    value = f"{room} for {', '.join(disk.names)} at `{disk.path}`{shown}"
    return DoctorFinding(what="disk", value=value, note=note, filesystem=disk.filesystem)


def report_allocator() -> DoctorFinding:
    """Measure the workers' allocator: the memory that stays in a process after work, with and without it."""
    env = read_environment().inherited
    chosen = choose_settings(env)
    found, without = measure_effect({**env, **chosen}, trimmed=True), measure_effect(env, trimmed=False)
    if found is None or without is None:
        return DoctorFinding(what="allocator", value=name_allocator(chosen) or "default", note="not measured")
    left = f"{size(found.rest)} stay of {size(found.peak)} in a quiet worker"
    value = f"{found.allocator}: {left}; {size(without.rest)} by default"
    if name_allocator(chosen) not in ("", found.allocator):
        return DoctorFinding(
            what="allocator", value=value, note=f"`{name_allocator(chosen)}` was requested but ignored"
        )
    hint = "busy workers return less memory. hint: install the package `libjemalloc2`"
    return DoctorFinding(what="allocator", value=value, note=hint if found.allocator == "glibc" else "")


def report_files() -> DoctorFinding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    note = f"limits concurrent attempts. hint: `ulimit -n {FEW_FILES}`" if 0 <= soft < FEW_FILES else ""
    return DoctorFinding(what="open files", value=f"{soft}, at most {hard}", note=note)


def report_isolation() -> list[DoctorFinding]:
    """Test in a sandbox what a process in it can do on this machine."""
    try:
        return describe_isolation(complete(try_isolation(probe())), probe())
    except HoldwaterError as error:
        return [DoctorFinding(what="isolation", value="not tested", note=error.message)]


def report_containers() -> list[DoctorFinding]:
    """Report what isolates containers from the machine; empty if no daemon answers."""
    from ..run.builds.build_daemon import list_protections

    try:
        found = complete(list_protections(read_environment()))
    except HoldwaterError:
        return []
    value = f"no new privileges, few capabilities; the daemon adds {', '.join(found) or 'nothing'}"
    note = "" if "seccomp" in found else "the daemon does not filter the system calls of containers"
    return [DoctorFinding(what="isolation: containers", value=value, note=note)]


def report_packaging() -> DoctorFinding:
    if found := shutil.which("patchelf"):
        return DoctorFinding(what="packaging", value=f"Python agents become layers with `{found}`")
    return DoctorFinding(
        what="packaging",
        value="directories only",
        note="Python agents cannot become image layers. hint: install the package `patchelf`",
    )


def report_docker() -> DoctorFinding:
    """Report on the docker daemon; images that are assembled in a registry do not need one."""
    from ..run.builds.build_daemon import inspect_daemon

    try:
        disk, command = complete(inspect_daemon(read_environment()))
    except HoldwaterError as error:
        note = "container sandboxes and images with build steps are not available. "
        return DoctorFinding(what="docker", value=error.message, note=f"{note}hint: start a docker daemon")
    (store,) = read_disks({"daemon": Path(disk.path)}, Path("/proc"))
    shown = f" ({store.filesystem})" if store.filesystem else ""
    free = f"{size(disk.free)} free of {size(disk.total)} at `{disk.path}`{shown}"
    note = "images and containers use memory" if store.memory else ""
    if store.filesystem in LAYERED:
        note = "docker copies each layer in full on such a file system"
    hint = "hint: put the daemon's `data-root` on a disk"
    return DoctorFinding(
        what="docker",
        value=f"builds go through `{command}`; {free}",
        note=f"{note}. {hint}" if note else "",
        filesystem=store.filesystem,
    )


def report_fence() -> DoctorFinding:
    from ..sandbox.docker.network import why_unavailable

    if not (why := why_unavailable()):
        return DoctorFinding(what="containers", value="can reach only the gateway on this machine")
    return DoctorFinding(
        what="containers",
        value=f"no firewall: {why}",
        note="containers can reach services of this machine that listen on all its addresses. "
        "hint: run as root, with the package `iptables`",
    )
