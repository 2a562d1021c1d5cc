"""The networks of a run's containers: one that leads only to the gateway, and an open one where requested.

Sandboxes share networks: a daemon can create only about thirty. A daemon lets an internal network reach every
address of its own machine. Rules of the kernel's packet filter close that for IPv4 and IPv6. They need root,
`iptables` and, on a machine with IPv6, `ip6tables`. If they are missing, `add_rules` returns the reason.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.environment import SYSTEM_PATH, build_environment
from ...core.errors import RunFailed
from ...core.records import Network
from ...core.sandbox_kind import CONTAINER_PORTS, Containers
from ...docker.client import DockerClient, DockerError

BRIDGE = "com.docker.network.bridge."
RESOLVERS = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))  # 2nd: if 1st is a stub

IPV4, IPV6 = "iptables", "ip6tables"
SECONDS = 10.0  # for one call of a program
LONGEST = 256 * 1024  # characters of its output
PORTS = f"{CONTAINER_PORTS.start}:{CONTAINER_PORTS.stop - 1}"


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


def why_unavailable() -> str:
    """Return why no rules can be set here; empty if they can."""
    if os.geteuid() != 0:
        return "not root"
    missing = next((program for program in _list_programs() if not _find(program)), "")
    return f"`{missing}` is not installed" if missing else ""


async def add_rules(bridge: BridgeNetwork, name: str) -> str:
    """Set the rules; return an error sentence, or an empty string. `name` marks the rules as ours."""
    if reason := why_unavailable():
        return reason
    for program in _list_programs():
        _, known = await _call(program, "-S", "INPUT")
        rules = _build_rules(program, bridge, name)
        for rule in reversed(rules):  # each rule is inserted at the top, so the last one comes first
            lines = (line for line in known.splitlines() if name in line and bridge.interface in line)
            if not any(rule[-1] in line for line in lines):
                status, said = await _call(program, "-I", "INPUT", *rule)
                if status:
                    return said
    return ""


async def remove_rules(name: str) -> list[str]:
    """Remove all rules with this mark; return why rules could not be removed."""
    problems = []
    for program in () if why_unavailable() else _list_programs():
        status, listed = await _call(program, "-S", "INPUT")
        if status:
            problems.append(f"rules of `{program}`: {listed}")
            continue
        for words in (line.split() for line in listed.splitlines()):
            if name in words and words[:1] == ["-A"]:
                status, said = await _call(program, "-D", *words[1:])
                if status:
                    problems.append(f"a rule of `{program}`: {said}")
    return problems


async def list_marks() -> set[str]:
    """Return the marks with our prefix among all rules."""
    found: set[str] = set()  # bound: the existing rules
    for program in () if why_unavailable() else _list_programs():
        status, listed = await _call(program, "-S", "INPUT")
        found |= {word for word in listed.split() if not status and word.startswith("holdwater-")}
    return found


def _build_rules(program: str, bridge: BridgeNetwork, name: str) -> list[list[str]]:
    ours = ["-i", bridge.interface, "-m", "comment", "--comment", name]
    if program == IPV6:
        return [[*ours, "-j", "DROP"]]  # the gateway has an IPv4 address only
    return [
        [*ours, "-d", bridge.address, "-p", "tcp", "--dport", PORTS, "-j", "ACCEPT"],
        [*ours, "-j", "DROP"],
    ]


def _list_programs() -> tuple[str, ...]:
    """Return the programs that set rules: one for each IP version of this machine."""
    return (IPV4, IPV6) if Path("/proc/net/if_inet6").exists() else (IPV4,)


async def _call(program: str, *words: str) -> tuple[int, str]:
    found = _find(program)
    assert found is not None, "call `why_unavailable` first"
    return await _run([found, "-w", "5", *words])


async def _run(argv: Sequence[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=build_environment(),
        start_new_session=True,  # the conductor handles a Ctrl-C at the terminal
    )
    try:
        async with asyncio.timeout(SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, f"`{argv[0]}` did not end within {SECONDS:g} s"
    return process.returncode or 0, said.decode(errors="replace").strip()[:LONGEST]


def _find(program: str) -> str | None:
    return shutil.which(program, path=SYSTEM_PATH)
