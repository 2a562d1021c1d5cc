"""The container sandbox: one container per attempt, created at its first use and removed when it is closed.

This module decides what a command sees, carries and may use. `command.py` runs commands, `watch.py` enforces
limits, `files.py` moves files, `container_work.py` salvages work.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import SandboxFailed
from ...core.records import CommandResult, Limits, Network, Salvage, SandboxSpec, SkippedEntry
from .. import process_marks, resource_usage
from ..capture import CommandLog, build_result
from ..command import finish_anyway
from ..process import LONGEST_LINE
from ..tree_stream import FileOwner
from ..watch import KernelCounts, WatchedSandbox
from . import container_work
from .command import ContainerCommand, ExecLaunch, check_words
from .container import AttemptContainer, make_gone_error, make_sleep_error, translate_errors
from .container_lifecycle import RENEWING, ContainerLifecycle, ContainerStartup
from .container_work import ContainerWork
from .files import ContainerFiles, put_tree, take_tree
from .network import read_nameservers
from .spec import IDLE_PROCESSES, PRIVATE, ContainerImage, ContainerSpec, choose_workdir
from .watch import ContainerWatch

if TYPE_CHECKING:
    from .sandboxes import DockerSandboxes  # not at run time: it imports this module

AT_ONCE = 500  # paths per command
JOIN_PIECES = 'l=; for p; do l=$l$p; done; set --; unset p; eval "unset l; $l"'  # joins a line from pieces


class DockerSandbox(WatchedSandbox):
    """The sandbox of one attempt: a `core.authoring.ManagedSandbox`."""

    _watch: ContainerWatch

    def __init__(self, sandboxes: DockerSandboxes, attempt: int, limits: Limits, start: SandboxSpec) -> None:
        self._sandboxes = sandboxes
        self._attempt = attempt
        self._start = start
        self._image = ContainerImage(id="")
        self._network = start.network or sandboxes.network
        self._watch = ContainerWatch(limits, sandboxes.threads)
        name = f"holdwater-{sandboxes.containers.run}-{attempt}"
        self._lifecycle = ContainerLifecycle(sandboxes.client, name, self._watch)
        self.leftovers = self._lifecycle.leftovers  # containers that closing could not remove
        self._work: ContainerWork | None = None
        self._owners: dict[str, FileOwner] = {}  # bound: the users of an instance
        self._commands = 0
        self._touched = False  # since the end of set-up

    async def __aenter__(self) -> DockerSandbox:
        await self._look_at_image()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._closed = True
        await finish_anyway(self._lifecycle.end())

    @property
    def workdir(self) -> str:
        return choose_workdir(self._start, self._image)

    @property
    def private(self) -> str:
        return PRIVATE

    def allow_memory(self, memory: int) -> None:
        self._watch.allow(memory)
        self._lifecycle.allow()

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
        container = await self._container()
        before, since = self._watch.read_counts(), time.time()
        kept = CommandLog(log) if log else None
        try:
            argv = await self._build_argv(command, container)
            running = ContainerCommand(container, self._build_launch(argv, env or {}, user, workdir), kept)
            async with self._watch.watch_command(running):
                code = await running.finish(timeout)
        except SandboxFailed as error:
            if error.kind == "daemon" and await container.ended_at_once():
                raise make_sleep_error() from error
            raise
        finally:
            if kept:
                kept.close()
        await self._check(running, code, before, since)
        if kept and kept.error:
            raise kept.error
        return build_result(running, code)

    async def read(self, path: str) -> bytes:
        files = await self._files()
        with translate_errors(f"cannot read `{path[:300]}`"):
            return await files.read(self._resolve_path(path))

    async def write(self, path: str, content: str | bytes) -> None:
        self._touched = True  # any path of the container can be written
        files = await self._files()
        content = content.encode() if isinstance(content, str) else content
        await self._watch.admit(len(content))
        with translate_errors(f"cannot write `{path[:300]}`"):
            await files.write(self._resolve_path(path), content, await self._find_owner(files))

    async def put(self, source: Path, path: str) -> None:
        self._touched = True
        files = await self._files()
        if self._watch.limits.disk:
            loop = asyncio.get_running_loop()
            await self._watch.admit(
                await loop.run_in_executor(self._sandboxes.threads, resource_usage.count_bytes, str(source))
            )
        try:
            with translate_errors(f"cannot copy `{source}` into the sandbox"):
                owner = await self._find_owner(files)
                await put_tree(files, source, self._resolve_path(path), owner, self._sandboxes.threads)
        except OSError as e:
            raise SandboxFailed(f"cannot copy `{source}` into the sandbox: {e}", kind="setup") from e

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[SkippedEntry, ...]:
        files = await self._files()
        with translate_errors(f"cannot take `{path[:300]}` out of the sandbox"):
            return await take_tree(files, self._resolve_path(path), into, exclude, self._sandboxes.threads)

    async def renew(self, start: SandboxSpec | None = None) -> None:
        self._check_open()
        await finish_anyway(self._lifecycle.end(RENEWING))
        if self.leftovers:
            raise SandboxFailed(f"cannot renew the sandbox: {self.leftovers[0]}")
        self._work = None
        self._start = start or self._start
        self._network = self._start.network or self._sandboxes.network
        await self._look_at_image()

    async def set_network(self, network: Network | None) -> None:
        self._check_open()
        self._network = network or self._sandboxes.network
        if self._lifecycle.begun:
            container = await self._container()
            await container.reach(self._network)
            if self._network is Network.OPEN and not container.resolves:
                await self._write_resolvers()

    async def _write_resolvers(self) -> None:
        """Configure name resolution in a container that was created for a closed network."""
        servers = "".join(f"nameserver {address}\n" for address in read_nameservers())
        if servers:
            result = await self.run(
                ["sh", "-c", 'printf %s "$1" > /etc/resolv.conf', "sh", servers], user="0"
            )
            if not result.ok:
                raise SandboxFailed(f"cannot configure name resolution: {result.stderr.strip()[-500:]}")

    async def end_processes(self) -> bool:
        if not self._lifecycle.begun:
            return False
        container = await self._container()
        with translate_errors("cannot list the processes in a container"):
            idle = not self._image.starts_services and await container.population() <= IDLE_PROCESSES
        if idle:
            return False
        self._watch.before_restart()
        await container.restart()
        wanted = self._build_spec((await self._sandboxes.facts.daemon()).cpus, quotas=False)
        await ContainerStartup(container, wanted, self._build_launch).wait_ready()
        return True

    async def clear_outside(self) -> bool:
        return not self._lifecycle.begun or not self._touched

    async def mark(self) -> None:
        self._touched = False
        if not self._lifecycle.begun and self._counted and not self._image.starts_services:
            return  # a directory as in the image needs no mark
        kept = await self._open_work()
        with translate_errors("cannot inspect the work in a sandbox"):
            await kept.mark()

    async def salvage(self, into: Path) -> Salvage | None:
        if not self._lifecycle.begun:
            return None
        kept = await self._open_work()
        with translate_errors("cannot salvage the work in a sandbox"):
            return await kept.salvage(into)

    @property
    def outside(self) -> int:
        return self._work.outside if self._work is not None else 0

    async def restore(self, source: Path) -> None:
        files, threads = await self._files(), self._sandboxes.threads
        with translate_errors("cannot restore work"):
            gone = await asyncio.get_running_loop().run_in_executor(
                threads, container_work.read_deleted, source
            )
            for at in range(0, len(gone), AT_ONCE):
                result = await self.run(["rm", "-rf", "--", *gone[at : at + AT_ONCE]], user="0")
                if not result.ok:
                    raise SandboxFailed(f"cannot restore work: {result.stderr.strip()[-500:]}")
            await container_work.restore(files, self.workdir, source, await self._find_owner(files), threads)
        await self._watch.measure_disk()
        if error := self._watch.check_disk():
            raise error

    @property
    def _counted(self) -> bool:
        """Whether the daemon can report changes; it cannot for volumes."""
        return not self._sandboxes.containers.read_only

    async def _open_work(self) -> ContainerWork:
        """Return the work so far; end one phase and begin the next."""
        files = await self._files()
        await self._watch.begin_phase()
        if self._work is None:
            self._work = ContainerWork(files, self.workdir, self._counted, self._sandboxes.threads)
        return self._work

    async def _look_at_image(self) -> None:
        self._owners.clear()
        reference = self._start.image
        self._image = await self._sandboxes.facts.image(reference) if reference else ContainerImage(id="")

    async def _container(self) -> AttemptContainer:
        self._check_open()
        container = await self._lifecycle.ensure_container(self._make)
        self._check_open()
        return container

    async def _files(self) -> ContainerFiles:
        container = await self._container()
        with translate_errors("cannot inspect a container"):
            if not await container.running():  # a stopped container has files of unknown age
                raise make_gone_error("cannot access its files")
        return ContainerFiles(container.client, container.path)

    async def _make(self, name: str) -> AttemptContainer:
        if not self._start.image:
            raise SandboxFailed(
                "the instance names no image for its container",
                "name one, or use `--sandbox process`",
                kind="start",
                again=False,
            )
        check_words([*self._start.env, *self._start.env.values()])
        facts = self._sandboxes.facts
        daemon = await facts.daemon()
        container = AttemptContainer(self._sandboxes.client, name, self._sandboxes.networks)
        wanted = self._build_spec(daemon.cpus, facts.quotas)
        try:
            await container.create(wanted, self._network)
        except SandboxFailed as error:
            if not facts.quotas or "storage-opt" not in error.message:
                raise
            facts.quotas = False  # the disk is watched instead
            wanted = self._build_spec(daemon.cpus, False)
            await container.create(wanted, self._network)
        startup = ContainerStartup(container, wanted, self._build_launch)
        await startup.prepare_directories(
            partial(self._find_owner, ContainerFiles(container.client, container.path))
        )
        await startup.start()
        self._watch.begin(container, daemon.root)
        await startup.wait_ready()
        return container

    def _build_spec(self, cpus: int, quotas: bool) -> ContainerSpec:
        containers = self._sandboxes.containers
        return ContainerSpec(
            start=self._start,
            image=self._image,
            limits=self._watch.limits,
            network=self._sandboxes.networks[self._network],
            labels=containers.labels(self._attempt),
            mounts=containers.mounts,
            search=self._sandboxes.search,
            read_only=containers.read_only,
            cpus=cpus,
            quota=quotas,
            resolves=self._network is Network.OPEN,
        )

    async def _find_owner(self, files: ContainerFiles) -> FileOwner:
        user = self._start.user or self._image.user
        if user not in self._owners:
            self._owners[user] = await files.find_owner(user)
        return self._owners[user]

    def _resolve_path(self, path: str) -> str:
        """Return an absolute path in the container."""
        if "\0" in path or not path:
            raise SandboxFailed(f"invalid path: `{path[:300]!r}`", kind="path", again=False)
        return posixpath.normpath(posixpath.join(self.workdir, path))

    async def _build_argv(self, command: str | Sequence[str], container: AttemptContainer) -> list[str]:
        if not isinstance(command, str):
            return list(command)
        with translate_errors("cannot inspect a container's shell"):
            shell = await self._sandboxes.facts.shell(self._image, container.path)
        if len(command) * 4 <= LONGEST_LINE or len(command.encode(errors="replace")) <= LONGEST_LINE:
            return [shell, "-c", command]
        step = LONGEST_LINE // 4  # characters, of up to four bytes each
        pieces = [command[at : at + step] for at in range(0, len(command), step)]
        return [shell, "-c", JOIN_PIECES, shell, *pieces]

    def _build_launch(
        self, argv: list[str], env: Mapping[str, str], user: str | None, workdir: str | None
    ) -> ExecLaunch:
        check_words([*argv, *env, *env.values()])
        self._touched = True
        self._commands += 1
        mark = f"{self._commands:06}"  # fixed width: no mark is a prefix of another
        carried = {
            process_marks.RUN: self._sandboxes.containers.run,
            process_marks.ATTEMPT: str(self._attempt),
            process_marks.COMMAND: mark,
        }
        return ExecLaunch(
            argv=argv,
            env={**self._start.env, **env, **carried},
            workdir=self._resolve_path(workdir or "."),
            user=user or self._start.user or self._image.user,
            mark=f"{process_marks.COMMAND}={mark}",
            count_output=self._watch.count_output,
            population=self._watch.population,
            before_restart=self._watch.before_restart,
        )

    async def _check(self, command: ContainerCommand, code: int, before: KernelCounts, since: float) -> None:
        """Raise the error that ended the command, unless it ended by itself."""
        self._check_open()
        error = self._watch.blame(command, code, before)
        with translate_errors("cannot determine how a command ended"):
            if error is None and code:
                error = await self._watch.blame_unseen(since)
            if error := error or await self._watch.blame_disk(code):
                if error.kind == "pids":
                    await command.kill()  # otherwise no other command could run
                raise error
            if code and (error := self._watch.check_disk_full()):
                raise error
            if code >= 128 and not await (await self._container()).running():
                raise make_gone_error("cannot finish a command")
