"""The embedded sandbox: a process tree with its own directory, in bubblewrap where that works.

This module decides what a command sees, carries and may use. `command.py` runs commands, `watch.py` enforces
limits, `changes.py` salvages work.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..core.errors import RunFailed, SandboxFailed
from ..core.records import CommandResult, Limits, MiB, Network, Salvage, SandboxSpec, SkippedEntry
from . import bubblewrap, changes, confined_paths, process_marks, resource_usage, tree_copy
from .bubblewrap import SYSTEM, is_below
from .capture import CommandLog, build_result
from .cgroup import ControlGroup, group_prefix
from .command import ProcessCommand, ProcessLaunch, finish_anyway, run_command
from .confined_paths import FULL, name_in_errors, remove_tree
from .launcher import DescriptorHandover, build_bwrap_argv, build_launcher, render_setenv, render_settings
from .layout import DirectoryLayout, check_start
from .watch import KernelCounts, LimitWatch, WatchedSandbox

if TYPE_CHECKING:
    from .process_sandboxes import ProcessSandboxes  # not at run time: it imports this module

T = TypeVar("T")

CLOSING = 10.0  # seconds
EMPTYING = 3.0  # seconds for killed processes to leave a control group
SMALL = 1 * MiB  # files up to this size are read and written on the event loop
LONGEST_LINE = 100 * 1024  # bytes: the kernel accepts 128 KiB per argument; a longer line becomes a script


class ProcessSandbox(WatchedSandbox):
    """The sandbox of one attempt: a `core.authoring.ManagedSandbox`."""

    def __init__(
        self,
        sandboxes: ProcessSandboxes,
        attempt: int,
        limits: Limits,
        gateway: Path | None,
        start: SandboxSpec,
    ) -> None:
        self.leftovers: list[str] = []  # what closing could not remove; a handful at most
        self.outside = 0
        self._sandboxes = sandboxes
        self._attempt = attempt
        self._gateway = gateway
        self._directory = sandboxes.scratch / str(attempt)
        self._lay_out(start, start.network)
        self._made = False
        self._commands = 0
        self._empty_beside: dict[str, int] = {}  # directories empty after set-up -> their last change
        self._watch = LimitWatch(
            str(self._directory), limits, sandboxes.threads, sandboxes.make_tree_finder(attempt)
        )

    async def __aenter__(self) -> ProcessSandbox:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._closed = True
        if self._made:
            await finish_anyway(self._close())

    @property
    def workdir(self) -> str:
        return self._layout.workdir

    @property
    def private(self) -> str:
        return self._layout.private

    def allow_memory(self, memory: int) -> None:
        self._watch.allow(memory)

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
            check_start(SandboxSpec(user=user), self._confined)
        self._prepare()
        launch = self._build_launch(command, env or {}, self._layout.resolve_inside(workdir))
        before = self._watch.read_counts()
        kept = CommandLog(log) if log else None
        try:
            threads, watch = self._sandboxes.threads, self._watch.watch_command
            running, code = await run_command(launch, kept, threads, watch, timeout)
        finally:
            if kept:
                kept.close()
        await self._check(running, code, before)
        if kept and kept.error:
            raise kept.error
        return build_result(running, code)

    async def read(self, path: str) -> bytes:
        self._check_open()
        with name_in_errors(path):
            place = self._layout.path_mapping.locate(path)
            if confined_paths.read_size(*place) <= SMALL:
                return confined_paths.read(*place)
            return await self._in_thread(confined_paths.read, *place)

    async def write(self, path: str, content: str | bytes) -> None:
        self._prepare()
        content = content.encode() if isinstance(content, str) else content
        await self._watch.admit(len(content))
        with name_in_errors(path):
            place = self._layout.path_mapping.locate(path)
            if len(content) <= SMALL:
                confined_paths.write(*place, content)
            else:
                await self._in_thread(confined_paths.write, *place, content)

    async def put(self, source: Path, path: str) -> None:
        self._prepare()
        if self._watch.limits.disk:
            await self._watch.admit(await self._in_thread(resource_usage.count_bytes, str(source)))
        try:
            await self._in_thread(tree_copy.put, source, *self._layout.path_mapping.locate(path))
        except OSError as e:
            raise SandboxFailed(f"cannot copy `{source}` into the sandbox: {e}", kind="setup") from e

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[SkippedEntry, ...]:
        self._prepare()
        with name_in_errors(path):
            origin = self._layout.resolve_inside(path)
            return await self._in_thread(
                tree_copy.take, *self._layout.path_mapping.locate(path), into, exclude, origin
            )

    async def renew(self, start: SandboxSpec | None = None) -> None:
        self._check_open()
        if self._made:
            self._made = False
            await finish_anyway(self._close())
        if self.leftovers:
            raise SandboxFailed(f"cannot renew the sandbox: {self.leftovers[0]}")
        start = start or self._layout.start
        self._lay_out(start, start.network)

    async def set_network(self, network: Network | None) -> None:
        check_start(SandboxSpec(network=network), self._confined)
        self._lay_out(self._layout.start, network)

    async def mark(self) -> None:
        if self._made:
            await self._watch.begin_phase()
            await self._in_thread(self._mark)

    async def end_processes(self) -> bool:
        killed = await self._kill_commands()
        if self._made:
            await self._in_thread(self._end_all)
        return killed  # processes that a command starts end with it

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
        if error := self._watch.check_disk():
            raise error

    def _mark(self) -> None:
        """Record the state that the agent finds. Blocks, like the next methods."""
        changes.write_manifest(self._layout.work, self._manifest)
        changes.save_places(self._directory, self._layout.beside)
        self._empty_beside = changes.find_empty_places(self._directory, self._layout.beside)
        changes.write_manifests(self._directory, self._layout.requested)

    def _salvage(self, into: Path) -> Salvage | None:
        self.outside = changes.count_changes(self._directory, self._layout.requested)
        return changes.salvage(self._layout.work, self._manifest, into)

    async def _kill_commands(self) -> bool:
        commands = list(self._watch.commands)
        for command in commands:
            await command.kill()
        return bool(commands)

    def _put_back(self) -> bool:
        self._end_all()
        changes.drop_bytecode(self._layout.work)
        return changes.restore_places(self._directory, self._layout.beside, self._empty_beside)

    @property
    def _manifest(self) -> Path:
        return self._directory / "manifest"

    def _lay_out(self, start: SandboxSpec, network: Network | None) -> None:
        reached = network or self._sandboxes.network
        shown = self._sandboxes.view.shown if self._confined else None
        self._layout = DirectoryLayout(self._directory, start, reached, shown)

    @property
    def _confined(self) -> bool:
        return bool(self._sandboxes.machine.bwrap)

    @property
    def _marks(self) -> dict[str, str]:
        return {process_marks.RUN: self._sandboxes.run, process_marks.ATTEMPT: str(self._attempt)}

    def _prepare(self) -> None:
        """Create the directory and the control group at their first use."""
        self._check_open()
        if self._made:
            return
        check_start(self._layout.start, self._confined)
        if self._directory.exists() and (left := remove_tree(self._directory)):
            raise SandboxFailed(f"cannot remove the directory of an earlier attempt: {left}")
        try:
            self._directory.mkdir(parents=True)
            for directory in self._layout.directories:
                Path(directory).mkdir(parents=True)
        except OSError as e:
            failure = RunFailed if e.errno in FULL else SandboxFailed
            raise failure(f"cannot create a sandbox's directory: {e}", kind="disk") from e
        self._made = True
        self._empty_beside = changes.find_empty_places(self._directory, self._layout.beside)
        home, limits = self._sandboxes.machine.cgroup, self._watch.limits
        if home.usable:
            name = f"{group_prefix(self._sandboxes.run)}{self._attempt}"
            self._watch.group = ControlGroup.make(
                home, name, limits.memory_limit, limits.pids, limits.cpus, cpu=True
            )

    def _build_launch(
        self, command: str | Sequence[str], env: Mapping[str, str], workdir: str
    ) -> ProcessLaunch:
        self._commands += 1
        bwrap = self._sandboxes.machine.bwrap
        carried = {**self._marks, process_marks.COMMAND: str(self._commands)}
        environment = {
            "PATH": self._sandboxes.path,
            "LANG": "C.UTF-8",
            **self._layout.variables,
            **self._layout.start.env,
            **env,
            **carried,
        }
        if isinstance(command, str):
            argv = self._build_shell_argv(command)
        else:
            self._check_program(command[0], environment["PATH"])
            argv = list(command)

        watch, layout = self._watch, self._layout

        def complete(handover: DescriptorHandover) -> list[str]:
            root = self._sandboxes.machine.root
            enter = build_launcher(watch.group, watch.limits, root, sources=not bwrap)
            if not bwrap:
                handover.stdin = handover.put(render_settings(environment, workdir))
                return [*enter, *argv]
            hidden = self._sandboxes.hidden  # read late: a scratch that does not exist yet cannot be hidden
            view = layout.make_view(self._gateway, workdir)
            forwards = bool(view.gateway) and not self._sandboxes.listeners.usable
            forwarder = handover.put(bubblewrap.compile_forwarder()) if forwards else -1
            arguments = [*bubblewrap.build_arguments(view, hidden, forwarder), *render_setenv(environment)]
            if view.gateway and not forwards:
                arguments += ["--block-fd", str(handover.hold())]
            words = build_bwrap_argv(handover, bwrap, arguments, self._sandboxes.machine.filter)
            return [*enter, *words, *(bubblewrap.build_forwarder_argv() if forwards else ()), *argv]

        return ProcessLaunch(
            argv=complete,
            marks=carried,
            confined=bool(bwrap),
            count_output=watch.count_output,
            population=watch.population,
            prepare=lambda process: self._sandboxes.listeners.serve(process, self._attempt),
        )

    def _check_program(self, name: str, path: str) -> None:
        """Raise if the sandbox does not show the program; programs of the system are looked up once."""
        known = self._sandboxes.programs if path == self._sandboxes.path and "/" not in name else set()
        if name not in known and is_below(self._layout.path_mapping.check_program(name, path), SYSTEM):
            known.add(name)

    def _build_shell_argv(self, line: str) -> list[str]:
        shell = self._sandboxes.shell
        if len(line.encode(errors="replace")) <= LONGEST_LINE:
            return [shell, "-c", line]
        name = f".line-{self._commands}"
        try:
            with name_in_errors(f"{self._layout.private}/{name}"):
                confined_paths.replace(*self._layout.locate_private(name), os.fsencode(line))
        except ValueError as e:  # text that cannot be encoded
            raise SandboxFailed(f"cannot write a command line of {len(line)} characters: {e}") from e
        return [shell, f"{self._layout.private}/{name}"]

    async def _check(self, command: ProcessCommand, code: int, before: KernelCounts) -> None:
        """Raise the error that ended the command, unless it ended by itself."""
        self._check_open()
        error = self._watch.blame(command, code, before) or await self._watch.blame_disk(code)
        self._check_open()
        if error := error or (self._watch.check_disk_full() if code else None):
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

    def _clear(self, group: ControlGroup | None) -> None:
        """Kill the rest of the tree; remove the directory and the group. Blocks."""
        self._end_marked()
        if group:
            self._empty(group)
        if left := remove_tree(self._directory):
            self.leftovers.append(f"not removed: {left}")

    def _end_all(self) -> None:
        """End every visible process. Blocks."""
        self._end_marked()
        group = self._watch.group
        if group is not None and not group.end_all(EMPTYING, self._watch.limits.pids):
            raise SandboxFailed("a process did not end when it was killed", kind="unkillable")

    def _end_marked(self) -> None:
        """End the processes that outlived their commands; bubblewrap leaves none."""
        if self._commands and not self._confined:
            process_marks.kill_all(self._marks)

    def _empty(self, group: ControlGroup) -> None:
        until = time.monotonic() + EMPTYING
        while group.kill() or not group.remove():
            if time.monotonic() > until:
                self.leftovers.append(f"control group not removed: {group.directories[0]}")
                break
            time.sleep(0.002)
