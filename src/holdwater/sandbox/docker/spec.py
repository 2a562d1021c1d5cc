"""Builds the request that creates a container. It does no I/O: `container.py` sends the request.

All limits that apply to a container from outside are set here: memory, CPU, processes, capabilities.
"""

from __future__ import annotations

import posixpath
from typing import Any

import msgspec

from ...core.records import Limits, MiB, Record, SandboxSpec

WORK = "/work"  # for an image without a working directory
PRIVATE = "/run/holdwater"
SLACK = 900.0  # seconds beyond all limits of an attempt after which a forgotten container exits by itself
LEAST_MEMORY = 6 * MiB  # the daemon accepts no less
NO_RESOLVER = "127.0.0.1"  # the container's own address: no resolver listens there
OOM_SCORE = 1000  # when the machine is out of memory, the kernel kills these processes before any worker

# The capabilities that package managers and test suites need as root. Excluded: NET_RAW (can impersonate
# others on the network), MKNOD (devices), SETPCAP and SETFCAP (pass on capabilities), SYS_PTRACE.
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID", "KILL", "NET_BIND_SERVICE"),
    "SYS_CHROOT",  # for test suites of servers; it gives access to nothing beyond the container
    "AUDIT_WRITE",  # `su` fails without it in images with PAM
)

# The container's main command sleeps, and reaps orphans of other commands: a shell that waits for one child
# reaps all. It restarts a killed `sleep`. `READY` shows that an entrypoint has run the command.
READY = "holdwater: the command runs"
SLEEP = 'while sleep "$0" & wait $!; code=$?; [ $code -gt 128 ]; do :; done; exit $code'
IDLE_PROCESSES = 2  # processes in a container without a running command: the shell and `sleep`
KEEP_ALIVE = ["sh", "-c", f'echo "{READY}"; {SLEEP}']

# An entrypoint that is a bare interpreter without a script starts nothing and would take our command for a
# script.
INTERPRETERS = ("sh", "bash", "dash", "ash", "zsh", "node", "perl", "python", "python3", "ruby")


class HealthCheck(Record, frozen=True):
    """The health check that an image declares."""

    argv: tuple[str, ...]
    interval: float = 30.0  # seconds; defaults of docker
    timeout: float = 30.0
    start_period: float = 0.0
    retries: int = 3


class ContainerImage(Record, frozen=True):
    """The properties of an image that matter for a container."""

    id: str
    path: str = ""
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    health: HealthCheck | None = None

    @property
    def starts_services(self) -> bool:
        """Whether the entrypoint has to run: a bare interpreter starts nothing."""
        if not self.entrypoint:
            return False
        program, *words = self.entrypoint
        bare = posixpath.basename(program) in INTERPRETERS and all(word.startswith("-") for word in words)
        return not bare


def choose_workdir(start: SandboxSpec, image: ContainerImage) -> str:
    """Return the directory for commands: the spec's, else the image's unless it is the root, else `WORK`."""
    return start.workdir or image.workdir.rstrip("/") or WORK


class ContainerSpec(msgspec.Struct, frozen=True):
    """The request for one container."""

    start: SandboxSpec
    image: ContainerImage
    limits: Limits
    network: str
    labels: dict[str, str]
    mounts: tuple[tuple[str, str], ...] = ()
    search: tuple[str, ...] = ()  # directories put first on PATH
    read_only: bool = False
    cpus: int = 1  # of the daemon's machine
    quota: bool = False  # the daemon's storage driver limits the disk
    resolves: bool = False  # the daemon's resolver forwards names to the machine's on any network

    @property
    def user(self) -> str:
        return self.start.user or self.image.user

    @property
    def as_root(self) -> bool:
        return self.user.partition(":")[0] in ("", "root", "0")

    @property
    def workdir(self) -> str:
        return choose_workdir(self.start, self.image)

    @property
    def first_workdir(self) -> str:
        """The directory in which the first process starts; the daemon creates it, owned by root."""
        if self.image.starts_services:
            return self.image.workdir or "/"
        return self.workdir if self.as_root else "/"

    @property
    def writable(self) -> list[str]:
        """The writable paths of a container with a read-only root."""
        return sorted({"/tmp", PRIVATE, self.workdir, *self.start.directories} - {"/"})


def build_body(wanted: ContainerSpec) -> dict[str, Any]:
    """Return the body of `POST /containers/create`."""
    limits, start = wanted.limits, wanted.start
    seconds = str(int(limits.setup + limits.acting + limits.grading + SLACK))
    asked: dict[str, Any] = {
        "Image": start.image,
        "User": "0",  # for the first process only: each command has its own user
        "WorkingDir": wanted.first_workdir,
        "Labels": wanted.labels,
        "Healthcheck": {"Test": ["NONE"]},  # `container_lifecycle.py` runs it until it passes
        "StopSignal": "SIGKILL",
        "HostConfig": _build_host_config(wanted),
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


def _build_host_config(wanted: ContainerSpec) -> dict[str, Any]:
    limits = wanted.limits
    ulimits = [_ulimit("core", 0)]
    # `AutoRemove` is not set: a daemon that restarts after a crash removes such a container twice at once,
    # and may list it forever as dead and unknown.
    host: dict[str, Any] = {
        "NetworkMode": wanted.network,
        "PidsLimit": limits.pids,
        "OomScoreAdj": OOM_SCORE,
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": wanted.read_only,
        "LogConfig": {"Type": "none"},
        "Mounts": [_mount(here, there) for here, there in wanted.mounts],
        "Ulimits": ulimits,
    }
    if not wanted.resolves:
        host["Dns"] = [NO_RESOLVER]
    if limits.memory_limit:
        host["Memory"] = host["MemorySwap"] = max(LEAST_MEMORY, limits.memory_limit)
    if limits.cpus:
        host["NanoCpus"] = int(1e9 * max(0.01, min(limits.cpus, wanted.cpus)))
    if limits.disk:
        ulimits.append(_ulimit("fsize", limits.disk))  # no file may exceed the whole quota
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
