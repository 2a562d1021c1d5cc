"""A real worker process without its run: the test is its conductor, and hears everything that it says."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from tests.command_runner import SOURCE
from tests.wait_bounds import stretch

from holdwater.core.config import RunConfig, ServingConfig
from holdwater.core.records import Attempt, Instance
from holdwater.ledger.directory import RunDirectory
from holdwater.rollout.allocator import GLIBC_BOUNDS, choose_settings, find_jemalloc
from holdwater.rollout.worker_protocol import (
    AttemptDone,
    AttemptJob,
    EventNoted,
    MessageReader,
    ModelProvider,
    OrderTerms,
    ToConductor,
    UpstreamConfig,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerReady,
    WorkerSetup,
    encode_frame,
)

M = TypeVar("M", bound=ToConductor)
WORKER = """
import ctypes, os, sys
from holdwater.rollout import worker
from holdwater.rollout.allocator import give_back

def watched():
    os.write(int(sys.argv[3]), b".")
    give_back()

def raising():
    raise RuntimeError("it cannot be trimmed")

def missing():
    ctypes.CDLL(None).no_libc_has_this(0)

worker.main({give_back})
"""


class Worker:
    """What the conductor's end of the socket knows."""

    def __init__(self, process: subprocess.Popen[bytes], writer: asyncio.StreamWriter) -> None:
        self.pid = process.pid
        self.heard: list[ToConductor] = []
        self._writer = writer
        self._news = asyncio.Condition()
        self._attempts = 0

    def send(self, message: WorkerMessage) -> None:
        self._writer.write(encode_frame(message))

    def start(self, name: str, offer: OrderTerms | None = None) -> int:
        """Have it live an attempt at the instance `name`; the attempt's number."""
        self._attempts += 1
        payload = msgspec.msgpack.encode(Instance(id=name))
        attempt = Attempt(id=self._attempts, instance=1, sample=0, number=1)
        self.send(AttemptJob(attempt=attempt, payload=payload, offer=offer))
        return self._attempts

    async def until(self, kind: type[M], true: Callable[[M], bool], seconds: float = 30.0) -> M:
        """The first message of this kind, from now on or before, of which that is true."""
        async with asyncio.timeout(stretch(seconds)), self._news:
            await self._news.wait_for(lambda: any(true(said) for said in self.all(kind)))
        return next(said for said in self.all(kind) if true(said))

    async def done(self, attempt: int) -> AttemptDone:
        return await self.until(AttemptDone, lambda done: done.verdict.attempt == attempt)

    async def next_beat(self) -> WorkerHeartbeat:
        count = len(self.all(WorkerHeartbeat))
        async with asyncio.timeout(stretch(10)), self._news:
            await self._news.wait_for(lambda: len(self.all(WorkerHeartbeat)) > count)
        return self.all(WorkerHeartbeat)[-1]

    async def back_at(self, bytes_: int, seconds: float) -> float:
        """Wait until it is no larger than that; how many seconds that took."""
        begun = time.monotonic()
        async with asyncio.timeout(stretch(seconds)):
            while (await self.next_beat()).rss > bytes_:
                pass
        return time.monotonic() - begun

    def all(self, kind: type[M]) -> list[M]:
        return [said for said in self.heard if isinstance(said, kind)]

    def noted(self, kind: str) -> list[str]:
        return [noted.message for noted in self.all(EventNoted) if noted.kind == kind]

    @property
    def peak(self) -> int:
        """The most bytes that it had in memory, by the kernel's own count."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    async def listen(self, reader: asyncio.StreamReader) -> None:
        async for message in MessageReader[ToConductor](ToConductor).messages(reader):  # type: ignore[arg-type]
            async with self._news:
                self.heard.append(message)
                self._news.notify_all()


@asynccontextmanager
async def working(
    place: Path,
    suite: Path,
    *,
    url: str | None = None,
    allocator: str = "glibc",
    give_back: str = "watched",
    serving: ServingConfig | None = None,
) -> AsyncIterator[tuple[Worker, int]]:
    """A worker that has loaded `suite`, and the end of a pipe with a byte for each time it gave back."""
    directory = RunDirectory.create(place)
    config = RunConfig(
        id=f"{os.getpid()}-{place.name}",  # its control groups are no other process's
        suite=f"{suite}:suite",
        agent=f"{suite}:solve",
        created=0.0,
        version="0",
        model="m",
        serving=serving,
    )
    upstream = UpstreamConfig(everywhere=(ModelProvider(url=url),)) if url is not None else None
    welcome = WorkerSetup(
        config=config, directory=str(directory.path), worker=7, token=1, upstream=upstream, path=os.defpath
    )
    trims, trim = os.pipe()
    ours, theirs = socket.socketpair()
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    script = WORKER.replace("{give_back}", give_back)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(theirs.fileno()), str(os.getpid()), str(trim)],
        pass_fds=(theirs.fileno(), trim),
        env={**env, **(choose_settings(env) if allocator == "jemalloc" else GLIBC_BOUNDS)},
    )
    theirs.close()
    os.close(trim)
    os.set_blocking(trims, False)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    worker = Worker(process, writer)
    listening = asyncio.create_task(worker.listen(reader))
    try:
        worker.send(welcome)
        ready = await worker.until(WorkerReady, lambda ready: True)
        assert ready.allocator == allocator
        yield worker, trims
    finally:
        process.kill()
        process.wait()
        await listening
        writer.close()
        os.close(trims)


def trimmed(trims: int) -> int:
    """How many times since this was last asked."""
    try:
        return len(os.read(trims, 1000))
    except BlockingIOError:
        return 0


def needs(allocator: str) -> str:
    """Why a test of this allocator cannot be made here; nothing if it can."""
    return "libjemalloc is not installed" if allocator == "jemalloc" and find_jemalloc() is None else ""
