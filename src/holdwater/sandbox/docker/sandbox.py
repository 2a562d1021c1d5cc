"""The container sandbox: a container for each attempt, made when it is first used, removed when it is closed.

It decides what a command sees, carries and may use; `command.py` runs it, `watch.py` keeps it to its limits,
`files.py` and `trees.py` move files, `work.py` keeps its work.
"""

from __future__ import annotations

import asyncio
import posixpath
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

from ...core.containers import Containers
from ...core.errors import AttemptOver, SandboxFailed
from ...core.records import CommandResult, LeftOut, Limits, Network, Salvage, Start
from ...docker.client import DockerClient
from .. import marks, quota
from ..capture import Log, result_of
from ..command import finish_anyway
from ..process import LONGEST_LINE
from ..watch import Counts
from . import trees, work
from .command import ContainerCommand, Launch
from .container import Container, no_sleep
from .facts import Facts
from .failures import container_gone, reported
from .files import Files, Owner
from .life import RENEWING, ContainerLife
from .network import read_nameservers
from .spec import IDLE, PRIVATE, Image, Wanted, workdir
from .startup import ContainerStartup
from .watch import ContainerWatch
from .work import Work

THREADS = 4
AT_ONCE = 500  # paths in one command
JOINED = 'l=; for p; do l=$l$p; done; set --; unset p; eval "unset l; $l"'  # a line that came in pieces


class DockerSandboxes:
    """Opens containers of a run; `client` is open as long as they are."""

    def __init__(
        self,
        client: DockerClient,
        containers: Containers,
        network: Network,
        threads: Executor | None = None,
    ) -> None:
        self.client = client
        self.containers = containers
        self.network = network
        self.threads = threads or ThreadPoolExecutor(THREADS, thread_name_prefix="holdwater-container")
        self.facts = Facts(client)
        self.networks = {one: containers.network(one) for one in Network} | {Network.NONE: "none"}
        self.search = tuple(f"{there}/bin" for here, there in containers.mounts if Path(here, "bin").is_dir())

    def open(self, attempt: int, limits: Limits, gateway: Path | None, start: Start) -> DockerSandbox:
        """A sandbox for this attempt; nothing is made before it is used."""
        return DockerSandbox(self, attempt, limits, start)

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """The base URL of the gateway for code in a sandbox: it listens where containers reach it."""
        return host_url


class DockerSandbox:
    """Where one attempt acts: a `core.authoring.KeptSandbox`."""

    def __init__(self, sandboxes: DockerSandboxes, attempt: int, limits: Limits, start: Start) -> None:
        self._sandboxes = sandboxes
        self._attempt = attempt
        self._start = start
        self._image = Image(id="")
        self._network = start.network or sandboxes.network
        self._watch = ContainerWatch(limits, sandboxes.threads)
        name = f"holdwater-{sandboxes.containers.run}-{attempt}"
        self._life = ContainerLife(sandboxes.client, name, self._watch)
        self.leftovers = self._life.leftovers  # what closing could not clean
        self._work: Work | None = None
        self._owners: dict[str, Owner] = {}  # bound: the users of an instance
        self._commands = 0
        self._touched = False  # since set-up was over
        self._closed = False

    async def __aenter__(self) -> DockerSandbox:
        await self._look_at_image()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        await finish_anyway(self._life.end())

    @property
    def workdir(self) -> str:
        return workdir(self._start, self._image)

    @property
    def private(self) -> str:
        return PRIVATE

    @property
    def memory(self) -> int:
        return self._watch.memory

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

    def allow(self, memory: int) -> None:
        self._watch.allow(memory)
        self._life.allow()

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
        before, since = self._watch.counts(), time.time()
        kept = Log(log) if log else None
        try:
            argv = await self._argv(command, container)
            running = ContainerCommand(container, self._launch(argv, env or {}, user, workdir), kept)
            async with self._watch.over(running):
                code = await running.finish(timeout)
        except SandboxFailed as error:
            if error.kind == "daemon" and await container.ended_at_once():
                raise no_sleep() from error
            raise
        finally:
            if kept:
                kept.close()
        await self._check(running, code, before, since)
        if kept and kept.error:
            raise kept.error
        return result_of(running, code)

    async def read(self, path: str) -> bytes:
        files = await self._files()
        with reported(f"cannot read `{path[:300]}`"):
            return await files.read(self._inside(path))

    async def write(self, path: str, content: str | bytes) -> None:
        self._touched = True  # any path of the container can be written
        files = await self._files()
        content = content.encode() if isinstance(content, str) else content
        await self._watch.admit(len(content))
        with reported(f"cannot write `{path[:300]}`"):
            await files.write(self._inside(path), content, await self._owner(files))

    async def put(self, source: Path, path: str) -> None:
        self._touched = True
        files = await self._files()
        if self._watch.limits.disk:
            loop = asyncio.get_running_loop()
            await self._watch.admit(
                await loop.run_in_executor(self._sandboxes.threads, quota.used, str(source))
            )
        try:
            with reported(f"cannot copy `{source}` into the sandbox"):
                owner = await self._owner(files)
                await trees.put(files, source, self._inside(path), owner, self._sandboxes.threads)
        except OSError as e:
            raise SandboxFailed(f"cannot copy `{source}` into the sandbox: {e}", kind="setup") from e

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[LeftOut, ...]:
        files = await self._files()
        with reported(f"cannot take `{path[:300]}` out of the sandbox"):
            return await trees.take(files, self._inside(path), into, exclude, self._sandboxes.threads)

    async def renew(self, start: Start | None = None) -> None:
        self._check_open()
        await finish_anyway(self._life.end(RENEWING))
        if self.leftovers:
            raise SandboxFailed(f"cannot begin anew: {self.leftovers[0]}")
        self._work = None
        self._start = start or self._start
        self._network = self._start.network or self._sandboxes.network
        await self._look_at_image()

    async def reach(self, network: Network | None) -> None:
        self._check_open()
        self._network = network or self._sandboxes.network
        if self._life.begun:
            container = await self._container()
            await container.reach(self._network)
            if self._network is Network.OPEN and not container.resolves:
                await self._resolve()

    async def _resolve(self) -> None:
        """Have names resolved in a container that was made for a closed network."""
        servers = "".join(f"nameserver {address}\n" for address in read_nameservers())
        if servers:
            result = await self.run(
                ["sh", "-c", 'printf %s "$1" > /etc/resolv.conf', "sh", servers], user="0"
            )
            if not result.ok:
                raise SandboxFailed(f"names cannot be resolved: {result.stderr.strip()[-500:]}")

    async def end_processes(self) -> bool:
        if not self._life.begun:
            return False
        container = await self._container()
        with reported("cannot see what runs in a container"):
            idle = not self._image.starts_services and await container.population() <= IDLE
        if idle:
            return False
        self._watch.restarting()
        await container.restart()
        wanted = self._wanted((await self._sandboxes.facts.daemon()).cpus, quotas=False)
        await ContainerStartup(container, wanted, self._launch).settle()
        return True

    async def clear_outside(self) -> bool:
        return not self._life.begun or not self._touched

    async def mark(self) -> None:
        self._touched = False
        if not self._life.begun and self._counted and not self._image.starts_services:
            return  # what is as in the image needs no mark
        kept = await self._kept()
        with reported("cannot see what a sandbox holds"):
            await kept.mark()

    async def salvage(self, into: Path) -> Salvage | None:
        if not self._life.begun:
            return None
        kept = await self._kept()
        with reported("cannot keep what changed in a sandbox"):
            return await kept.salvage(into)

    @property
    def outside(self) -> int:
        return self._work.outside if self._work is not None else 0

    async def restore(self, source: Path) -> None:
        files, threads = await self._files(), self._sandboxes.threads
        with reported("cannot put work back"):
            gone = await asyncio.get_running_loop().run_in_executor(threads, work.deleted, source)
            for at in range(0, len(gone), AT_ONCE):
                result = await self.run(["rm", "-rf", "--", *gone[at : at + AT_ONCE]], user="0")
                if not result.ok:
                    raise SandboxFailed(f"cannot put work back: {result.stderr.strip()[-500:]}")
            await work.restore(files, self.workdir, source, await self._owner(files), threads)
        await self._watch.measure_disk()
        if error := self._watch.disk_over():
            raise error

    @property
    def _counted(self) -> bool:
        """Whether the daemon can say what changed: of volumes it cannot."""
        return not self._sandboxes.containers.read_only

    async def _kept(self) -> Work:
        """The work so far; a phase ends here, and another begins."""
        files = await self._files()
        await self._watch.begin_phase()
        if self._work is None:
            self._work = Work(files, self.workdir, self._counted, self._sandboxes.threads)
        return self._work

    async def _look_at_image(self) -> None:
        self._owners.clear()
        reference = self._start.image
        self._image = await self._sandboxes.facts.image(reference) if reference else Image(id="")

    def _check_open(self) -> None:
        if self._closed:
            raise AttemptOver("the attempt has ended")

    async def _container(self) -> Container:
        self._check_open()
        container = await self._life.container(self._make)
        self._check_open()
        return container

    async def _files(self) -> Files:
        container = await self._container()
        with reported("cannot see whether a container runs"):
            if not await container.running():  # its files are still there, and nothing says of when they are
                raise container_gone("its files are wanted")
        return Files(container.client, container.path)

    async def _make(self, name: str) -> Container:
        if not self._start.image:
            raise SandboxFailed(
                "the instance names no image to make a container from",
                "name one, or `--sandbox process`",
                kind="start",
                again=False,
            )
        _check_words([*self._start.env, *self._start.env.values()])
        facts = self._sandboxes.facts
        daemon = await facts.daemon()
        container = Container(self._sandboxes.client, name, self._sandboxes.networks)
        wanted = self._wanted(daemon.cpus, facts.quotas)
        try:
            await container.create(wanted, self._network)
        except SandboxFailed as error:
            if not facts.quotas or "storage-opt" not in error.message:
                raise
            facts.quotas = False  # it is watched instead
            wanted = self._wanted(daemon.cpus, False)
            await container.create(wanted, self._network)
        startup = ContainerStartup(container, wanted, self._launch)
        await startup.furnish(partial(self._owner, Files(container.client, container.path)))
        await startup.start()
        self._watch.begin(container, daemon.root)
        await startup.settle()
        return container

    def _wanted(self, cpus: int, quotas: bool) -> Wanted:
        containers = self._sandboxes.containers
        return Wanted(
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

    async def _owner(self, files: Files) -> Owner:
        user = self._start.user or self._image.user
        if user not in self._owners:
            self._owners[user] = await files.owner(user)
        return self._owners[user]

    def _inside(self, path: str) -> str:
        """An absolute path of the container."""
        if "\0" in path or not path:
            raise SandboxFailed(f"not a path: `{path[:300]!r}`", kind="path", again=False)
        return posixpath.normpath(posixpath.join(self.workdir, path))

    async def _argv(self, command: str | Sequence[str], container: Container) -> list[str]:
        if not isinstance(command, str):
            return list(command)
        with reported("cannot look into a container"):
            shell = await self._sandboxes.facts.shell(self._image, container.path)
        if len(command) * 4 <= LONGEST_LINE or len(command.encode(errors="replace")) <= LONGEST_LINE:
            return [shell, "-c", command]
        step = LONGEST_LINE // 4  # characters, of up to four bytes
        pieces = [command[at : at + step] for at in range(0, len(command), step)]
        return [shell, "-c", JOINED, shell, *pieces]

    def _launch(
        self, argv: list[str], env: Mapping[str, str], user: str | None, workdir: str | None
    ) -> Launch:
        _check_words([*argv, *env, *env.values()])
        self._touched = True
        self._commands += 1
        mark = f"{self._commands:06}"  # none is the beginning of another
        carried = {
            marks.RUN: self._sandboxes.containers.run,
            marks.ATTEMPT: str(self._attempt),
            marks.COMMAND: mark,
        }
        return Launch(
            argv=argv,
            env={**self._start.env, **env, **carried},
            workdir=self._inside(workdir or "."),
            user=user or self._start.user or self._image.user,
            mark=f"{marks.COMMAND}={mark}",
            printed=self._watch.printed,
            population=self._watch.population,
            ending=self._watch.restarting,
        )

    async def _check(self, command: ContainerCommand, code: int, before: Counts, since: float) -> None:
        """Raise what ended the command, if that was not itself."""
        self._check_open()
        error = self._watch.blame(command, code, before)
        with reported("cannot tell how a command ended"):
            if error is None and code:
                error = await self._watch.blame_unseen(since)
            if error := error or await self._watch.blame_disk(code):
                if error.kind == "pids":
                    await command.kill()  # or nothing else could be run
                raise error
            if code and (error := self._watch.disk_full()):
                raise error
            if code >= 128 and not await (await self._container()).running():
                raise container_gone("a command was ended")


def _check_words(words: Sequence[str]) -> None:
    """Refuse what no process can be given."""
    text = "".join(words)
    if "\0" in text or any(0xD800 <= ord(letter) <= 0xDFFF for letter in set(text)):
        raise SandboxFailed("cannot start a process: a NUL, or what no encoding can write", kind="spawn")
