"""The networks of a run's containers: one that leads only to the gateway, and an open one where requested.

Sandboxes share networks: a daemon can create only about thirty. `firewall.py` keeps containers from other
services of this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.containers import Containers
from ...core.errors import RunFailed
from ...core.records import Network
from ...docker.client import DockerClient, DockerError

BRIDGE = "com.docker.network.bridge."
RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))  # 2nd: if 1st is a stub


class BridgeNetwork:
    """A network of this run: its interface on this machine, and this machine's address in it."""

    def __init__(self, found: dict[str, Any]) -> None:
        options = found.get("Options") or {}
        self.interface = str(options.get(f"{BRIDGE}name") or f"br-{found['Id'][:12]}")
        ranges = (found.get("IPAM") or {}).get("Config") or []
        self.address = next(
            (str(one["Gateway"]).partition("/")[0] for one in ranges if one.get("Gateway")), ""
        )


async def make_network(client: DockerClient, containers: Containers, kind: Network) -> BridgeNetwork:
    """Return the run's network of this kind; create it if missing."""
    name = containers.network(kind)
    found = await client.get_or_none(f"/networks/{name}")
    if found is None:
        try:
            await client.post("/networks/create", body=_build_body(name, containers, kind))
        except DockerError as error:
            if error.status != 409:  # 409: another process of this run was first
                raise _make_refusal(error) from error
        found = await client.get(f"/networks/{name}")
    return BridgeNetwork(found)


def read_nameservers() -> list[str]:
    """Return this machine's resolvers that a container on an open network can reach."""
    for place in RESOLVERS:
        try:
            rows = [line.split() for line in place.read_text().splitlines()]
        except OSError:
            continue
        found = [row[1] for row in rows if len(row) > 1 and row[0] == "nameserver"]
        if reached := [address for address in found if not address.startswith(("127.", "::1"))]:
            return reached
    return []


def _build_body(name: str, containers: Containers, kind: Network) -> dict[str, Any]:
    return {
        "Name": name,
        "CheckDuplicate": True,
        "Driver": "bridge",
        "Internal": kind is not Network.OPEN,
        "Options": {f"{BRIDGE}enable_icc": "false"},
        "Labels": containers.labels(),
    }


def _make_refusal(error: DockerError) -> RunFailed:
    hint = error.hint
    if "address pool" in error.message:
        hint = "the daemon has no address range left: `docker network ls` lists the networks that use them"
    return RunFailed(f"cannot create a network for the sandboxes: {error.message}", hint, kind="network")
