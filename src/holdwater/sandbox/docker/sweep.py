"""Removes what containers and networks dead runs left, and containers of attempts that are over.

Only what carries our labels is ever touched. Called by the conductor; a sandbox removes its own (`life.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from ...core.containers import ATTEMPT_LABEL, HOME_LABEL, RUN_LABEL, Containers
from ...core.records import Record
from ...docker.client import DockerClient, DockerError
from .container import remove

SECONDS = 60.0  # for one sweep
EACH = 30.0  # seconds for one container or network
MISCOUNTED = "if no container is in it, it goes once the daemon was started again"  # docker 20.10, under load
AT_ONCE = 8  # removals: a daemon does them one after the other anyway


class Swept(Record, frozen=True):
    """How much was left."""

    containers: int = 0
    networks: int = 0
    left: tuple[str, ...] = ()  # what could not be removed, and why


async def sweep(client: DockerClient, home: str, living: Callable[[str], bool]) -> Swept:
    """Remove the containers, with their volumes, and then the networks of runs of `home` that are dead.

    `living` says of a run's id whether it goes on. A network goes last: it cannot while something is in it.
    """
    told: list[str] = []
    containers = networks = 0
    try:
        async with asyncio.timeout(SECONDS):
            found = await _listed(client, "/containers/json", {HOME_LABEL: home})
            dead = [one["Id"] for one in found if not living(_label(one, RUN_LABEL))]
            containers = await _each(dead, lambda one: remove(client, one, EACH), told)
            found = await _listed(client, "/networks", {HOME_LABEL: home})
            gone = [one["Id"] for one in found if not living(_label(one, RUN_LABEL))]
            networks = await _each(gone, lambda one: remove_network(client, one), told)
    except TimeoutError:
        told.append(f"not all within {SECONDS:g} s")
    return Swept(containers=containers, networks=networks, left=tuple(told))


async def reap(client: DockerClient, containers: Containers, living: Collection[int]) -> Swept:
    """Remove the containers of this run whose attempt is not among `living`."""
    told: list[str] = []
    count = 0
    try:
        async with asyncio.timeout(SECONDS):
            found = await _listed(client, "/containers/json", containers.labels())
            names = {str(attempt) for attempt in living}
            over = [one["Id"] for one in found if _label(one, ATTEMPT_LABEL) not in names]
            count = await _each(over, lambda one: remove(client, one, EACH), told)
    except TimeoutError:
        told.append(f"not all within {SECONDS:g} s")
    return Swept(containers=count, left=tuple(told))


async def remove_network(client: DockerClient, network: str) -> None:
    """Remove a network; whatever still is in it is put out of it first."""
    try:
        told = await client.get(f"/networks/{network}", seconds=EACH)
        for container, endpoint in (told.get("Containers") or {}).items():
            await _disconnect(client, network, container, str(endpoint.get("Name") or ""))
        await client.delete(f"/networks/{network}", seconds=EACH)
    except DockerError as error:
        if error.status == 404:
            return
        if "has active endpoints" in error.message:
            raise DockerError(f"{error.message}: {MISCOUNTED}", status=error.status) from error
        raise


async def _disconnect(client: DockerClient, network: str, container: str, endpoint: str) -> None:
    """Put a container out of a network; an endpoint whose container is gone goes by its own name."""
    for name in (container, endpoint):
        try:
            body = {"Container": name, "Force": True}
            await client.post(f"/networks/{network}/disconnect", body=body, seconds=EACH)
            return
        except DockerError as error:
            if error.status not in (403, 404):
                raise


async def _listed(client: DockerClient, path: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    wanted = {"label": [f"{name}={value}" for name, value in labels.items()]}
    query = {"filters": msgspec.json.encode(wanted).decode()}
    found: list[dict[str, Any]] = await client.get(path, {**query, "all": "true"}, seconds=EACH)
    return found


def _label(one: Mapping[str, Any], name: str) -> str:
    return str((one.get("Labels") or {}).get(name, ""))


async def _each(ids: Iterable[str], act: Callable[[str], Coroutine[Any, Any, None]], told: list[str]) -> int:
    """How many of them are gone; of the others it is told why."""
    slots, gone = asyncio.Semaphore(AT_ONCE), 0

    async def one(name: str) -> None:
        nonlocal gone
        async with slots:
            try:
                await act(name)
                gone += 1
            except DockerError as error:
                told.append(f"{name[:12]}: {error}")

    async with asyncio.TaskGroup() as tasks:
        for name in ids:
            tasks.create_task(one(name))
    return gone
