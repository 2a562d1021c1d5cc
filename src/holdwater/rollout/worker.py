"""The process that hosts attempts: `python -m holdwater.rollout.worker FD PID`, started by `run/local.py`.

It says that it is alive each second, dies with its conductor, and exits when told to, whatever hangs in it.
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
from ..core.records import MiB
from ..sandbox.kernel_files import protect_devices
from .allocator import give_back, in_force, resident
from .collect import Collector
from .duty import Duty
from .host import Host
from .lag import Lag
from .logs import routed
from .open_files import allow_files
from .trim import LOOK_SECONDS, GiveBack, Trimmer
from .wire import (
    Allow,
    Answered,
    Beat,
    Cancel,
    Inbox,
    Job,
    Leave,
    Noted,
    Ready,
    Said,
    Score,
    Steered,
    Take,
    ToConductor,
    ToWorker,
    Trim,
    Unfit,
    Welcome,
    frame,
)

BEAT_SECONDS = 0.05  # when there is news for the governor; else each second
BEATS_SKIPPED = 20
DISK_EVERY = 10  # beats, skipped or not
NEWS = 1 * MiB  # by which the use of memory has changed
_PR_SET_PDEATHSIG = 1


def main(give_back: GiveBack | None = give_back) -> None:
    """Serve the conductor at the other end. `give_back`: how memory is given back; None: not at all."""
    faulthandler.enable()
    allow_files()
    _die_with(conductor=int(sys.argv[2]))
    # The conductor answers a Ctrl-C and a closed terminal. Not `SIG_IGN`: sandboxes would inherit that.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    uvloop.run(_serve(connection, give_back))
    # Threads of attempts that were given up on may hang for ever: nothing waits for them.
    os._exit(0)


async def _serve(connection: socket.socket, give_back: GiveBack | None) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=2**20)
    inbox = Inbox[ToWorker](ToWorker)  # type: ignore[arg-type]
    messages = inbox.messages(reader)
    welcome = await anext(messages)
    assert isinstance(welcome, Welcome)
    _return(welcome.lent)
    if welcome.containers is None:
        protect_devices()  # before there is a thread: each has a view of its own

    def emit(message: ToConductor) -> None:
        writer.write(frame(message))

    loop = asyncio.get_running_loop()

    def say(line: str) -> None:
        loop.call_soon_threadsafe(emit, Said(line=line))  # it may come from any thread

    with routed(say):
        async with AsyncExitStack() as stack:
            try:
                host = await stack.enter_async_context(Host(welcome, emit, None, None).opened())
            except HoldwaterError as error:
                emit(Unfit(message=error.message, hint=error.hint, exit_status=error.exit_status))
                await writer.drain()
                return
            upkeep = Upkeep(host, emit, give_back)
            async with asyncio.TaskGroup() as group:
                emit(Ready(allocator=in_force()))
                async with upkeep.kept(group):
                    await _attend(host, messages, upkeep, group, emit)


async def _attend(
    host: Host,
    messages: AsyncIterator[ToWorker],
    upkeep: Upkeep,
    group: asyncio.TaskGroup,
    emit: Callable[[ToConductor], None],
) -> None:
    """Do what the conductor says, until it says that this is all."""
    async for message in messages:
        match message:
            case Job():
                host.start(message, group)
            case Cancel(attempt=attempt, failure=failure):
                host.interrupt(attempt, failure)
            case Allow(attempt=attempt, memory=memory):
                host.allow(attempt, memory)
            case Score():
                host.score(message)
            case Take():
                host.take(message, emit)
            case Answered():
                host.answer(message)
            case Steered():
                await host.steer(message)
            case Trim():
                upkeep.trim()
            case Leave():
                return
    os._exit(0)  # the conductor is gone: what runs here has nobody to report to


class Upkeep:
    """What goes on beside the attempts: beats, and a worker that does not keep what it does not use."""

    def __init__(self, host: Host, emit: Callable[[ToConductor], None], give_back: GiveBack | None) -> None:
        self._host = host
        self._emit = emit
        self._skipped = 0
        self._told = 0  # bytes in use at the last beat
        self._collector = Collector()
        self._trimmer = Trimmer(host.traffic, self._collector.collect, give_back, self._note)
        host.on_end = self._collector.ended

    @asynccontextmanager
    async def kept(self, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        """Until the end of this block."""
        duties = (
            Duty("beat", BEAT_SECONDS, self._beat),
            Duty("trim", LOOK_SECONDS, self._trimmer.look),
        )
        with Lag(self._collector.tick) as self._lag:
            tasks = [group.create_task(duty.perform(self._note)) for duty in duties]
            yield
            for task in tasks:
                task.cancel()

    def trim(self) -> None:
        """Memory is short."""
        self._trimmer.ask()

    async def _beat(self) -> None:
        """Say what is alive here, and how late the loop was."""
        self._skipped += 1
        if self._skipped % DISK_EVERY == 0:
            self._host.look()
        rss = resident()
        memory = rss + self._host.memory
        if self._skipped < BEATS_SKIPPED and abs(memory - self._told) < NEWS:
            return
        self._skipped, self._told = 0, memory
        self._emit(Beat(rss=rss, lag=self._lag.take(), living=self._host.living()))

    def _note(self, kind: str, message: str) -> None:
        self._emit(Noted(kind=kind, message=f"worker {self._host.worker}: {message}"))


def _return(lent: Mapping[str, str | None]) -> None:
    """What this process starts gets the environment that the user has, without what its allocator needed."""
    for name, before in lent.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _die_with(conductor: int) -> None:
    """Ask the kernel to kill this process when its conductor dies, by kill -9 too."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != conductor:
        os._exit(0)


if __name__ == "__main__":
    main()
