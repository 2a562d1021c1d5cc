"""Keeps containers from what else this machine serves: on their network they reach the gateway's ports alone.

A daemon lets an internal network reach every address of its own machine. Rules of the kernel's packet filter
close that, for IPv4 and IPv6. They need root, `iptables` and, where there is IPv6, `ip6tables`. Without them,
`up` says what is open.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from ...core.containers import CONTAINER_PORTS
from ...core.helper_environment import SYSTEM_PATH, build_environment
from .network import Bridge

IPV4, IPV6 = "iptables", "ip6tables"
SECONDS = 10.0
PORTS = f"{CONTAINER_PORTS.start}:{CONTAINER_PORTS.stop - 1}"


def why_not() -> str:
    """Why there can be none here; empty: there can."""
    if os.geteuid() != 0:
        return "not root"
    missing = next((program for program in _programs() if not _find(program)), "")
    return f"`{missing}` is not installed" if missing else ""


async def up(bridge: Bridge, name: str) -> str:
    """Put the rules in force; what went wrong, in a sentence, or nothing. `name` marks them as ours."""
    if reason := why_not():
        return reason
    for program in _programs():
        _, known = await _call(program, "-S", "INPUT")
        rules = _rules(program, bridge, name)
        for rule in reversed(rules):  # each is put first, so that the last one stands on top
            lines = (line for line in known.splitlines() if name in line and bridge.interface in line)
            if not any(rule[-1] in line for line in lines):
                status, said = await _call(program, "-I", "INPUT", *rule)
                if status:
                    return said
    return ""


async def down(name: str) -> list[str]:
    """Remove all rules with this mark; why those that stay could not be removed."""
    problems = []
    for program in () if why_not() else _programs():
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


async def names() -> set[str]:
    """The marks that start like ours, of all rules there are."""
    found: set[str] = set()  # bound: the rules there are
    for program in () if why_not() else _programs():
        status, listed = await _call(program, "-S", "INPUT")
        found |= {word for word in listed.split() if not status and word.startswith("holdwater-")}
    return found


def _rules(program: str, bridge: Bridge, name: str) -> list[list[str]]:
    ours = ["-i", bridge.interface, "-m", "comment", "--comment", name]
    if program == IPV6:
        return [[*ours, "-j", "DROP"]]  # the gateway has an IPv4 address alone
    return [
        [*ours, "-d", bridge.address, "-p", "tcp", "--dport", PORTS, "-j", "ACCEPT"],
        [*ours, "-j", "DROP"],
    ]


def _programs() -> tuple[str, ...]:
    """What the rules are made with: one program for each protocol that this machine speaks."""
    return (IPV4, IPV6) if Path("/proc/net/if_inet6").exists() else (IPV4,)


async def _call(program: str, *words: str) -> tuple[int, str]:
    found = _find(program)
    assert found is not None, "asked before `why_not`"
    return await _run([found, "-w", "5", *words])


async def _run(argv: Sequence[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=build_environment(),
        start_new_session=True,  # a Ctrl-C at the terminal is the conductor's to answer
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


LONGEST = 256 * 1024  # characters of what is listed
