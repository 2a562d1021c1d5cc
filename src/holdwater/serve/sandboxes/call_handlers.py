"""Carries out the calls of a client on one sandbox. Trees and archives pass through the server's disk.

What comes from a client is data: `sandbox/tree_copy.py` unpacks it without trust.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from ...core.errors import AttemptError, AttemptOver, SandboxFailed
from ...core.failures import DAEMON, DISK
from ...core.limits import GiB
from ...core.masking import clean_text
from ...core.records import FailureOrigin
from ...core.sandbox_protocol import (
    A_DIRECTORY,
    A_FILE,
    SINGLE,
    CallDone,
    CallFailed,
    CallWork,
    ClearOutside,
    ContentPiece,
    EndProcesses,
    MarkState,
    PutTree,
    ReadFile,
    RenewSandbox,
    RestoreWork,
    RunCommand,
    SalvageWork,
    SandboxUsage,
    SetNetwork,
    TakeTree,
    WriteFile,
)
from ...sandbox.confined_paths import FULL, LARGEST_READ
from ...sandbox.tree_copy import unpack
from ...sandbox.tree_stream import (
    FileOwner,
    add_path,
    feed_piece,
    list_tree,
    open_tar,
    read_pieces,
    run_beside,
)
from ...web.link_streams import LinkStream
from .sandbox_host import HostedPlace, SandboxHost

T = TypeVar("T")

FILE_PIECE = 256 * 1024  # bytes
LARGEST_TREE = 64 * GiB  # bytes that a client may put at once, if the disk has them
LOG_SECONDS = 0.25  # between two looks at the log of a running command


class SandboxCaller:
    """One open sandbox, as its client calls it."""

    def __init__(self, host: SandboxHost, place: HostedPlace) -> None:
        self.place = place
        self._host = host

    @property
    def sandbox(self) -> Any:
        if self.place.ended is not None:
            raise self.place.ended
        return self.place.sandbox

    def finish(self, result: Any = None) -> CallDone:
        """Return the answer of a call that succeeded."""
        return CallDone(msgspec.to_builtins(result), self.place.usage)

    def describe(self) -> CallDone:
        """Return the directories of the sandbox as an answer."""
        return self.finish((self.sandbox.workdir, self.sandbox.private))

    @staticmethod
    def acknowledge() -> CallDone:
        return CallDone(usage=SandboxUsage())

    async def perform(self, work: CallWork, stream: LinkStream) -> CallDone:
        """Carry out a call whose content and answer go through the stream."""
        return await HANDLERS[type(work)](self, work, stream)

    async def _run(self, work: RunCommand, stream: LinkStream) -> CallDone:
        command = work.command if isinstance(work.command, str) else list(work.command)
        run = partial(
            self.sandbox.run,
            command,
            env=work.env,
            timeout=work.timeout,
            user=work.user,
            workdir=work.workdir,
        )
        if not work.logged:
            return self.finish(await run())
        async with self._open_spool() as directory:
            log = directory / "log"
            return self.finish(await follow_log(log, run(log=log), stream))

    async def _read(self, work: ReadFile, stream: LinkStream) -> CallDone:
        content = await self.sandbox.read(work.path)
        for at in range(0, len(content), FILE_PIECE):
            await stream.write_record(ContentPiece(content[at : at + FILE_PIECE]))
        return self.finish()

    async def _write(self, work: WriteFile, stream: LinkStream) -> CallDone:
        content = bytearray()
        async for piece in stream.pieces():
            content += piece
            if len(content) > LARGEST_READ:
                raise ValueError(f"more than {LARGEST_READ} bytes in one file")
        await self.sandbox.write(work.path, bytes(content))
        return self.finish()

    async def _put(self, work: PutTree, stream: LinkStream) -> CallDone:
        async with self._open_spool() as directory:
            unpack_tree = partial(unpack, into=directory, largest=LARGEST_TREE, outward=True)
            await feed_thread(unpack_tree, stream, self._host.threads)
            source = directory / SINGLE if work.single else directory
            if source.is_symlink():  # it would be followed
                raise SandboxFailed("a link is no tree", kind="path", again=False)
            await self.sandbox.put(source, work.path)
        return self.finish()

    async def _take(self, work: TakeTree, stream: LinkStream) -> CallDone:
        async with self._open_spool() as directory:
            taken = directory / SINGLE
            skipped = await self.sandbox.take(work.path, taken, work.exclude)
            single = taken.is_file()

            def pack(into: IO[bytes]) -> None:
                into.write(A_FILE if single else A_DIRECTORY)
                with open_tar(into) as tar:
                    for name, found in list_tree(taken, SINGLE if single else ""):
                        add_path(tar, name, found, FileOwner())

            await self._send_from_thread(pack, stream)
        return self.finish(skipped)

    async def _renew(self, work: RenewSandbox, stream: LinkStream) -> CallDone:
        if work.start is not None and work.start.network is not None:
            self._host.permit_network(work.start.network)
        await self.sandbox.renew(work.start)
        return self.describe()

    async def _set_network(self, work: SetNetwork, stream: LinkStream) -> CallDone:
        self._host.permit_network(work.network)
        await self.sandbox.set_network(work.network)
        return self.finish()

    async def _end_processes(self, work: EndProcesses, stream: LinkStream) -> CallDone:
        return self.finish(await self.sandbox.end_processes())

    async def _mark(self, work: MarkState, stream: LinkStream) -> CallDone:
        await self.sandbox.mark()
        return self.finish()

    async def _clear_outside(self, work: ClearOutside, stream: LinkStream) -> CallDone:
        return self.finish(await self.sandbox.clear_outside())

    async def _salvage(self, work: SalvageWork, stream: LinkStream) -> CallDone:
        async with self._open_spool() as directory:
            archive = directory / "work.tar.zst"
            salvage = await self.sandbox.salvage(archive)
            if salvage is not None:

                def send(into: IO[bytes]) -> None:
                    with archive.open("rb") as file:
                        shutil.copyfileobj(file, into, FILE_PIECE)

                await self._send_from_thread(send, stream)
        return self.finish(salvage)

    async def _restore(self, work: RestoreWork, stream: LinkStream) -> CallDone:
        async with self._open_spool() as directory:
            archive = directory / "work.tar.zst"

            def save(content: IO[bytes]) -> None:
                with archive.open("wb") as file:
                    shutil.copyfileobj(content, file, FILE_PIECE)

            await feed_thread(save, stream, self._host.threads)
            await self.sandbox.restore(archive)
        return self.finish()

    async def _send_from_thread(self, work: Callable[[IO[bytes]], object], stream: LinkStream) -> None:
        """Send everything that `work` writes as pieces of the answer."""
        async with run_beside(work, "wb", self._host.threads) as (here, working):
            async for piece in read_pieces(here):
                await stream.write_record(ContentPiece(piece))
            await working

    @asynccontextmanager
    async def _open_spool(self) -> AsyncIterator[Path]:
        """Make a directory for the files of one call; it is on the disk that the server watches."""
        directory = Path(tempfile.mkdtemp(prefix=".call-", dir=self._host.spools))
        try:
            yield directory
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


CallHandler = Callable[[SandboxCaller, Any, LinkStream], Awaitable[CallDone]]

HANDLERS: dict[type[CallWork], CallHandler] = {
    RunCommand: SandboxCaller._run,
    ReadFile: SandboxCaller._read,
    WriteFile: SandboxCaller._write,
    PutTree: SandboxCaller._put,
    TakeTree: SandboxCaller._take,
    RenewSandbox: SandboxCaller._renew,
    SetNetwork: SandboxCaller._set_network,
    EndProcesses: SandboxCaller._end_processes,
    MarkState: SandboxCaller._mark,
    ClearOutside: SandboxCaller._clear_outside,
    SalvageWork: SandboxCaller._salvage,
    RestoreWork: SandboxCaller._restore,
}


async def feed_thread(work: Callable[[IO[bytes]], object], stream: LinkStream, threads: Executor) -> None:
    """Make `work` read the content of a call, in a thread."""
    async with run_beside(work, "rb", threads) as (here, working):
        async for piece in stream.pieces():
            if not await feed_piece(here, piece):
                break
        here.shutdown(socket.SHUT_WR)
        await working


def describe_error(error: Exception, place: HostedPlace | None) -> CallFailed:
    """Return the answer of a call that failed; the end of the whole sandbox comes first."""
    usage = place.usage if place is not None else SandboxUsage()
    if place is not None and place.ended is not None:
        error = place.ended
    if isinstance(error, AttemptError):
        where = FailureOrigin.INTERRUPTED if error.kind == DAEMON else error.where
        return CallFailed(
            message=clean_text(error.message),
            where=where,
            kind=error.kind,
            hint=clean_text(error.hint),
            again=error.again,
            usage=usage,
        )
    if isinstance(error, AttemptOver):
        return CallFailed(message=error.message, over=True, usage=usage)
    if isinstance(error, OSError) and error.errno in FULL:  # the client's own disk is not full
        return CallFailed(message="the disk of the sandbox server is full", kind=DISK, usage=usage)
    if isinstance(error, OSError) and error.errno:
        return CallFailed(message=str(error.strerror), errno=error.errno, usage=usage)
    if isinstance(error, MemoryError):
        return CallFailed(message="out of memory in the sandbox server", kind="memory", usage=usage)
    return CallFailed(message=clean_text(f"{type(error).__name__}: {error}"[:2000]), usage=usage)


async def follow_log(log: Path, work: Coroutine[Any, Any, T], stream: LinkStream, sent: int = 0) -> T:
    """Do the work, and send its log from the byte `sent` on while it grows; return the result."""
    running = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait({running}, timeout=LOG_SECONDS)
            with suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(sent)
                while piece := file.read(FILE_PIECE):
                    sent += len(piece)
                    await stream.write_record(ContentPiece(piece))
            if done:
                return running.result()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
