"""Decides what process sandboxes show of this machine, and checks that it suffices for an agent's command.

`bubblewrap.py` creates the mounts; containers have mounts of their own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from msgspec import field

from ..core.config import SandboxRoot
from ..core.errors import BadInput
from ..core.records import Record
from .bubblewrap import REPLACED, is_ours
from .layout import SharedMounts
from .probe import MachineFeatures
from .root import copy_settings, is_below, make_root
from .scratch import claim_temporary, list_temporary_places

HOST_WARNING = (
    "`--sandbox-root host`: commands can read every file of this machine that this user can, "
    "but for the run's own and some secrets, and can connect to its unix sockets"
)
Mounts = Sequence[tuple[str, str]]  # (here, there), read-only


class VisibilitySpec(Record, frozen=True):
    """The paths shown besides a sandbox's own directories, all read-only."""

    root: SandboxRoot = SandboxRoot.SYSTEM
    mounts: tuple[tuple[str, str], ...] = ()  # (here, there)
    links: dict[str, str] = field(default_factory=dict)  # path inside -> target


class SharedView:
    """The view that all sandboxes of a process share; with the system's root it has a copy of `/etc`."""

    def __init__(self, visible: VisibilitySpec, prefix: str) -> None:
        self.root = visible.root
        self._visible = visible
        self._prefix = prefix  # name prefix of the copy's directory
        self._remove: weakref.finalize[..., SharedView] | None = None

    @cached_property
    def shown(self) -> SharedMounts:
        visible = self._visible
        mounts = {there: os.path.realpath(here) for here, there in visible.mounts}
        if visible.root is SandboxRoot.HOST:
            return SharedMounts(make_root(visible.root), mounts, visible.links)
        return SharedMounts(make_root(visible.root, self._copy_settings()), mounts, visible.links)

    def _copy_settings(self) -> str:
        """Copy `/etc`, into memory if there is room: its many small files are slow on a disk."""
        *others, last = list_temporary_places()
        for place in others:
            with suppress(OSError):
                return self._copy_settings_below(place)
        return self._copy_settings_below(last)

    def _copy_settings_below(self, place: Path) -> str:
        directory = tempfile.mkdtemp(prefix=self._prefix, dir=place)
        remove = weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        try:
            marker = claim_temporary(Path(directory))  # if this process is killed, a later run removes it
            weakref.finalize(self, os.close, marker)
            copy_settings(settings := Path(directory, "etc"))
        except OSError:
            remove()
            raise
        self._remove = remove
        return str(settings)

    def close(self) -> None:
        if self._remove is not None:
            self._remove()


def find_visible(
    root: SandboxRoot, mounts: Mounts, trees: Iterable[str] = (), links: Mapping[str, str] | None = None
) -> VisibilitySpec:
    """Return a run's mounts, and the paths of this machine that the agent's programs need.

    With the host's root the current directory is included: it may be in a directory that sandboxes replace.
    """
    here = [os.path.realpath(Path.cwd())] if root is SandboxRoot.HOST else []
    needed = tuple((path, path) for path in [*here, *sorted(trees)])
    asked = tuple(mounts)
    return VisibilitySpec(root, (*needed, *asked), dict(links or {}))


def build_search_path(mounts: Mounts) -> list[str]:
    """Return the directories to put first on PATH."""
    return [f"{there}/bin" for here, there in mounts if Path(here, "bin").is_dir()]


def check_mounts(mounts: Mounts, machine: MachineFeatures) -> None:
    """Refuse mounts that no process sandbox of this machine can have."""
    for here, there in mounts:
        if here == there:
            continue
        if not machine.bwrap:
            why = machine.why_not or "not available"
            raise BadInput(f"`--mount` needs bubblewrap or containers: {why}", "add `--sandbox docker`")
        if is_ours(there):
            raise BadInput(f"invalid target for `--mount`, reserved in a process sandbox: `{there}`")


def check_directories(
    paths: Iterable[str], root: SandboxRoot, mounts: Mounts, machine: MachineFeatures
) -> None:
    """Refuse a command that names a directory that no sandbox shows; files that it names are shown anyway."""
    if not machine.bwrap:
        return
    system = make_root(root)
    own = {"/", *REPLACED, *(f"/{path.split('/')[1]}" for path in system.binds)}
    shown = [there for _, there in find_visible(root, mounts).mounts]
    for path in paths:
        real = os.path.realpath(path)
        hidden = not is_below(real, system.binds) or is_below(real, REPLACED)
        if (
            not Path(path).is_dir()
            or path in own
            or not hidden
            or is_below(path, shown)
            or is_below(real, shown)
        ):
            continue
        raise BadInput(
            f"sandboxes do not see a directory that the agent's command names: `{path}`",
            hint=f"add `--mount {real}:{path}`",
        )
