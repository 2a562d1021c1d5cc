"""The process sandboxes of one run, and the state that they share. `process.py` has the sandbox itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from ..core.environment import SYSTEM_PATH
from ..core.errors import BadInput
from ..core.records import Limits, Network, SandboxSpec
from . import bubblewrap, process_marks
from .command import adopt_orphans
from .probe import MachineFeatures, probe
from .process import ProcessSandbox
from .root import find_secrets
from .scratch import temporary_prefix
from .visibility import SharedView, VisibilitySpec, check_mounts

THREADS = 4


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

    def close(self) -> None:
        """Remove the files that the sandboxes share. All sandboxes must be closed."""
        self.view.close()

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """Paths hidden from commands: the other sandboxes, the caller's `hide`, secrets of the machine."""
        return bubblewrap.find_outermost([self.scratch, *self._hide, *find_secrets(self.view.root)])

    @cached_property
    def shell(self) -> str:
        return shutil.which("bash", path=SYSTEM_PATH) or "/bin/sh"
