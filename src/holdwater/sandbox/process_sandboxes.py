"""The process sandboxes of one run, and the state that they share: what they show of this machine.

It also checks that they show enough for an agent's command. `process.py` has the sandbox itself,
`bubblewrap.py` creates the mounts; containers have mounts of their own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from msgspec import field

from ..core.config import SandboxRoot
from ..core.environment import SYSTEM_PATH
from ..core.errors import BadInput
from ..core.records import Limits, Network, Record, SandboxSpec
from ..core.sandbox_kind import ListenerService
from . import bubblewrap, process_marks
from .bubblewrap import REPLACED, copy_settings, find_secrets, is_below, is_ours, make_root
from .command import adopt_orphans
from .gateway_listeners import GatewayListeners
from .layout import SharedMounts
from .probe import MachineFeatures, probe
from .process import ProcessSandbox
from .scratch import claim_temporary, list_temporary_places, temporary_prefix

THREADS = 4

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


class ProcessSandboxes:
    """Opens sandboxes below `scratch`, which belongs to this run alone."""

    def __init__(
        self,
        scratch: Path,
        run: str,
        network: Network,
        hide: tuple[Path, ...] = (),
        machine: MachineFeatures | None = None,
        path: str = SYSTEM_PATH,
        visible: VisibilitySpec = VisibilitySpec(),  # noqa: B008 - frozen
    ) -> None:
        self.machine = machine or probe()
        if network is Network.NONE and not self.machine.bwrap:
            raise BadInput(
                f"network `none` needs bubblewrap: {self.machine.why_not or 'not available'}",
                hint="install the package `bubblewrap`, or use `--network open`",
            )
        self.scratch = Path(os.path.realpath(scratch))
        self.run = run
        self.network = network
        check_mounts(visible.mounts, self.machine)
        self.view = SharedView(visible, temporary_prefix(run))
        self.path = path
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdwater-sandbox")
        if self.machine.bwrap:
            adopt_orphans()
        self.listeners = GatewayListeners()
        self.process_index = process_marks.ProcessIndex(run)
        self._hide = hide
        self.programs: set[str] = set()  # found in the system; bound: the system's programs

    def open(
        self,
        attempt: int,
        limits: Limits,
        gateway: Path | None,
        start: SandboxSpec = SandboxSpec(),  # noqa: B008 - frozen
    ) -> ProcessSandbox:
        """Return a sandbox for this attempt; nothing is created before its first use."""
        return ProcessSandbox(self, attempt, limits, gateway if self.machine.bwrap else None, start)

    def make_tree_finder(self, attempt: int) -> Callable[[list[int]], list[int]]:
        """Return a function that finds an attempt's processes, given its commands. It references no sandbox.

        The function blocks.
        """

        def find_tree(commands: list[int]) -> list[int]:
            if self.machine.bwrap:
                return [pid for command in commands for pid in process_marks.list_descendants(command)]
            return self.process_index.find_processes(str(attempt))

        return find_tree

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """Return the gateway's base URL for code in a sandbox with this network, or with the run's."""
        if self.machine.bwrap and (network or self.network) is Network.GATEWAY:
            return f"http://127.0.0.1:{bubblewrap.PORT}/v1"
        return host_url

    def use_service(self, service: ListenerService) -> None:
        """Let this gateway serve the commands from now on."""
        self.listeners.service = service

    def close(self) -> None:
        """Remove the files that the sandboxes share, and end their helper. All sandboxes must be closed."""
        self.listeners.close()
        self.view.close()

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """Paths hidden from commands: the other sandboxes, the caller's `hide`, secrets of the machine."""
        return bubblewrap.find_outermost([self.scratch, *self._hide, *find_secrets(self.view.root)])

    @cached_property
    def shell(self) -> str:
        return shutil.which("bash", path=SYSTEM_PATH) or "/bin/sh"
