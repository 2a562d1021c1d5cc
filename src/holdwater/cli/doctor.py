"""`holdwater doctor`: what this machine gives a run, and what is weaker for it. Changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .console import Console
from .flags import Flag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..governor.cgroups import Groups
    from ..governor.reading import Bound, Disk, Reading
    from ..sandbox.probe import Finding

FEW_FILES = 4096  # open files: below this, hundreds of attempts at once can run out
LITTLE_DISK = 1 << 30


def doctor(*, json: Flag = False) -> int:
    """Say what this machine gives, and what is weaker without root or bubblewrap.

    It tries each thing and changes nothing. The exit status is 0 whatever it finds.

    For example: `holdwater doctor`

    Parameters
    ----------
    json
        Print one JSON document.
    """
    found = examine()
    if json:
        Console().data({"findings": found, "notes": sum(1 for finding in found if finding.note)})
    else:
        Console().page(page(found))
    return 0


def examine() -> list[Finding]:
    from ..sandbox import probe

    return [
        on_python(),
        on_cpu(),
        *on_memory_and_disk(),
        on_allocator(),
        on_files(),
        *probe.findings(),
        *on_isolation(),
        on_packaging(),
        on_docker(),
        *on_containers(),
        on_fence(),
    ]


def on_python() -> Finding:
    import platform

    from ..sandbox.probe import Finding
    from ..version import __version__

    value = (
        f"{platform.python_version()} on {platform.system()} {platform.release()}, holdwater {__version__}"
    )
    return Finding(what="python", value=value)


def on_cpu() -> Finding:
    import os

    from ..sandbox.probe import Finding

    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    value = f"{usable}" if usable == present else f"{usable} of {present}"
    return Finding(what="cpu", value=value)


def on_memory_and_disk() -> list[Finding]:
    """What the meter of a run in this directory would read, and from where."""
    import tempfile

    from ..governor.cpu import count_cores
    from ..governor.meter import Meter
    from ..run.config import environment

    request = environment().memory_request
    meter = Meter({"run": Path.cwd(), "temp": Path(tempfile.gettempdir())}, request=request)
    reading = meter.read(own=0)
    return [
        *(on_bound(bound, first=bound is reading.bound) for bound in reading.bounds),
        on_pressure(reading),
        on_group(meter.groups(), reading.oom_kills),
        *(on_disk(disk) for disk in reading.disks),
        on_start(reading, count_cores()),
    ]


def on_start(reading: Reading, cores: float) -> Finding:
    """How many attempts a run would begin with, and which limit would bind first."""
    import os

    from ..core.config import SLOTS_A_WORKER
    from ..governor.crowding import CpuLimit
    from ..governor.gate import Gate
    from ..governor.peaks import sandbox_disk, sandbox_memory, worker_memory
    from ..governor.reading import Bound
    from ..sandbox.probe import Finding
    from ..view.figures import size

    gate, disk = Gate(), reading.disk("run")
    gate.memory.measured(reading.holding, {})
    if disk.total:
        gate.disk.measured((Bound("disk", disk.total, disk.total - disk.free, ""),), {})
    need = sandbox_memory(gate.memory.most).need + worker_memory().need
    allowed = {
        "slots": SLOTS_A_WORKER * (os.cpu_count() or 1),
        "memory": max(0, gate.memory.room) // need,
        "disk": max(0, gate.disk.room) // sandbox_disk().need,
        "cpu": CpuLimit(cores).most,
    }
    first = min(allowed, key=lambda name: allowed[name])
    told = ", ".join(f"{name} {number}" for name, number in allowed.items() if number < 1_000_000)
    note = "" if allowed[first] else f"nothing would start: there is too little {first}"
    value = f"{allowed[first]} attempts to begin with, limited by {first} ({told}; {size(need)} each)"
    return Finding(what="at once", value=value, note=note)


def on_bound(bound: Bound, first: bool) -> Finding:
    from ..sandbox.probe import Finding
    from ..view.figures import size

    room = f"{size(bound.room)} left of {size(bound.limit)}" if bound.used else size(bound.limit)
    binds = "; binds first" if first else ""
    return Finding(what="memory", value=f"{bound.name}: {room}, {bound.source}{binds}")


def on_pressure(reading: Reading) -> Finding:
    from ..sandbox.probe import Finding

    if reading.pressure is not None:
        value = f"{reading.pressure:.0f} % of the last 10 s waited for memory (PSI)"
        return Finding(what="pressure", value=value)
    return Finding(
        what="pressure",
        value="not told by this kernel",
        note="that memory is short is seen by its use alone. hint: boot a kernel that has PSI with `psi=1`",
    )


def on_group(groups: Groups, kills: int) -> Finding:
    from ..sandbox.probe import Finding

    if groups.own is None:
        return Finding(what="own group", value="none with a memory controller")
    killed = f", in which the kernel killed {kills} for memory so far" if kills else ""
    return Finding(
        what="own group", value=f"`{groups.own.directory}`, control groups version {groups.version}{killed}"
    )


def on_disk(disk: Disk) -> Finding:
    from ..sandbox.probe import Finding
    from ..view.figures import size

    room = f"{size(disk.free)} free of {size(disk.total)}" if disk.total else "of unknown size"
    hint = "hint: give `--out` a directory" if "run" in disk.names else "hint: let `TMPDIR` name a directory"
    if disk.memory:
        note = f"a tmpfs: what is written there is memory. {hint} on a disk"
    elif disk.total and disk.free < LITTLE_DISK:
        note = f"a run will soon stop for want of space. {hint} with more"
    else:
        note = ""
    return Finding(what="disk", value=f"{room} for {', '.join(disk.names)} at `{disk.path}`", note=note)


def on_allocator() -> Finding:
    """What workers are started with, tried: what some work leaves in a process with it, and without."""
    from ..run.allocator import asked, measured, settings
    from ..run.config import environment
    from ..sandbox.probe import Finding
    from ..view.figures import size

    env = environment().inherited
    chosen = settings(env)
    found, without = measured({**env, **chosen}, trimmed=True), measured(env, trimmed=False)
    if found is None or without is None:
        return Finding(what="allocator", value=asked(chosen) or "as it is", note="not measured")
    left = f"{size(found.rest)} stay of {size(found.peak)} in a quiet worker"
    value = f"{found.allocator}: {left}; {size(without.rest)} as it comes"
    if asked(chosen) not in ("", found.allocator):
        return Finding(what="allocator", value=value, note=f"`{asked(chosen)}` was asked for and ignored")
    hint = "busy workers give less memory back. hint: install the package `libjemalloc2`"
    return Finding(what="allocator", value=value, note=hint if found.allocator == "glibc" else "")


def on_files() -> Finding:
    import resource

    from ..sandbox.probe import Finding

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    note = (
        f"attempts at once are limited by it. hint: `ulimit -n {FEW_FILES}`" if 0 <= soft < FEW_FILES else ""
    )
    return Finding(what="open files", value=f"{soft}, at most {hard}", note=note)


def on_isolation() -> list[Finding]:
    """What a process in a sandbox of this machine can do, tried in one."""
    from ..api import complete
    from ..core.errors import HoldwaterError
    from ..sandbox.isolation import describe_isolation, try_isolation
    from ..sandbox.probe import Finding, probe

    try:
        return describe_isolation(complete(try_isolation(probe())), probe())
    except HoldwaterError as error:
        return [Finding(what="isolation", value="not tried", note=error.message)]


def on_containers() -> list[Finding]:
    """What keeps containers from the machine; nothing where no daemon answers."""
    from ..api import complete
    from ..core.errors import HoldwaterError
    from ..run.config import environment
    from ..run.daemon import list_protections
    from ..sandbox.probe import Finding

    try:
        found = complete(list_protections(environment()))
    except HoldwaterError:
        return []
    value = f"no new privileges, few capabilities; the daemon adds {', '.join(found) or 'nothing'}"
    note = "" if "seccomp" in found else "the daemon filters no system calls of containers"
    return [Finding(what="isolation: containers", value=value, note=note)]


def on_packaging() -> Finding:
    import shutil

    from ..sandbox.probe import Finding

    if found := shutil.which("patchelf"):
        return Finding(what="packaging", value=f"Python agents become layers with `{found}`")
    return Finding(
        what="packaging",
        value="directories alone",
        note="no Python agent can be made a layer of images. hint: install the package `patchelf`",
    )


def on_docker() -> Finding:
    """Images that are assembled in a registry need none."""
    from ..api import complete
    from ..core.errors import HoldwaterError
    from ..run.config import environment
    from ..run.daemon import look
    from ..sandbox.probe import Finding
    from ..view.figures import size

    try:
        disk, command = complete(look(environment()))
    except HoldwaterError as error:
        note = "no sandbox can be a container, and no image with steps of its own can be built. "
        return Finding(what="docker", value=error.message, note=f"{note}hint: start a docker daemon")
    free = f"{size(disk.free)} free of {size(disk.total)} at `{disk.path}`"
    return Finding(what="docker", value=f"builds go through `{command}`; {free}")


def on_fence() -> Finding:
    from ..sandbox.docker.fence import why_not
    from ..sandbox.probe import Finding

    if not (why := why_not()):
        return Finding(what="containers", value="reach the gateway and nothing else of this machine")
    return Finding(
        what="containers",
        value=f"no fence: {why}",
        note="services of this machine that listen on all its addresses can be reached from containers. "
        "hint: run as root, with the package `iptables`",
    )


def page(found: list[Finding]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from ..view.figures import line

    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True, style="bold")
    rows.add_column()
    for finding in found:
        rows.add_row(finding.what, Text(line(finding.value), "yellow" if finding.note else "green"))
        if finding.note:
            rows.add_row("", Text(line(finding.note, 1000), "dim"))
    notes = sum(1 for finding in found if finding.note)
    verdict = (
        "everything is there"
        if not notes
        else f"{notes} of {len(found)} could be better; all of it is optional"
    )
    return Group(rows, Text(f"\n{verdict}"))
