"""One worker process as its supervisor sees it: start, messages, measurement, end, and what it leaves."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec
import psutil

from ...core.records import MiB, Record, Verdict
from ...core.worker_events import WorkerMeasure
from ...governor.resource_reading import AttemptUse
from ...ledger.directory import RunDirectory
from ...ledger.durable_files import is_disk_full, open_private
from ...ledger.journal import journal_path, read_journal
from ...rollout import allocator
from ...rollout.process_health import RunningClock
from ...rollout.worker_protocol import (
    AttemptJob,
    AttemptStatus,
    EventNoted,
    ExitWorker,
    MessageReader,
    ToConductor,
    WorkerHeartbeat,
    WorkerMessage,
    WorkerReady,
    WorkerSetup,
    encode_frame,
)
from ...sandbox.scratch import sweep_attempts

LEAVE_SECONDS = 5.0
# Signals that a process causes itself; any other comes from outside.
OWN_SIGNALS = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
PAGE = os.sysconf("SC_PAGE_SIZE")
# A worker's address space can always grow by this much: for its own work, and for the stacks of threads, 8
# MiB each, of which hardly any page ever becomes resident.
HEADROOM = 80 * MiB
TAIL = 400  # characters of a dead worker's log that the reason of its death quotes


class WorkerDeath(Record, frozen=True):
    """How a worker ended."""

    reason: str
    own: bool  # by its own fault: it crashed, exited or hung; not by a kill from outside


class WorkerProcess:
    """A worker from exec to clean-up."""

    def __init__(
        self, number: int, welcome: WorkerSetup, env: Mapping[str, str], clock: RunningClock
    ) -> None:
        self.number = number
        self.rss = 0
        self.initial_rss = 0  # its size when it was ready
        self.living: tuple[AttemptStatus, ...] = ()
        self._run = welcome.config.id
        self.log = Path(welcome.directory) / "logs" / f"worker-{welcome.token}-{number}.log"
        # attempt -> its share of the worker's growth, in bytes; bound: the run's concurrency
        self._shares: dict[int, int] = {}
        self._permitted = 0
        self._gone = False
        self.lag = 0.0
        self._reason: str | None = None
        self._hung = False
        self._clock = clock
        self._began = self._heard = self._stirred = clock.time()
        self._cpu = 0.0
        self._leaving: asyncio.TimerHandle | None = None
        settings = allocator.choose_settings(env)
        self._expected_allocator = allocator.name_allocator(settings)
        self._socket, theirs = socket.socketpair()
        with ExitStack() as unless_started:
            unless_started.callback(self._socket.close)
            self._process = self._exec(theirs, {**env, **settings})
            unless_started.pop_all()
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._raise_oom_score()
        self._writer: asyncio.StreamWriter | None = None
        lent = {name: env.get(name) for name in settings}
        self._welcome = msgspec.structs.replace(welcome, worker=number, lent=lent)

    def _exec(self, theirs: socket.socket, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with theirs, _open_log(self.log) as log:
            # Its own process group: the conductor handles a Ctrl-C at the terminal.
            return subprocess.Popen(
                [sys.executable, "-m", "holdwater.rollout.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                process_group=0,
                env={**env, "HOLDWATER_RUN": self._run},  # the mark by which sweeps find it
            )

    def _raise_oom_score(self) -> None:
        """Make the kernel's OOM killer choose a worker after a sandbox and before the conductor."""
        try:
            Path(f"/proc/{self.pid}/oom_score_adj").write_text("500")
        except OSError:
            return  # some kernels and containers do not permit it

    async def messages(self) -> AsyncIterator[ToConductor]:
        """Yield the worker's messages until it is gone."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket, limit=2**20)
        self.send(self._welcome)
        inbox = MessageReader[ToConductor](ToConductor)  # type: ignore[arg-type]
        async for message in inbox.messages(reader):
            yield message
            if isinstance(message, WorkerReady) and self._expected_allocator not in ("", message.allocator):
                asked = f"worker {self.number}: requested {self._expected_allocator}, has {message.allocator}"
                yield EventNoted(kind="allocator.ignored", message=asked)

    def send(self, message: WorkerMessage) -> None:
        if self._writer is not None and not self._gone:
            self._writer.write(encode_frame(message))

    def leave(self) -> None:
        """Request its exit; kill it after `LEAVE_SECONDS`."""
        if self._leaving is None and not self._gone:
            self.send(ExitWorker())
            self._leaving = asyncio.get_running_loop().call_later(LEAVE_SECONDS, self.kill)

    def kill(self, reason: str | None = None, *, hung: bool = False) -> None:
        self._reason = self._reason or reason
        self._hung = self._hung or hung
        if not self._gone:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait_for_death(self) -> WorkerDeath:
        """Wait until the process is dead; return the cause."""
        loop = asyncio.get_running_loop()
        dead = asyncio.Event()
        loop.add_reader(self._pidfd, dead.set)
        try:
            # Its socket is closed, so it is dead or about to be: a worker that stays alive is broken.
            handle = loop.call_later(LEAVE_SECONDS, self.kill)
            await dead.wait()
            handle.cancel()
        finally:
            loop.remove_reader(self._pidfd)
            self._close()
        status = self._process.wait()  # in any case, or it stays a zombie
        if self._reason is not None:
            return WorkerDeath(reason=self._reason, own=self._hung)
        return WorkerDeath(reason=self._describe_exit(status), own=status >= 0 or -status in OWN_SIGNALS)

    def record_beat(self, beat: WorkerHeartbeat) -> None:
        self._heard = self._clock.time()
        if self.initial_rss:
            self._attribute(beat)
        self.rss, self.living = beat.rss, beat.living
        self.initial_rss = self.initial_rss or beat.rss
        self.lag = beat.lag

    def host(self, job: AttemptJob) -> None:
        """Send it an attempt, and let it grow by the attempt's lease."""
        self._shares[job.attempt.id] = 0
        if job.lease:
            self._set_data_limit((self._permitted or self._read_data_size() + HEADROOM) + job.lease)
        self.send(job)

    def forget(self, attempt: int) -> None:
        self._shares.pop(attempt, None)

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        """Let it grow by the unused part of its attempts' leases, and by `room`."""
        uses = self.uses()
        unused = (leases.get(a, 0) - (uses[a].memory if a in uses else 0) for a in self._shares)
        self._set_data_limit(
            self._read_data_size() + HEADROOM + room + sum(max(0, bytes_) for bytes_ in unused)
        )

    def uses(self) -> dict[int, AttemptUse]:
        """Return the use of each attempt: its sandbox, and its share of the worker's growth."""
        return {
            status.attempt: AttemptUse(
                sandbox=status.memory,
                worker=self._shares[status.attempt],
                disk=status.disk,
                throttled=status.throttled,
                cpu=status.cpu,
            )
            for status in self.living
            if status.attempt in self._shares
        }

    @property
    def residual_memory(self) -> int:
        """Bytes of growth since it was ready that no attempt in it uses."""
        return max(0, self.rss - self.initial_rss - sum(self._shares.values()))

    def _attribute(self, beat: WorkerHeartbeat) -> None:
        """Divide growth among the living attempts; a decrease first reduces the memory of ended ones."""
        grown = beat.rss - self.rss
        if grown > 0:
            beside = {one.attempt for one in (*self.living, *beat.living)}
            for attempt in beside & self._shares.keys():
                self._shares[attempt] += grown // len(beside)
        elif (freed := -grown - self.residual_memory) > 0 and (held := sum(self._shares.values())):
            keep = max(0.0, 1 - freed / held)
            self._shares = {attempt: int(share * keep) for attempt, share in self._shares.items()}

    def _read_data_size(self) -> int:
        """Return the bytes of its address space that count against the limit."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[5]) * PAGE
        except (OSError, IndexError):
            return 0  # it is gone

    def _set_data_limit(self, data: int) -> None:
        """Limit its data size: an allocation beyond it raises `MemoryError` in the worker."""
        self._permitted = data
        try:
            resource.prlimit(self.pid, resource.RLIMIT_DATA, (data, resource.RLIM_INFINITY))
        except (OSError, ValueError):
            return  # it is gone, or the kernel has no such limit: its memory is watched anyway

    @property
    def _silence(self) -> float:
        return self._clock.time() - self._heard

    def measure(self) -> WorkerMeasure:
        """Measure its size and its signs of life: C code can hold the interpreter for long."""
        age = self._clock.time() - self._began
        try:
            process = psutil.Process(self.pid)
            times, stopped = process.cpu_times(), process.status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return WorkerMeasure(worker=self.number, rss=self.rss, age=age)
        if stopped:  # by a signal from outside: it cannot send, and its time begins when it continues
            self._heard = self._clock.time()
        cpu = times.user + times.system
        if cpu > self._cpu:
            self._cpu, self._stirred = cpu, self._clock.time()
        lives = ", ".join(f"attempt {living.attempt} in {living.phase}" for living in self.living[:5])
        return WorkerMeasure(
            worker=self.number,
            rss=self.rss,
            age=age,
            silence=self._silence,
            idle=min(self._silence, self._clock.time() - self._stirred),
            load=f"({lives})" if lives else "(no attempt)",
        )

    def locate_attempt(self, attempt: int) -> str:
        for living in self.living:
            if living.attempt == attempt:
                return f"in {living.phase} for {living.seconds + self._silence:.0f} s"
        return f"on worker {self.number}"

    def _describe_exit(self, status: int) -> str:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
        tail = self.log.read_bytes()[-TAIL:].decode("utf-8", "replace").strip() if self.log.exists() else ""
        return f"{how}: {tail}" if tail and status > 0 else how

    def _close(self) -> None:
        self._gone = True
        if self._leaving is not None:
            self._leaving.cancel()
        if self._writer is not None:
            self._writer.close()
        os.close(self._pidfd)


def _open_log(log: Path) -> IO[bytes]:
    """Open the log; on a full disk the worker starts without one, and its attempts keep theirs."""
    try:
        return open(log, "ab", opener=open_private)
    except OSError as error:
        if not is_disk_full(error):
            raise
        return Path(os.devnull).open("ab")


class WorkerRemains:
    """What dead workers leave: verdicts that they could not report, and the sandboxes of their attempts.

    Reading and sweeping run in threads.
    """

    def __init__(self, welcome: WorkerSetup, note: Callable[[str, str], None]) -> None:
        self._config = welcome.config
        self._directory = RunDirectory(Path(welcome.directory))
        self._token = welcome.token
        self._note = note
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="holdwater-sweep")

    async def read_verdicts(self, worker: int, attempts: Collection[int]) -> list[Verdict]:
        """Return these attempts' verdicts in the worker's journal. Damage is noted; intact records count."""
        path = journal_path(self._directory, worker, self._token)
        damages: list[str] = []  # bound: the records of the journal

        def read() -> list[Verdict]:
            return [verdict for verdict in read_journal(path, damages.append) if verdict.attempt in attempts]

        verdicts: list[Verdict] = []  # bound: the run's concurrency
        try:
            verdicts = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except OSError as error:
            damages.append(f"the journal `{path}` cannot be read: {error}")
        for damage in damages:
            self._note("journal.damaged", damage)
        return verdicts

    async def sweep(self, attempts: list[int]) -> None:
        """Remove the leftovers of a dead worker's attempts now: the end of the run may be days away."""
        config = self._config
        place = self._directory.sandbox_root(config)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, sweep_attempts, config.id, place, attempts)
        except OSError as error:
            self._note("sweep.failed", f"attempts {attempts}: {error}")

    def close(self) -> None:
        self._threads.shutdown(wait=False)
