"""What a daemon and its images are like: asked once, and remembered as long as a worker lives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from ...core.errors import ImageFailed
from ...core.records import Record
from ...docker.client import DockerClient, DockerError
from .failures import reported
from .spec import HealthCheck, Image

T = TypeVar("T")

REMEMBERED = 256  # images
BASH = "/bin/bash"
HOLDS_QUOTAS = ("btrfs", "zfs")  # storage drivers


class Daemon(Record, frozen=True):
    root: str  # where it keeps containers; empty: it is not seen from here
    cpus: int


class Facts:
    """Answers of one daemon."""

    def __init__(self, client: DockerClient) -> None:
        self.quotas = True  # whether it may be able to limit a container's disk, until it refuses
        self._client = client
        self._daemon: Daemon | None = None
        self._images: dict[str, Image] = {}  # bound: REMEMBERED
        self._shells: dict[str, str] = {}  # bound: REMEMBERED

    async def daemon(self) -> Daemon:
        if self._daemon is None:
            with reported("cannot ask the daemon what it is like"):
                told = await self._client.get("/info")
            root = str(told.get("DockerRootDir") or "")
            seen = root if root and Path(root).is_dir() else ""
            self._daemon = Daemon(root=seen, cpus=int(told.get("NCPU") or 1))
            self.quotas = _may_limit(told)
        return self._daemon

    async def image(self, reference: str) -> Image:
        found = self._images.get(reference)
        if found is None:
            with reported("cannot ask for an image"):
                told = await self._client.found(f"/images/{reference}/json")
            if told is None:
                raise ImageFailed(f"the image is not there: `{reference}`", kind="missing")
            found = _keep(self._images, reference, _image(told))
        return found

    async def shell(self, image: Image, container: str) -> str:
        """What runs a shell line: as in a process sandbox, bash where there is one."""
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
            if not told["State"]["Running"]:  # it is gone, and says nothing of its image
                raise DockerError("the container is not running", status=409) from error
            return False
        return True


def _keep(cache: dict[str, T], key: str, value: T) -> T:
    if len(cache) >= REMEMBERED:
        del cache[next(iter(cache))]
    cache[key] = value
    return value


def _image(told: dict[str, Any]) -> Image:
    config = told.get("Config") or {}
    env = dict(row.partition("=")[::2] for row in config.get("Env") or ())
    return Image(
        id=told["Id"],
        path=env.get("PATH", ""),
        workdir=config.get("WorkingDir") or "",
        user=config.get("User") or "",
        entrypoint=tuple(config.get("Entrypoint") or ()),
        health=_health(config.get("Healthcheck") or {}, config.get("Shell") or ["/bin/sh", "-c"]),
    )


def _health(told: dict[str, Any], shell: list[str]) -> HealthCheck | None:
    kind, *words = told.get("Test") or ["NONE"]
    if kind not in ("CMD", "CMD-SHELL") or not words:
        return None
    names = {"interval": "Interval", "timeout": "Timeout", "start_period": "StartPeriod"}
    seconds = {ours: told[theirs] / 1e9 for ours, theirs in names.items() if told.get(theirs)}
    retries = {"retries": told["Retries"]} if told.get("Retries") else {}
    argv = words if kind == "CMD" else [*shell, *words]
    return HealthCheck(argv=tuple(argv), **seconds, **retries)


def _may_limit(told: dict[str, Any]) -> bool:
    """overlay2 on xfs can if that is mounted so, which only an attempt shows."""
    below = dict(row for row in told.get("DriverStatus") or () if len(row) == 2).get("Backing Filesystem", "")
    return told.get("Driver") in HOLDS_QUOTAS or (told.get("Driver") == "overlay2" and below == "xfs")
