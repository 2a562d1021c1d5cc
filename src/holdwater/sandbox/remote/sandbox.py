"""The remote sandbox: every operation is a call to the server, which has a sandbox of its own kind for it.

It uses no memory and no disk of this machine. `connection.py` makes the calls, and `serve/sandboxes/` answers
them.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar
from weakref import WeakValueDictionary

import msgspec

from ...core.errors import AttemptInterrupted, AttemptOver, SandboxFailed, as_failure
from ...core.records import (
    AttemptFailure,
    AttemptPhase,
    CommandResult,
    Limits,
    Network,
    Salvage,
    SandboxSpec,
    SkippedEntry,
)
from ...core.sandbox_protocol import (
    A_FILE,
    SINGLE,
    CallDone,
    CallWork,
    ClearOutside,
    CloseSandbox,
    EndProcesses,
    MarkState,
    OpenSandbox,
    PutTree,
    ReadFile,
    RenewSandbox,
    RestoreWork,
    RunCommand,
    SalvageWork,
    SandboxCall,
    SandboxUsage,
    SetNetwork,
    TakeTree,
    WriteFile,
)
from ..capture import CommandLog
from ..confined_paths import LARGEST_READ
from ..salvage_archive import open_replacement
from ..tree_copy import unpack, unpack_file
from ..tree_stream import feed_piece, pack_tree, read_pieces, run_beside
from .connection import RemoteConnection, RemoteSession, TakePiece

T = TypeVar("T")

THREADS = 16  # of all sandboxes of a worker: each packs or unpacks one tree
FILE_PIECE = 256 * 1024  # bytes


class RemoteSandboxes:
    """Opens remote sandboxes of one run; `connection` must stay open as long as they are."""

    def __init__(self, connection: RemoteConnection, run: str, network: Network) -> None:
        self.connection = connection
        self.run = run
        self.network = network
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdwater-remote")
        self._opened: WeakValueDictionary[int, RemoteSandbox] = WeakValueDictionary()

    def open(self, attempt: int, limits: Limits, gateway: Path | None, start: SandboxSpec) -> RemoteSandbox:
        """Return a sandbox for this attempt; the server opens it when the context is entered."""
        self.connection.gateway = gateway
        sandbox = self._opened[attempt] = RemoteSandbox(self, attempt, limits, start)
        return sandbox

    def watch_loss(self, attempt: int) -> Callable[[], AttemptFailure | None]:
        """Return a function that returns why the attempt's sandbox was lost while it was in use."""

        def find_loss() -> AttemptFailure | None:
            sandbox = self._opened.get(attempt)
            return None if sandbox is None else sandbox.loss

        return find_loss

    def gateway_url(self, host_url: str, network: Network | None = None) -> str:
        """Return the gateway's base URL for code in a sandbox with this network: the server leads it here."""
        greeting = self.connection.greeting
        return greeting.gateways.get(network or self.network, "") if greeting is not None else ""

    def close(self) -> None:
        self.threads.shutdown(wait=False)


class RemoteSandbox:
    """The sandbox of one attempt: a `core.authoring.ManagedSandbox`."""

    # The server measures and governs its memory and disk: nothing of it is in use on this machine.
    memory = 0
    disk = 0
    cpu_seconds = 0.0

    def __init__(self, sandboxes: RemoteSandboxes, attempt: int, limits: Limits, start: SandboxSpec) -> None:
        self.workdir = ""
        self.private = ""
        self._sandboxes = sandboxes
        self._attempt = attempt
        self._limits = limits
        self._start = start
        self._usage = SandboxUsage()
        self._session: RemoteSession | None = None
        self._closed = False
        self.loss: AttemptFailure | None = None

    async def __aenter__(self) -> RemoteSandbox:
        start = self._resolve_start(self._start)
        self._session = await self._sandboxes.connection.join_session()
        await self._open(OpenSandbox(start=start, limits=self._limits))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._closed = True
        try:
            await self._call(CloseSandbox())
        except AttemptInterrupted:
            pass  # the server has ended it, or will when the grace period is over

    @property
    def leftovers(self) -> list[str]:
        return list(self._usage.leftovers)

    @property
    def peak_memory(self) -> int:
        return self._usage.peak_memory

    @property
    def peak_disk(self) -> int:
        return self._usage.peak_disk

    @property
    def outside(self) -> int:
        return self._usage.outside

    def allow_memory(self, memory: int) -> None:
        """Do nothing: the server's own governor sets the limit."""

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
        work = RunCommand(
            command=command if isinstance(command, str) else tuple(command),
            env=dict(env or {}),
            timeout=timeout,
            user=user,
            workdir=workdir,
            logged=log is not None,
        )
        if log is None:
            return msgspec.convert((await self._call(work)).result, CommandResult)
        kept = CommandLog(log)
        mask = kept.add_mask()

        async def write(piece: bytes) -> None:
            kept.write(mask.feed(piece))

        try:
            done = await self._call(work, take=write)
        finally:
            kept.close()
        if kept.error:
            raise kept.error
        return msgspec.convert(done.result, CommandResult)

    async def read(self, path: str) -> bytes:
        content = bytearray()

        async def add(piece: bytes) -> None:
            content.extend(piece)
            if len(content) > LARGEST_READ:
                raise SandboxFailed(f"larger than {LARGEST_READ} bytes: `{path}`", kind="size", again=False)

        await self._call(ReadFile(path=path), take=add)
        return bytes(content)

    async def write(self, path: str, content: str | bytes) -> None:
        content = content.encode() if isinstance(content, str) else content
        await self._call(WriteFile(path=path), _list_slices(content))

    async def put(self, source: Path, path: str) -> None:
        single = not source.is_dir()
        packed = pack_tree(source, SINGLE if single else "", self._sandboxes.threads)
        try:
            async with packed as (pieces, packing):
                await self._call(PutTree(path=path, single=single), pieces)
                await packing
        except OSError as e:
            raise SandboxFailed(f"cannot copy `{source}` into the sandbox: {e}", kind="setup") from e

    async def take(self, path: str, into: Path, exclude: Sequence[str] = ()) -> tuple[SkippedEntry, ...]:
        skipped: tuple[SkippedEntry, ...] = ()

        def unpack_tree(stream: IO[bytes]) -> None:
            nonlocal skipped
            if stream.read(1) == A_FILE:
                unpack_file(stream, SINGLE, into)
            else:
                skipped = unpack(stream, into)

        done = await self._receive(TakeTree(path=path, exclude=tuple(exclude)), unpack_tree)
        return (*msgspec.convert(done.result, tuple[SkippedEntry, ...]), *skipped)

    async def renew(self, start: SandboxSpec | None = None) -> None:
        self._check_open()
        await self._open(RenewSandbox(start=None if start is None else self._resolve_start(start)))

    async def set_network(self, network: Network | None) -> None:
        await self._call(SetNetwork(network=network or self._sandboxes.network))

    async def mark(self) -> None:
        await self._call(MarkState())

    async def end_processes(self) -> bool:
        return bool((await self._call(EndProcesses())).result)

    async def clear_outside(self) -> bool:
        return bool((await self._call(ClearOutside())).result)

    async def salvage(self, into: Path) -> Salvage | None:
        def save(stream: IO[bytes]) -> None:
            if first := stream.read(FILE_PIECE):
                with open_replacement(into) as file:
                    file.write(first)
                    shutil.copyfileobj(stream, file, FILE_PIECE)

        done = await self._receive(SalvageWork(), save)
        if done.result is None:
            return None
        salvage = msgspec.convert(done.result, Salvage)
        return msgspec.structs.replace(salvage, name=into.name)

    async def restore(self, source: Path) -> None:
        def send(into: IO[bytes]) -> None:
            with source.open("rb") as file:
                shutil.copyfileobj(file, into, FILE_PIECE)

        async with run_beside(send, "wb", self._sandboxes.threads) as (here, working):
            await self._call(RestoreWork(), read_pieces(here))
            await working

    async def _open(self, work: OpenSandbox | RenewSandbox) -> None:
        self.workdir, self.private = msgspec.convert((await self._call(work)).result, tuple[str, str])

    async def _receive(self, work: CallWork, consume: Callable[[IO[bytes]], None]) -> CallDone:
        """Make a call whose answer a thread consumes."""
        async with run_beside(consume, "rb", self._sandboxes.threads) as (here, working):
            done = await self._call(work, take=lambda piece: feed_piece(here, piece))
            here.shutdown(socket.SHUT_WR)
            await working
        return done

    async def _call(
        self, work: CallWork, content: AsyncIterator[bytes] | None = None, take: TakePiece | None = None
    ) -> CallDone:
        if not isinstance(work, CloseSandbox):
            self._check_open()
        session = self._session
        assert session is not None, "used before it is opened"
        call = SandboxCall(run=self._sandboxes.run, attempt=self._attempt, work=work)  # type: ignore[arg-type]
        try:
            done = await session.call(call, content, take)
        except AttemptInterrupted as error:
            if not self._closed:
                self.loss = as_failure(error, SandboxFailed, AttemptPhase.ACTING)
            raise
        self._usage = done.usage
        return done

    def _resolve_start(self, start: SandboxSpec) -> SandboxSpec:
        """Return the spec with its network. Its image is on the server: the conductor had it built there."""
        network = start.network or self._sandboxes.network
        return msgspec.structs.replace(start, network=network, build=None, build_target="", build_args={})

    def _check_open(self) -> None:
        if self._closed:
            raise AttemptOver("the attempt has ended")


async def _list_slices(content: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(content), FILE_PIECE):
        yield content[at : at + FILE_PIECE]
