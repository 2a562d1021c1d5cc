"""The containers of one run, and the state that they share: facts about the daemon and its images.

Each fact costs one query and is kept for the life of a worker. `sandbox.py` has the sandbox itself.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import ImageFailed
from ...core.records import Limits, Network, Record, SandboxSpec
from ...core.sandbox_kind import Containers
from ...docker.client import DockerClient, DockerError
from .container import translate_errors
from .sandbox import DockerSandbox
from .spec import ContainerImage, HealthCheck

THREADS = 4

T = TypeVar("T")

REMEMBERED = 256  # images
BASH = "/bin/bash"
HOLDS_QUOTAS = ("btrfs", "zfs")  # storage drivers


class DockerSandboxes:
    """Opens containers of a run; `client` must stay open as long as they are."""

    def __init__(
        self,
        client: DockerClient,
        containers: Containers,
        network: Network,
        threads: Executor | None = None,
    ) -> None:
        self.client = client
        self.containers = containers
        self.network = network
        self.threads = threads or ThreadPoolExecutor(THREADS, thread_name_prefix="holdwater-container")
        self.facts = FactCache(client)
        self.networks = {one: containers.network(one) for one in Network} | {Network.NONE: "none"}
        self.search = tuple(f"{there}/bin" for here, there in containers.mounts if Path(here, "bin").is_dir())

    def open(self, attempt: int, limits: Limits, gateway: Path | None, start: SandboxSpec) -> DockerSandbox:
        """Return a sandbox for this attempt; nothing is created before its first use."""
        return DockerSandbox(self, attempt, limits, start)

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """Return the gateway's base URL for code in a sandbox: the host's URL, which containers can reach."""
        return host_url


class DaemonFacts(Record, frozen=True):
    root: str  # data directory of the daemon; empty if not visible from here
    cpus: int


class FactCache:
    """Cached replies of one daemon."""

    def __init__(self, client: DockerClient) -> None:
        self.quotas = True  # whether it may be able to limit a container's disk; False after a refusal
        self._client = client
        self._daemon: DaemonFacts | None = None
        self._images: dict[str, ContainerImage] = {}  # bound: REMEMBERED
        self._shells: dict[str, str] = {}  # bound: REMEMBERED

    async def daemon(self) -> DaemonFacts:
        if self._daemon is None:
            with translate_errors("cannot query the daemon"):
                told = await self._client.get("/info")
            root = str(told.get("DockerRootDir") or "")
            seen = root if root and Path(root).is_dir() else ""
            self._daemon = DaemonFacts(root=seen, cpus=int(told.get("NCPU") or 1))
            self.quotas = _may_limit(told)
        return self._daemon

    async def image(self, reference: str) -> ContainerImage:
        found = self._images.get(reference)
        if found is None:
            with translate_errors("cannot inspect an image"):
                told = await self._client.get_or_none(f"/images/{reference}/json")
            if told is None:
                raise ImageFailed(f"image not found: `{reference}`", kind="missing")
            found = _keep(self._images, reference, _parse_image(told))
        return found

    async def shell(self, image: ContainerImage, container: str) -> str:
        """Return the shell for command lines: bash if the image has it, as in a process sandbox."""
        found = self._shells.get(image.id)
        if found is None:
            found = _keep(self._shells, image.id, BASH if await self._has(container, BASH) else "sh")
        return found

    async def _has(self, container: str, path: str) -> bool:
        try:
            await self._client.head(f"{container}/archive", {"path": path})
        except DockerError as error:
            if error.status != 404:
                raise
            told = await self._client.get(f"{container}/json")
            if not told["State"]["Running"]:  # a stopped container says nothing about its image
                raise DockerError("the container is not running", status=409) from error
            return False
        return True


def _keep(cache: dict[str, T], key: str, value: T) -> T:
    if len(cache) >= REMEMBERED:
        del cache[next(iter(cache))]
    cache[key] = value
    return value


def _parse_image(told: dict[str, Any]) -> ContainerImage:
    config = told.get("Config") or {}
    env = dict(row.partition("=")[::2] for row in config.get("Env") or ())
    return ContainerImage(
        id=told["Id"],
        path=env.get("PATH", ""),
        workdir=config.get("WorkingDir") or "",
        user=config.get("User") or "",
        entrypoint=tuple(config.get("Entrypoint") or ()),
        health=_parse_health(config.get("Healthcheck") or {}, config.get("Shell") or ["/bin/sh", "-c"]),
    )


def _parse_health(told: dict[str, Any], shell: list[str]) -> HealthCheck | None:
    kind, *words = told.get("Test") or ["NONE"]
    if kind not in ("CMD", "CMD-SHELL") or not words:
        return None
    names = {"interval": "Interval", "timeout": "Timeout", "start_period": "StartPeriod"}
    seconds = {ours: told[theirs] / 1e9 for ours, theirs in names.items() if told.get(theirs)}
    retries = {"retries": told["Retries"]} if told.get("Retries") else {}
    argv = words if kind == "CMD" else [*shell, *words]
    return HealthCheck(argv=tuple(argv), **seconds, **retries)


def _may_limit(told: dict[str, Any]) -> bool:
    """Whether quotas may work; on xfs, overlay2 needs a mount option, which only a try reveals."""
    below = dict(row for row in told.get("DriverStatus") or () if len(row) == 2).get("Backing Filesystem", "")
    return told.get("Driver") in HOLDS_QUOTAS or (told.get("Driver") == "overlay2" and below == "xfs")
