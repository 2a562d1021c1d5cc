"""Listens on the run's control socket: one line of JSON is a request, one line of JSON is its reply.

Only root and the user of the run may send requests. A client sends its next request after a reply, so that
nothing is queued for a slow one, and an idle socket costs nothing. `control.py` acts on the requests.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from ...core.control import (
    CONTROL_SOCKET,
    EVENT_PREFIX,
    LONGEST_LINE,
    REQUESTS,
    WATCH_EVENT,
    ControlReply,
    WatchRun,
    describe_sender,
)
from ...core.errors import HoldwaterError
from ...core.summary import RunSummary
from ...ledger.directory import RunDirectory, name_user
from ...ledger.ledger import Ledger
from ...ledger.reader import LedgerReader
from .control import RunControl

MOST_CLIENTS = 64  # at once
FRESH = 0.4  # seconds: all displays share a summary up to this age
SILENCE = 60.0  # seconds without a request after which a client is disconnected
CLOSING = 1.0  # seconds for clients to be disconnected at the end
_CREDENTIALS = struct.Struct("3i")  # `struct ucred`: pid, uid, gid


@asynccontextmanager
async def listen_for_control(ledger: Ledger, control: RunControl) -> AsyncIterator[None]:
    """Answer requests in this block. Without a socket the run continues, and an event says why."""
    clients = ControlClients(ledger, control)
    folder = os.open(ledger.directory.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            listener = bind_socket(folder)
        except OSError as error:  # a file system without sockets
            await ledger.note(f"{EVENT_PREFIX}closed", f"the run has no control socket: {error.strerror}")
            yield
            return
        server = await asyncio.start_unix_server(clients.serve, sock=listener, limit=LONGEST_LINE)
        try:
            yield
        finally:
            server.close()
            await clients.close()
            _remove_socket(folder)
    finally:
        os.close(folder)


def bind_socket(folder: int) -> socket.socket:
    """Return a socket in a run directory that only its user can reach; one of a dead conductor is replaced.

    The path goes through the directory's descriptor: the path of a unix socket has at most 107 bytes.
    """
    _remove_socket(folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # `bind` creates its file with this mode
        listener.bind(f"/proc/self/fd/{folder}/{CONTROL_SOCKET}")
    except BaseException:  # boundary: the socket is closed, then the error is raised again
        listener.close()
        raise
    return listener


def _remove_socket(folder: int) -> None:
    try:
        os.unlink(CONTROL_SOCKET, dir_fd=folder)
    except FileNotFoundError:
        return


class ControlClients:
    """The connected clients of one run."""

    def __init__(self, ledger: Ledger, control: RunControl) -> None:
        self._ledger = ledger
        self._control = control
        self._tasks: set[asyncio.Task[None]] = set()  # one for each client; bound: MOST_CLIENTS
        self._reading = asyncio.Lock()
        self._read_at = -FRESH
        self._summary = ControlReply()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one client until it disconnects."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._converse(reader, writer)
        except (TimeoutError, ConnectionError):
            return  # the client is gone, or silent
        except asyncio.CancelledError:
            return  # the run ends; the streams of asyncio would report the cancellation as an error
        finally:
            self._tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        """Disconnect all clients."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSING)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, uid, _ = _CREDENTIALS.unpack(
            writer.get_extra_info("socket").getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
            )
        )
        by, watches = describe_sender(name_user(uid), uid, pid), False
        while line := await self._read_line(reader, patient=watches):
            if uid not in (0, os.geteuid()):
                reply = ControlReply(
                    refused=f"another user may not control this run: {name_user(uid)}",
                    hint=f"only {name_user(os.geteuid())} and root may",
                )
            elif len(self._tasks) > MOST_CLIENTS:
                reply = ControlReply(refused=f"the run has {MOST_CLIENTS} clients", hint="end a display")
            else:
                reply, watched = await self._answer(line, by, watches=watches)
                watches |= watched
            writer.write(msgspec.json.encode(reply) + b"\n")
            await writer.drain()
            if reply.refused:
                return

    async def _read_line(self, reader: asyncio.StreamReader, *, patient: bool) -> bytes:
        """Return the next line; empty when the client has disconnected. A display may be suspended."""
        try:
            async with asyncio.timeout(None if patient else SILENCE):
                return await reader.readline()
        except ValueError:  # longer than LONGEST_LINE
            return b"\n"

    async def _answer(self, line: bytes, by: str, *, watches: bool) -> tuple[ControlReply, bool]:
        """Return the reply to a request, and whether it came from a display."""
        try:
            request = REQUESTS.decode(line)
            if not isinstance(request, WatchRun):
                return await self._control.answer(request, by), False
            if not watches:
                await self._ledger.note(WATCH_EVENT, by)
            return await self._summarize(), True
        except msgspec.MsgspecError as error:
            return ControlReply(refused=f"the request is invalid: {error}"), False
        except HoldwaterError as error:
            return ControlReply(refused=error.message, hint=error.hint), False
        except Exception as error:  # boundary: a request that fails stops no run  # noqa: BLE001
            return ControlReply(refused=f"internal error: {type(error).__name__}: {error}"), False

    async def _summarize(self) -> ControlReply:
        """Return a recent summary of the run, which all displays share."""
        async with self._reading:
            if time.monotonic() - self._read_at > FRESH:
                summary = await asyncio.to_thread(_read_summary, self._ledger.directory)
                self._summary = ControlReply(summary=summary)
                self._read_at = time.monotonic()
        return self._summary


def _read_summary(directory: RunDirectory) -> RunSummary:
    with LedgerReader(directory) as reader:
        return reader.summary()
