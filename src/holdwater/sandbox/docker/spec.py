"""What the daemon is asked for when a container is made. Pure; `container.py` asks.

Everything that holds a sandbox to its limits from outside is here: memory, CPU, processes, capabilities.
"""

from __future__ import annotations

import posixpath
from typing import Any

import msgspec

from ...core.records import Limits, MiB, Record, Start

WORK = "/work"  # of a container whose image names none
PRIVATE = "/run/holdwater"
SLACK = 900.0  # seconds beyond all limits of an attempt after which a forgotten container ends by itself
LEAST_MEMORY = 6 * MiB  # the daemon takes no less
NOWHERE = "127.0.0.1"  # a resolver's address, which is the container's own: nothing listens there
TAKEN_FIRST = 1000  # by the kernel, when the machine is out of memory: before any worker

# What package managers and test suites need as root. Not among them: NET_RAW (speaks for others on the
# network), MKNOD (devices), SETPCAP and SETFCAP (hand on what is left), SYS_PTRACE.
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID", "KILL", "NET_BIND_SERVICE"),
    "SYS_CHROOT",  # test suites of servers; it opens nothing that the container does not have
    "AUDIT_WRITE",  # without it `su` fails in images with PAM
)

# The command of a container sleeps, and reaps what other commands leave: a shell that waits for one child
# reaps any. A killed `sleep` is started again. `READY` shows that an entrypoint has handed over.
READY = "holdwater: the command runs"
SLEEP = 'while sleep "$0" & wait $!; code=$?; [ $code -gt 128 ]; do :; done; exit $code'
IDLE = 2  # processes of a container in which no command runs: the shell, and `sleep`
KEEP_ALIVE = ["sh", "-c", f'echo "{READY}"; {SLEEP}']

# An entrypoint that is one of these, without a script, starts nothing and takes our command for a script.
INTERPRETERS = ("sh", "bash", "dash", "ash", "zsh", "node", "perl", "python", "python3", "ruby")


class HealthCheck(Record, frozen=True):
    """The health check that an image declares."""

    argv: tuple[str, ...]
    interval: float = 30.0  # seconds, as docker has it
    timeout: float = 30.0
    start_period: float = 0.0
    retries: int = 3


class Image(Record, frozen=True):
    """What of an image matters here."""

    id: str
    path: str = ""
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    health: HealthCheck | None = None

    @property
    def starts_services(self) -> bool:
        """Whether its entrypoint has to run: a bare interpreter starts nothing."""
        if not self.entrypoint:
            return False
        program, *words = self.entrypoint
        bare = posixpath.basename(program) in INTERPRETERS and all(word.startswith("-") for word in words)
        return not bare


def workdir(start: Start, image: Image) -> str:
    """Where commands are started: a directory of its own where neither says, and never the root."""
    return start.workdir or image.workdir.rstrip("/") or WORK


class Wanted(msgspec.Struct, frozen=True):
    """One container."""

    start: Start
    image: Image
    limits: Limits
    network: str
    labels: dict[str, str]
    mounts: tuple[tuple[str, str], ...] = ()
    search: tuple[str, ...] = ()  # directories that come first on PATH
    read_only: bool = False
    cpus: int = 1  # that the daemon's machine has
    quota: bool = False  # the disk is limited by the daemon's storage driver
    resolves: bool = False  # names: the daemon's resolver asks the machine's, wherever a network leads

    @property
    def user(self) -> str:
        return self.start.user or self.image.user

    @property
    def as_root(self) -> bool:
        return self.user.partition(":")[0] in ("", "root", "0")

    @property
    def workdir(self) -> str:
        return workdir(self.start, self.image)

    @property
    def first_workdir(self) -> str:
        """Where the first process is started; the daemon makes it, as root's."""
        if self.image.starts_services:
            return self.image.workdir or "/"
        return self.workdir if self.as_root else "/"

    @property
    def writable(self) -> list[str]:
        """Where a container with a read-only root can be written."""
        return sorted({"/tmp", PRIVATE, self.workdir, *self.start.directories} - {"/"})


def body(wanted: Wanted) -> dict[str, Any]:
    """The body of `POST /containers/create`."""
    limits, start = wanted.limits, wanted.start
    seconds = str(int(limits.setup + limits.acting + limits.grading + SLACK))
    asked: dict[str, Any] = {
        "Image": start.image,
        "User": "0",  # of the first process alone: each command has its own
        "WorkingDir": wanted.first_workdir,
        "Labels": wanted.labels,
        "Healthcheck": {"Test": ["NONE"]},  # `startup.py` runs it until it passes, and no longer
        "StopSignal": "SIGKILL",
        "HostConfig": _host(wanted),
    }
    env: dict[str, str] = {}
    if wanted.search:
        env["PATH"] = ":".join([*wanted.search, wanted.image.path or "/usr/local/bin:/usr/bin:/bin"])
    if wanted.image.starts_services:
        env |= start.env
        asked |= {"Cmd": [*KEEP_ALIVE, seconds], "User": wanted.image.user}
    else:
        asked |= {"Entrypoint": KEEP_ALIVE, "Cmd": [seconds]}
    asked["Env"] = [f"{name}={value}" for name, value in env.items()]
    if wanted.read_only:
        asked["Volumes"] = {path: {} for path in wanted.writable}
    return asked


def _host(wanted: Wanted) -> dict[str, Any]:
    limits = wanted.limits
    ulimits = [_ulimit("core", 0)]
    # No `AutoRemove`: a daemon that starts again after a crash removes such a container twice at once, and
    # may list it for good as one that is dead and that it does not know.
    host: dict[str, Any] = {
        "NetworkMode": wanted.network,
        "PidsLimit": limits.pids,
        "OomScoreAdj": TAKEN_FIRST,
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": wanted.read_only,
        "LogConfig": {"Type": "none"},
        "Mounts": [_mount(here, there) for here, there in wanted.mounts],
        "Ulimits": ulimits,
    }
    if not wanted.resolves:
        host["Dns"] = [NOWHERE]
    if limits.held_to:
        host["Memory"] = host["MemorySwap"] = max(LEAST_MEMORY, limits.held_to)
    if limits.cpus:
        host["NanoCpus"] = int(1e9 * max(0.01, min(limits.cpus, wanted.cpus)))
    if limits.disk:
        ulimits.append(_ulimit("fsize", limits.disk))  # no file is larger than the whole may be
        if wanted.quota:
            host["StorageOpt"] = {"size": str(limits.disk)}
    return host


def _ulimit(name: str, most: int) -> dict[str, Any]:
    return {"Name": name, "Soft": most, "Hard": most}


def _mount(here: str, there: str) -> dict[str, Any]:
    return {
        "Type": "bind",
        "Source": here,
        "Target": there,
        "ReadOnly": True,
        "BindOptions": {"Propagation": "rprivate"},
    }
