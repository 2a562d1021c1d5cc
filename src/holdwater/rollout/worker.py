"""The worker process, which hosts attempts: `python -m holdwater.rollout.worker FD PID`.

It sends a heartbeat each second, dies with its conductor, and exits on request even if its threads hang.
`run/fleet/local.py` starts it; `host.py` runs the attempts.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop

from ..core.errors import HoldwaterError
from ..core.masking import hide_values, mask_bytes
from ..core.records import MiB
from ..sandbox.kernel_protection import protect_devices
from .allocator import detect_allocator, give_back, measure_resident
from .host import AttemptHost
from .logs import route_output
from .periodic_task import PeriodicTask
from .process_health import LoopLag, allow_files
from .worker_memory import LOOK_SECONDS, GarbageCollector, GiveBack, MemoryTrimmer
from .worker_protocol import (
    AnswerHeldCall,
    AttemptJob,
    CancelAttempt,
    ChangeWorker,
    EventNoted,
    ExitWorker,
    ExtendLease,
    FetchHeldCall,
    LineLogged,
    MessageReader,
    PauseWorker,
    ScoreMembers,
    SteerWorker,
    ToConductor,
    ToWorker,
    TrimMemory,
    WorkerHeartbeat,
    WorkerReady,
    WorkerSetup,
    WorkerUnfit,
    encode_frame,
)

BEAT_SECONDS = 0.05  # when memory use has changed, for the governor; else each second
BEATS_SKIPPED = 20
DISK_EVERY = 10  # heartbeats, skipped or not
MEMORY_CHANGE = 1 * MiB  # bytes of change that cause a heartbeat
_PR_SET_PDEATHSIG = 1


def main(give_back: GiveBack | None = give_back) -> None:
    """Run the worker until the conductor ends it. `give_back` returns memory to the kernel; None: never."""
    faulthandler.enable()
    allow_files()
    _die_with(conductor=int(sys.argv[2]))
    # The conductor handles Ctrl-C and a closed terminal. Not `SIG_IGN`: sandboxes would inherit it.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    uvloop.run(_serve(connection, give_back))
    # Threads of abandoned attempts may hang for ever: do not wait for them.
    os._exit(0)


async def _serve(connection: socket.socket, give_back: GiveBack | None) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=2**20)
    inbox = MessageReader[ToWorker](ToWorker)  # type: ignore[arg-type]
    messages = inbox.messages(reader)
    welcome = await anext(messages)
    assert isinstance(welcome, WorkerSetup)
    _restore_environment(welcome.lent)
    if welcome.provided is None:
        protect_devices()  # before any thread starts: each thread has a view of its own

    def emit(message: ToConductor) -> None:
        writer.write(mask_bytes(encode_frame(message)))

    loop = asyncio.get_running_loop()

    def say(line: str) -> None:
        loop.call_soon_threadsafe(emit, LineLogged(line=line))  # called from any thread

    with hide_values(welcome.agent_env), route_output(say):
        async with AsyncExitStack() as stack:
            try:
                host = await stack.enter_async_context(AttemptHost(welcome, emit, None, None).open())
            except HoldwaterError as error:
                emit(WorkerUnfit(message=error.message, hint=error.hint, exit_status=error.exit_status))
                await writer.drain()
                return
            upkeep = WorkerUpkeep(host, emit, give_back)
            async with asyncio.TaskGroup() as group:
                emit(WorkerReady(allocator=detect_allocator()))
                async with upkeep.start(group):
                    await _handle_messages(host, messages, upkeep, group, emit)


async def _handle_messages(
    host: AttemptHost,
    messages: AsyncIterator[ToWorker],
    upkeep: WorkerUpkeep,
    group: asyncio.TaskGroup,
    emit: Callable[[ToConductor], None],
) -> None:
    """Handle the conductor's messages until `ExitWorker`."""
    async for message in messages:
        match message:
            case AttemptJob():
                host.start(message, group)
            case CancelAttempt(attempt=attempt, failure=failure):
                host.interrupt(attempt, failure)
            case ExtendLease(attempt=attempt, memory=memory):
                host.allow(attempt, memory)
            case ScoreMembers():
                host.score(message)
            case FetchHeldCall():
                host.take(message, emit)
            case AnswerHeldCall():
                host.answer(message)
            case SteerWorker() | PauseWorker() | ChangeWorker():
                await host.follow(message)
            case TrimMemory():
                upkeep.trim()
            case ExitWorker():
                return
    os._exit(0)  # the conductor is gone: no process would receive the results


class WorkerUpkeep:
    """The worker's periodic tasks beside its attempts: heartbeats, garbage collection, trimming of memory."""

    def __init__(
        self, host: AttemptHost, emit: Callable[[ToConductor], None], give_back: GiveBack | None
    ) -> None:
        self._host = host
        self._emit = emit
        self._skipped = 0
        self._reported = 0  # bytes in use at the last heartbeat
        self._collector = GarbageCollector()
        self._trimmer = MemoryTrimmer(host.traffic, self._collector.collect, give_back, self._note)
        host.on_end = self._collector.on_attempt_ended

    @asynccontextmanager
    async def start(self, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Run the periodic tasks until the block ends."""
        duties = (
            PeriodicTask("beat", BEAT_SECONDS, self._beat),
            PeriodicTask("trim", LOOK_SECONDS, self._trimmer.look),
        )
        with LoopLag(self._collector.tick) as self._lag:
            tasks = [group.create_task(duty.perform(self._note)) for duty in duties]
            yield
            for task in tasks:
                task.cancel()

    def trim(self) -> None:
        """Request a trim: memory is short."""
        self._trimmer.request_trim()

    async def _beat(self) -> None:
        """Send a heartbeat if it is due: the running attempts, the memory in use, and the loop's lag."""
        self._skipped += 1
        if self._skipped % DISK_EVERY == 0:
            self._host.check_disks()
        rss = measure_resident()
        memory = rss + self._host.memory
        if self._skipped < BEATS_SKIPPED and abs(memory - self._reported) < MEMORY_CHANGE:
            return
        self._skipped, self._reported = 0, memory
        self._host.sample_memory()
        self._host.report_endpoints()
        self._emit(WorkerHeartbeat(rss=rss, lag=self._lag.take(), living=self._host.list_living()))

    def _note(self, kind: str, message: str) -> None:
        self._emit(EventNoted(kind=kind, message=f"worker {self._host.worker}: {message}"))


def _restore_environment(lent: Mapping[str, str | None]) -> None:
    """Restore the user's environment for child processes: remove the settings of this process's allocator."""
    for name, before in lent.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _die_with(conductor: int) -> None:
    """Make the kernel kill this process when its conductor dies, even by `kill -9`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != conductor:
        os._exit(0)


if __name__ == "__main__":
    main()
