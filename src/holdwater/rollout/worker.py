"""The process that hosts attempts: `python -m holdwater.rollout.worker FD PID`, started by `run/local.py`.

It says that it is alive each second, dies with its conductor, and exits when told to, whatever hangs in it.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable

import psutil
import uvloop

from ..core.errors import HoldwaterError
from .duty import Duty
from .host import Host
from .logs import routed
from .trim import trim
from .wire import (
    Allow,
    Beat,
    Cancel,
    Inbox,
    Job,
    Leave,
    Noted,
    Ready,
    Said,
    ToConductor,
    ToWorker,
    Trim,
    Unfit,
    Welcome,
    frame,
)

BEAT_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1


def main() -> None:
    faulthandler.enable()
    _die_with(conductor=int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the conductor decides what a Ctrl-C means
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    uvloop.run(_serve(connection))
    # Threads of attempts that were given up on may hang for ever: nothing waits for them.
    os._exit(0)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=2**20)
    inbox = Inbox[ToWorker](ToWorker)  # type: ignore[arg-type]
    messages = inbox.messages(reader)
    welcome = await anext(messages)
    assert isinstance(welcome, Welcome)

    def emit(message: ToConductor) -> None:
        writer.write(frame(message))

    loop = asyncio.get_running_loop()

    def say(line: str) -> None:
        loop.call_soon_threadsafe(emit, Said(line=line))  # it may come from any thread

    with routed(say):
        try:
            host = Host(welcome, emit, None, None)
        except HoldwaterError as error:
            emit(Unfit(message=error.message, hint=error.hint, exit_status=error.exit_status))
            await writer.drain()
            return
        gc.freeze()
        async with host.opened(), asyncio.TaskGroup() as group:
            emit(Ready())
            beat = Duty("beat", BEAT_SECONDS, _beater(host, emit))
            beats = group.create_task(
                beat.perform(lambda kind, message: emit(Noted(kind=kind, message=message)))
            )
            async for message in messages:
                match message:
                    case Job():
                        host.start(message, group)
                    case Cancel(attempt=attempt, reason=reason):
                        host.interrupt(attempt, reason)
                    case Allow(attempt=attempt, memory=memory):
                        host.allow(attempt, memory)
                    case Trim():
                        trim()
                    case Leave():
                        break
            else:
                os._exit(0)  # the conductor is gone: what runs here has nobody to report to
            beats.cancel()


def _beater(host: Host, emit: Callable[[ToConductor], None]) -> Callable[[], Awaitable[None]]:
    """Says what is alive here, and how late the loop was."""
    loop = asyncio.get_running_loop()
    process = psutil.Process()
    due = loop.time() + BEAT_SECONDS

    async def beat() -> None:
        nonlocal due
        lag = max(0.0, loop.time() - due)
        due = loop.time() + BEAT_SECONDS
        host.look()
        emit(Beat(rss=process.memory_info().rss, lag=lag, living=host.living()))

    return beat


def _die_with(conductor: int) -> None:
    """Ask the kernel to kill this process when its conductor dies, by kill -9 too."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != conductor:
        os._exit(0)


if __name__ == "__main__":
    main()
