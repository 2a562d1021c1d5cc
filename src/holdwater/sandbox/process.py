"""The embedded sandbox: a process tree with a directory of its own, in bubblewrap where that works.

It decides what a command sees, carries and may use; `command.py` runs it, `watch.py` keeps it to its limits,
`changes.py` keeps its work.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from ..core.errors import AttemptOver, BadInput, RunFailed, SandboxFailed
from ..core.helper_environment import SYSTEM_PATH
from ..core.records import CommandResult, LeftOut, Limits, MiB, Network, Salvage, Start
from . import beneath, bubblewrap, changes, copying, marks, outside, quota
from .beneath import FULL, naming
from .capture import Log, result_of
from .cgroup import Cgroup, prefix
from .command import Command, Launch, adopt_orphans, finish_anyway, run_command
from .entrance import entrance
from .handover import Handover, render_settings, set_variables, start_bubblewrap
from .layout import Layout, check
from .probe import Machine, probe
from .remove import remove_tree
from .root import SYSTEM, find_secrets, is_below
from .scratch import temporary_prefix
from .visibility import SharedView, Visible, check_mounts
from .watch import Counts, Watch

T = TypeVar("T")

CLOSING = 10.0  # seconds
EMPTYING = 3.0  # seconds for a control group to lose its killed processes
SMALL = 1 * MiB  # files up to this size are read and written on the event loop
LONGEST_LINE = 100 * 1024  # bytes: the kernel takes 128 KiB for one argument; a longer line becomes a script
THREADS = 4


class ProcessSandboxes:
    """Opens sandboxes below `scratch`, which belongs to this run alone."""

    def __init__(
        self,
        scratch: Path,
        run: str,
        network: Network,
        hide: tuple[Path, ...] = (),
        machine: Machine | None = None,
        path: str = SYSTEM_PATH,
        visible: Visible = Visible(),  # noqa: B008 - frozen
    ) -> None:
        self.machine = machine or probe()
        if network is Network.NONE and not self.machine.bwrap:
            raise BadInput(
                f"network `none` needs bubblewrap: {self.machine.why_not or 'not available'}",
                hint="install the package `bubblewrap`, or use `--network host`",
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
        self.roll = marks.Roll(run)
        self._hide = hide
        self.programs: set[str] = set()  # that were found in the system. Bound: what that has

    def open(
        self,
        attempt: int,
        limits: Limits,
        gateway: Path | None,
        start: Start = Start(),  # noqa: B008 - frozen
    ) -> ProcessSandbox:
        """A sandbox for this attempt; nothing is made before it is used."""
        return ProcessSandbox(self, attempt, limits, gateway if self.machine.bwrap else None, start)

    def tree_of(self, attempt: int) -> Callable[[list[int]], list[int]]:
        """Finds the processes of an attempt, given its commands. It blocks, and holds no sandbox."""

        def found(commands: list[int]) -> list[int]:
            if self.machine.bwrap:
                return [pid for command in commands for pid in marks.descendants(command)]
            return self.roll.of(str(attempt))

        return found

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """The base URL of the gateway for code in a sandbox, of this network or the run's."""
        if self.machine.bwrap and (network or self.network) is Network.GATEWAY:
            return f"http://127.0.0.1:{bubblewrap.PORT}/v1"
        return host_url

    def close(self) -> None:
        """Remove what the sandboxes share. None of them is open any more."""
        self.view.close()

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """What commands must not see: the other sandboxes, what the caller hides, secrets of the machine."""
        return bubblewrap.hidden([self.scratch, *self._hide, *find_secrets(self.view.root)])

    @cached_property
    def shell(self) -> str:
        return shutil.which("bash", path=SYSTEM_PATH) or "/bin/sh"


class ProcessSandbox:
    """Where one attempt acts: a `core.authoring.KeptSandbox`."""

    def __init__(
        self,
        sandboxes: ProcessSandboxes,
        attempt: int,
        limits: Limits,
        gateway: Path | None,
        start: Start,
    ) -> None:
        self.leftovers: list[str] = []  # what closing could not clean, a handful at most
        self.outside = 0
        self._sandboxes = sandboxes
        self._attempt = attempt
        self._gateway = gateway
        self._directory = sandboxes.scratch / str(attempt)
        self._lay_out(start, start.network)
        self._made = False
        self._closed = False
        self._commands = 0
        self._empty_beside: dict[str, int] = {}  # directories that set-up left empty, when they changed last
        self._watch = Watch(str(self._directory), limits, sandboxes.threads, sandboxes.tree_of(attempt))

    async def __aenter__(self) -> ProcessSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        if self._made:
            await finish_anyway(self._close())

    @property
    def workdir(self) -> str:
        return self._layout.workdir

    @property
    def private(self) -> str:
        return self._layout.private

    @property
    def memory(self) -> int:
        return self._watch.memory

    def allow(self, memory: int) -> None:
        self._watch.allow(memory)

    @property
    def peak_memory(self) -> int:
        return self._watch.peak_memory

    @property
    def cpu_seconds(self) -> float:
        return self._watch.cpu_seconds

    @property
    def disk(self) -> int:
        return self._watch.disk

    @property
    def peak_disk(self) -> int:
        return self._watch.peak_disk

    async def run(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
        workdir: str | None = None,
        log: Path | None = None,
    ) -> CommandResult:
        if user is not None:
            check(Start(user=user), self._confined)
        self._prepare()
        launch = self._launch(command, env or {}, self._layout.started_in(workdir))
        before = self._watch.counts()
        kept = Log(log) if log else None
        try:
            threads, watch = self._sandboxes.threads, self._watch.over
            running, code = await run_command(launch, kept, threads, watch, timeout)
        finally:
            if kept:
                kept.close()
        await self._check(running, code, before)
        if kept and kept.error:
            raise kept.error
        return result_of(running, code)

    async def read(self, path: str) -> bytes:
        self._check_open()
        with naming(path):
            place = self._layout.places.place(path)
            if beneath.size(*place) <= SMALL:
                return beneath.read(*place)
            return await self._in_thread(beneath.read, *place)

    async def write(self, path: str, content: str | bytes) -> None:
        self._prepare()
        content = content.encode() if isinstance(content, str) else content
        await self._watch.admit(len(content))
        with naming(path):
            place = self._layout.places.place(path)
            if len(content) <= SMALL:
                beneath.write(*place, content)
            else:
                await self._in_thread(beneath.write, *place, content)

    async def put(self, source: Path, path: str) -> None:
        self._prepare()
        if self._watch.limits.disk:
            await self._watch.admit(await self._in_thread(quota.used, str(source)))
        try:
            await self._in_thread(copying.put, source, *self._layout.places.place(path))
        except OSError as e:
            raise SandboxFailed(f"cannot copy `{source}` into the sandbox: {e}", kind="setup") from e

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[LeftOut, ...]:
        self._prepare()
        with naming(path):
            origin = self._layout.started_in(path)
            return await self._in_thread(
                copying.take, *self._layout.places.place(path), into, exclude, origin
            )

    async def renew(self, start: Start | None = None) -> None:
        self._check_open()
        if self._made:
            self._made = False
            await finish_anyway(self._close())
        if self.leftovers:
            raise SandboxFailed(f"cannot begin anew: {self.leftovers[0]}")
        start = start or self._layout.start
        self._lay_out(start, start.network)

    async def reach(self, network: Network | None) -> None:
        check(Start(network=network), self._confined)
        self._lay_out(self._layout.start, network)

    async def mark(self) -> None:
        if self._made:
            await self._watch.begin_phase()
            await self._in_thread(self._mark)

    async def end_processes(self) -> bool:
        killed = await self._kill_commands()
        if self._made:
            await self._in_thread(self._end_all)
        return killed  # what a command starts ends with it

    async def clear_outside(self) -> bool:
        if not self._made:
            return True
        await self._kill_commands()
        return await self._in_thread(self._put_back)

    async def salvage(self, into: Path) -> Salvage | None:
        if not self._made:
            return None
        await self._watch.begin_phase()
        return await self._in_thread(self._salvage, into)

    async def restore(self, source: Path) -> None:
        self._prepare()
        await self._in_thread(changes.restore, self._layout.work, source)
        await self._watch.measure_disk()
        if error := self._watch.disk_over():
            raise error

    def _mark(self) -> None:
        """Note what the agent finds. Blocks, as do the next ones."""
        changes.mark(self._layout.work, self._manifest)
        self._empty_beside = outside.keep(self._directory, self._layout.beside)
        outside.mark(self._directory, self._layout.asked)

    def _salvage(self, into: Path) -> Salvage | None:
        self.outside = outside.count_changes(self._directory, self._layout.asked)
        return changes.salvage(self._layout.work, self._manifest, into)

    async def _kill_commands(self) -> bool:
        commands = list(self._watch.commands)
        for command in commands:
            await command.kill()
        return bool(commands)

    def _put_back(self) -> bool:
        self._end_all()
        outside.drop_bytecode(self._layout.work)
        return outside.put_back(self._directory, self._layout.beside, self._empty_beside)

    @property
    def _manifest(self) -> Path:
        return self._directory / "manifest"

    def _lay_out(self, start: Start, network: Network | None) -> None:
        reached = network or self._sandboxes.network
        shown = self._sandboxes.view.shown if self._confined else None
        self._layout = Layout(self._directory, start, reached, shown)

    @property
    def _confined(self) -> bool:
        return bool(self._sandboxes.machine.bwrap)

    @property
    def _marks(self) -> dict[str, str]:
        return {marks.RUN: self._sandboxes.run, marks.ATTEMPT: str(self._attempt)}

    def _check_open(self) -> None:
        if self._closed:
            raise AttemptOver("the attempt has ended")

    def _prepare(self) -> None:
        """Make the directory and the control group, the first time that something needs them."""
        self._check_open()
        if self._made:
            return
        check(self._layout.start, self._confined)
        if self._directory.exists() and (left := remove_tree(self._directory)):
            raise SandboxFailed(f"left by an earlier attempt, and cannot be removed: {left}")
        try:
            for directory in self._layout.all:
                Path(directory).mkdir(parents=True)
        except OSError as e:
            failure = RunFailed if e.errno in FULL else SandboxFailed
            raise failure(f"cannot make a sandbox's directory: {e}", kind="disk") from e
        self._made = True
        home, limits = self._sandboxes.machine.cgroup, self._watch.limits
        if home.usable:
            name = f"{prefix(self._sandboxes.run)}{self._attempt}"
            self._watch.group = Cgroup.make(home, name, limits.held_to, limits.pids, limits.cpus, cpu=True)

    def _launch(self, command: str | Sequence[str], env: Mapping[str, str], workdir: str) -> Launch:
        self._commands += 1
        bwrap = self._sandboxes.machine.bwrap
        carried = {**self._marks, marks.COMMAND: str(self._commands)}
        environment = {
            "PATH": self._sandboxes.path,
            "LANG": "C.UTF-8",
            **self._layout.inside,
            **self._layout.start.env,
            **env,
            **carried,
        }
        if isinstance(command, str):
            argv = self._shell_line(command)
        else:
            self._check_program(command[0], environment["PATH"])
            argv = list(command)

        watch, layout = self._watch, self._layout

        def complete(handover: Handover) -> list[str]:
            root = self._sandboxes.machine.root
            enter = entrance(watch.group, watch.limits, root, sources=not bwrap)
            if not bwrap:
                handover.stdin = handover.put(render_settings(environment, workdir))
                return [*enter, *argv]
            hidden = self._sandboxes.hidden  # known only now: a scratch that is not made yet cannot be hidden
            view = layout.view(self._gateway, workdir)
            arguments = [*bubblewrap.confine(view, hidden), *set_variables(environment)]
            words = start_bubblewrap(handover, bwrap, arguments, self._sandboxes.machine.filter)
            return [*enter, *words, *(bubblewrap.forwarder() if view.gateway else ()), *argv]

        return Launch(
            argv=complete,
            marks=carried,
            confined=bool(bwrap),
            printed=watch.printed,
            population=watch.population,
        )

    def _check_program(self, name: str, path: str) -> None:
        """Raise if no process in the sandbox finds the program; those of the system are looked for once."""
        known = self._sandboxes.programs if path == self._sandboxes.path and "/" not in name else set()
        if name not in known and is_below(self._layout.places.check_program(name, path), SYSTEM):
            known.add(name)

    def _shell_line(self, line: str) -> list[str]:
        shell = self._sandboxes.shell
        if len(line.encode(errors="replace")) <= LONGEST_LINE:
            return [shell, "-c", line]
        name = f".line-{self._commands}"
        try:
            with naming(f"{self._layout.private}/{name}"):
                beneath.replace(*self._layout.private_place(name), os.fsencode(line))
        except ValueError as e:  # what no encoding can write
            raise SandboxFailed(f"cannot write a command line of {len(line)} characters: {e}") from e
        return [shell, f"{self._layout.private}/{name}"]

    async def _check(self, command: Command, code: int, before: Counts) -> None:
        """Raise what ended the command, if that was not itself."""
        self._check_open()
        error = self._watch.blame(command, code, before) or await self._watch.blame_disk(code)
        self._check_open()
        if error := error or (self._watch.disk_full() if code else None):
            raise error
        if not command.started():
            raise SandboxFailed(f"cannot start the command: {command.stderr.text().strip()[-500:] or code}")

    async def _in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._sandboxes.threads, function, *arguments)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(CLOSING):
                async with asyncio.TaskGroup() as tasks:
                    for command in list(self._watch.commands):
                        tasks.create_task(command.kill())
                await self._in_thread(self._clear, self._watch.leave_group())
        except TimeoutError:
            self.leftovers.append(f"not removed within {CLOSING:.0f} s: {self._directory}")
        except Exception as e:  # boundary: a failed clean-up is counted, it changes no verdict  # noqa: BLE001
            self.leftovers.append(f"not cleaned: {e!r}")

    def _clear(self, group: Cgroup | None) -> None:
        """Kill what is left of the tree, and remove the directory and the group. Blocks."""
        if self._commands and not self._sandboxes.machine.bwrap:
            marks.kill_all(self._marks)
        if group:
            self._empty(group)
        if left := remove_tree(self._directory):
            self.leftovers.append(f"not removed: {left}")

    def _end_all(self) -> None:
        """End every process, as far as they can be seen. Blocks."""
        if self._commands and not self._sandboxes.machine.bwrap:
            marks.kill_all(self._marks)
        group = self._watch.group
        if group is not None and not group.end_all(EMPTYING, self._watch.limits.pids):
            raise SandboxFailed("a process did not end when it was killed", kind="unkillable")

    def _empty(self, group: Cgroup) -> None:
        until = time.monotonic() + EMPTYING
        while group.kill() or not group.remove():
            if time.monotonic() > until:
                self.leftovers.append(f"control group not removed: {group.directories[0]}")
                break
            time.sleep(0.002)
