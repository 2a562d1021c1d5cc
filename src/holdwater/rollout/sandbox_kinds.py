"""Finds a kind of sandbox by its name: process tree, container, remote, or a kind of another package.

Conductor and workers look the kind up, each in its own process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

from ..agent.command import find_program_files
from ..core.authoring import Agent
from ..core.config import RunConfig, SandboxRoot
from ..core.errors import BadInput
from ..core.sandbox_kind import OpenedSandboxes, SandboxKind, SandboxSite
from ..plugin import list_entries, load_entry
from ..sandbox.isolation import describe_missing_isolation
from ..sandbox.probe import probe
from ..sandbox.process_sandboxes import (
    HOST_WARNING,
    ProcessSandboxes,
    build_search_path,
    check_directories,
    check_mounts,
    find_visible,
)

ENTRY_GROUP = "holdwater.sandboxes"
# Our own kinds, by module. The modules of `docker` and `remote` are above this room, since they provide for
# sandboxes in the conductor: they are loaded by name, like a kind of another package.
OWN_KINDS = {
    "process": __name__,
    "docker": "holdwater.run.builds.container_kind",
    "remote": "holdwater.run.remote.remote_kind",
}
UNISOLATED = "sandbox.open"  # the event of a run whose sandboxes are not isolated


@cache
def find_kind(name: str) -> SandboxKind:
    """Return the kind; raise BadInput with all known names if there is none."""
    if name in OWN_KINDS:
        kind: object = import_module(OWN_KINDS[name]).KIND
    else:
        kind = load_entry(ENTRY_GROUP, name)
    if kind is None:
        known = ", ".join(f"`{known}`" for known in list_kinds())
        raise BadInput(f"`--sandbox` must be one of {known}: `{name}`")
    if not isinstance(kind, SandboxKind):
        raise BadInput(f"the entry point `{name}` of `{ENTRY_GROUP}` is no `SandboxKind`")
    return kind


def list_kinds() -> list[str]:
    return [*OWN_KINDS, *(entry.name for entry in list_entries(ENTRY_GROUP))]


@asynccontextmanager
async def _open_processes(site: SandboxSite) -> AsyncIterator[OpenedSandboxes]:
    config = site.config
    needed = find_program_files((sys.executable, *site.programs), site.path)
    sandboxes = ProcessSandboxes(
        scratch=site.scratch,
        run=config.id,
        network=config.network,
        hide=(site.directory, site.scratch.parent, *map(Path, site.hidden)),
        path=os.pathsep.join([*build_search_path(config.mounts), site.path]),
        visible=find_visible(config.sandbox_root, config.mounts, needed.trees, needed.links),
    )
    try:
        yield OpenedSandboxes(sandboxes, use_service=sandboxes.use_service)
    finally:
        sandboxes.close()


def _check_processes(config: RunConfig, agent: Agent) -> None:
    check_mounts(config.mounts, probe())
    check_directories(agent.paths, config.sandbox_root, config.mounts, probe())


def _warn_of_processes(config: RunConfig) -> tuple[str, str] | None:
    if missing := describe_missing_isolation(probe()):
        return UNISOLATED, missing
    return ("sandbox.root", HOST_WARNING) if config.sandbox_root is SandboxRoot.HOST else None


KIND = SandboxKind(open=_open_processes, check=_check_processes, warn=_warn_of_processes, shows_machine=True)
