"""Containers as a kind of sandbox. The networks and images of a run are in `container_provision.py`.

A worker imports this module too, so it loads the conductor's part only in the conductor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from ...core.config import RunConfig
from ...core.failures import make_daemon_failure
from ...core.records import AttemptFailure
from ...core.sandbox_kind import (
    Containers,
    OpenedSandboxes,
    ProvisionSite,
    SandboxKind,
    SandboxProvision,
    SandboxSite,
)
from ...docker.client import DaemonWatch, DockerClient
from ...sandbox.docker.sandboxes import DockerSandboxes


@asynccontextmanager
async def _open_containers(site: SandboxSite) -> AsyncIterator[OpenedSandboxes]:
    containers = msgspec.convert(site.provided, Containers)
    async with DockerClient(containers.host) as client, DaemonWatch(client) as watch:

        def watch_loss(attempt: int) -> Callable[[], AttemptFailure | None]:
            died = watch.make_death_check()
            return lambda: make_daemon_failure() if died() else None

        sandboxes = DockerSandboxes(client, containers, site.config.network)
        yield OpenedSandboxes(sandboxes, containers.gateway, watch_loss)


async def _check_daemon(config: RunConfig) -> None:
    from ..setup.config import read_environment
    from .sandbox_daemon import check_daemon

    await check_daemon(read_environment())


def _provide(site: ProvisionSite) -> AbstractAsyncContextManager[SandboxProvision]:
    from .container_provision import ContainerProvision

    return ContainerProvision(site)


KIND = SandboxKind(open=_open_containers, check_start=_check_daemon, provision=_provide, takes_images=True)
