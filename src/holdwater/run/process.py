"""One worker process, as its supervisor sees it: how it is started, spoken to, measured and ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import IO

import msgspec
import psutil

from ..core.records import Attempt
from ..ledger.disk import no_space
from ..rollout.wire import Beat, Inbox, Leave, Living, Message, ToConductor, Welcome, frame

LEAVE_SECONDS = 5.0
TAIL = 400  # characters of a dead worker's log that its obituary quotes

# glibc keeps freed memory in up to 8 arenas a core and never gives it back by default.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "1048576",  # above what a socket reads at once, or each read faults in pages
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}


class WorkerProcess:
    """A worker from exec to burial."""

    def __init__(self, number: int, welcome: Welcome, env: Mapping[str, str], *, solo: bool) -> None:
        self.number = number
        self.solo = solo
        self.ready = False
        self.draining = False
        self.replaced = True  # by another, when it began to drain
        self.gone = False
        self.attempts: dict[int, Attempt] = {}  # bound: the run's concurrency
        self.hosted = 0
        self.rss = 0
        self._first = 0  # its size when it was ready
        self.living: tuple[Living, ...] = ()
        self.log = Path(welcome.directory) / "logs" / f"worker-{welcome.token}-{number}.log"
        self._lag = 0.0
        self._reason: str | None = None
        self._heard = self._stirred = time.monotonic()
        self._cpu = 0.0
        self._leaving: asyncio.TimerHandle | None = None
        ours, theirs = socket.socketpair()
        with theirs, _opened(self.log) as log:
            # A group of its own: a Ctrl-C at the terminal is the conductor's to hear.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdwater.rollout.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env={
                    **env,
                    **ALLOCATOR,
                    "HOLDWATER_RUN": welcome.config.id,
                },  # the mark that a sweep looks for
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._socket = ours
        self._writer: asyncio.StreamWriter | None = None
        self._welcome = welcome

    async def messages(self) -> AsyncIterator[ToConductor]:
        """What the worker says, until it is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=2**20)
        self.send(msgspec.structs.replace(self._welcome, worker=self.number))
        inbox = Inbox[ToConductor](ToConductor)  # type: ignore[arg-type]
        async for message in inbox.messages(reader):
            yield message

    def send(self, message: Message) -> None:
        if self._writer is not None and not self.gone:
            self._writer.write(frame(message))

    def leave(self) -> None:
        """Ask it to exit; what still hangs in it after a while is killed."""
        if self._leaving is None and not self.gone:
            self.send(Leave())
            self._leaving = asyncio.get_running_loop().call_later(LEAVE_SECONDS, self.kill)

    def kill(self, reason: str | None = None) -> None:
        self._reason = self._reason or reason
        if not self.gone:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def buried(self) -> str:
        """Wait until the process is dead; what it died of."""
        loop = asyncio.get_running_loop()
        dead = asyncio.Event()
        loop.add_reader(self._pidfd, dead.set)
        try:
            # Its socket is closed, so it is dead or about to be: a worker that lives on has lost its mind.
            handle = loop.call_later(LEAVE_SECONDS, self.kill)
            await dead.wait()
            handle.cancel()
        finally:
            loop.remove_reader(self._pidfd)
            self._close()
        return self._reason or self._obituary(self._process.wait())

    def heard(self, beat: Beat) -> None:
        self._heard = time.monotonic()
        self.rss, self.living = beat.rss, beat.living
        self._first = self._first or beat.rss
        self._lag = max(self._lag, beat.lag)

    @property
    def grown(self) -> int:
        """Bytes by which it is larger than when it began."""
        return max(0, self.rss - self._first)

    def uses(self) -> dict[int, int]:
        """What each of its attempts uses: its sandbox, and its share of what the worker has grown by."""
        share = self.grown // len(self.living) if self.living else 0
        return {living.attempt: living.memory + share for living in self.living}

    def take_lag(self) -> float:
        """The longest lag since this was last asked."""
        lag, self._lag = self._lag, 0.0
        return lag

    @property
    def silence(self) -> float:
        return time.monotonic() - self._heard

    def silent(self, bound: float, busy_bound: float) -> bool:
        """Whether it has neither beaten nor computed for `bound` seconds, or not beaten for `busy_bound`.

        C code can hold the interpreter for long, and so can the start-up.
        """
        if self.gone:
            return False
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return False
        cpu = times.user + times.system
        if cpu > self._cpu:
            self._cpu, self._stirred = cpu, time.monotonic()
        idle = min(self.silence, time.monotonic() - self._stirred)
        return self.silence > busy_bound or (self.ready and idle > bound)

    def whereabouts(self, attempt: int) -> str:
        for living in self.living:
            if living.attempt == attempt:
                return f"in {living.phase} for {living.seconds + self.silence:.0f} s"
        return f"on worker {self.number}"

    def busy_with(self) -> str:
        lives = ", ".join(f"attempt {living.attempt} in {living.phase}" for living in self.living[:5])
        return f"({lives})" if lives else "(no attempt)"

    def _obituary(self, status: int) -> str:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        tail = self.log.read_bytes()[-TAIL:].decode("utf-8", "replace").strip() if self.log.exists() else ""
        return f"{how}: {tail}" if tail and status > 0 else how

    def _close(self) -> None:
        self.gone = True
        if self._leaving is not None:
            self._leaving.cancel()
        if self._writer is not None:
            self._writer.close()
        os.close(self._pidfd)


def _opened(log: Path) -> IO[bytes]:
    """A worker that is needed on a full disk starts without its log: its attempts keep theirs."""
    try:
        return log.open("ab")
    except OSError as error:
        if not no_space(error):
            raise
        return Path(os.devnull).open("ab")
