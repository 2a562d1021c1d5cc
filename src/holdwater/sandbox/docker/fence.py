"""Keeps containers from what else this machine serves: on their network they reach the gateway's ports alone.

A daemon lets an internal network reach every address of its own machine. Rules of the kernel's packet filter
close that; they need root and `iptables`. Without them, `up` says what is open.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Sequence

from ...core.containers import CONTAINER_PORTS
from ..probe import SYSTEM_PATH
from .network import Bridge

SECONDS = 10.0
PORTS = f"{CONTAINER_PORTS.start}:{CONTAINER_PORTS.stop - 1}"


def why_not() -> str:
    """Why there can be none here; empty: there can."""
    if os.geteuid() != 0:
        return "not root"
    return "" if _program() else "`iptables` is not installed"


async def up(bridge: Bridge, name: str) -> str:
    """Put the rules in force; what went wrong, in a sentence, or nothing. `name` marks them as ours."""
    if reason := why_not():
        return reason
    known = await _listed()
    for rule in reversed(_rules(bridge, name)):  # each is put first, so that the last one stands on top
        if not any(name in line and bridge.interface in line and rule[-1] in line for line in known):
            status, said = await _call("-I", "INPUT", *rule)
            if status:
                return said
    return ""


async def down(name: str) -> None:
    """Remove all rules with this mark; a rule for a network that is gone harms nobody."""
    if why_not():
        return
    for line in await _listed():
        words = line.split()
        if name in words and words[:1] == ["-A"]:
            await _call("-D", *words[1:])


async def names() -> set[str]:
    """The marks that start like ours, of all rules there are."""
    if why_not():
        return set()
    return {word for line in await _listed() for word in line.split() if word.startswith("holdwater-")}


def _rules(bridge: Bridge, name: str) -> list[list[str]]:
    ours = ["-i", bridge.interface, "-m", "comment", "--comment", name]
    return [
        [*ours, "-d", bridge.address, "-p", "tcp", "--dport", PORTS, "-j", "ACCEPT"],
        [*ours, "-j", "DROP"],
    ]


async def _listed() -> list[str]:
    status, said = await _call("-S", "INPUT")
    return said.splitlines() if not status else []


async def _call(*words: str) -> tuple[int, str]:
    program = _program()
    assert program is not None, "asked before `why_not`"
    return await _run([program, "-w", "5", *words])


async def _run(argv: Sequence[str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PATH": SYSTEM_PATH},
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


def _program() -> str | None:
    return shutil.which("iptables", path=SYSTEM_PATH)


LONGEST = 256 * 1024  # characters of what is listed
