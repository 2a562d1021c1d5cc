"""Removes containers and networks of dead runs, and containers of attempts that are over.

The sweep touches only objects with our labels. The conductor calls it; a sandbox removes its own container
(`container_lifecycle.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from ...core.records import Record
from ...core.sandbox_kind import ATTEMPT_LABEL, HOME_LABEL, RUN_LABEL, Containers
from ...docker.client import DockerClient, DockerError
from .container import remove_container

SECONDS = 60.0  # seconds for one sweep
EACH = 30.0  # seconds for one container or network
MISCOUNTED = (
    "if no container is in it, it can be removed after a restart of the daemon"  # docker 20.10, under load
)
AT_ONCE = 8  # removals: a daemon serializes them anyway


class DockerSweepReport(Record, frozen=True):
    """Numbers of removed objects, and the objects that could not be removed."""

    containers: int = 0
    networks: int = 0
    left: tuple[str, ...] = ()  # objects that could not be removed, and why


async def sweep(client: DockerClient, home: str, living: Callable[[str], bool]) -> DockerSweepReport:
    """Remove the containers, their volumes, and then the networks of dead runs of `home`.

    `living` returns whether the run with this id is alive. Networks come last: one in use cannot be removed.
    """
    told: list[str] = []
    containers = networks = 0
    try:
        async with asyncio.timeout(SECONDS):
            found = await _list_labelled(client, "/containers/json", {HOME_LABEL: home})
            dead = [one["Id"] for one in found if not living(_read_label(one, RUN_LABEL))]
            containers = await _remove_each(dead, lambda one: remove_container(client, one, EACH), told)
            found = await _list_labelled(client, "/networks", {HOME_LABEL: home})
            gone = [one["Id"] for one in found if not living(_read_label(one, RUN_LABEL))]
            networks = await _remove_each(gone, lambda one: remove_network(client, one), told)
    except TimeoutError:
        told.append(f"not all within {SECONDS:g} s")
    return DockerSweepReport(containers=containers, networks=networks, left=tuple(told))


async def reap(client: DockerClient, containers: Containers, living: Collection[int]) -> DockerSweepReport:
    """Remove the containers of this run whose attempt is not among `living`."""
    told: list[str] = []
    count = 0
    try:
        async with asyncio.timeout(SECONDS):
            found = await _list_labelled(client, "/containers/json", containers.labels())
            names = {str(attempt) for attempt in living}
            over = [one["Id"] for one in found if _read_label(one, ATTEMPT_LABEL) not in names]
            count = await _remove_each(over, lambda one: remove_container(client, one, EACH), told)
    except TimeoutError:
        told.append(f"not all within {SECONDS:g} s")
    return DockerSweepReport(containers=count, left=tuple(told))


async def remove_network(client: DockerClient, network: str) -> None:
    """Remove a network; first disconnect everything that is still in it."""
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
    """Disconnect a container; an endpoint whose container is gone is addressed by its own name."""
    for name in (container, endpoint):
        try:
            body = {"Container": name, "Force": True}
            await client.post(f"/networks/{network}/disconnect", body=body, seconds=EACH)
            return
        except DockerError as error:
            if error.status not in (403, 404):
                raise


async def _list_labelled(client: DockerClient, path: str, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    wanted = {"label": [f"{name}={value}" for name, value in labels.items()]}
    query = {"filters": msgspec.json.encode(wanted).decode()}
    found: list[dict[str, Any]] = await client.get(path, {**query, "all": "true"}, seconds=EACH)
    return found


def _read_label(one: Mapping[str, Any], name: str) -> str:
    return str((one.get("Labels") or {}).get(name, ""))


async def _remove_each(
    ids: Iterable[str], act: Callable[[str], Coroutine[Any, Any, None]], told: list[str]
) -> int:
    """Remove each; return how many are gone, and append the errors of the others to the list."""
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
