"""Firewall rules that let containers reach the gateway's ports on this machine and no other service of it.

A daemon lets an internal network reach every address of its own machine. Rules of the kernel's packet filter
close that for IPv4 and IPv6. They need root, `iptables` and, on a machine with IPv6, `ip6tables`. If they are
missing, `add_rules` returns the reason.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ...core.containers import CONTAINER_PORTS
from ...core.environment import SYSTEM_PATH, build_environment
from .network import BridgeNetwork

IPV4, IPV6 = "iptables", "ip6tables"
SECONDS = 10.0
PORTS = f"{CONTAINER_PORTS.start}:{CONTAINER_PORTS.stop - 1}"


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


LONGEST = 256 * 1024  # characters of output
