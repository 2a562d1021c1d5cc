"""Connects commands in bubblewrap to the gateway: sockets that listen in their networks.

A command waits until its socket listens; the gateway accepts connections on it itself. A helper process, one
for each worker, opens the sockets (`network_listener.py`). If this kernel or bubblewrap does not let it, each
command starts `forwarder.py` in its sandbox.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ..core.environment import build_environment
from ..core.errors import SandboxFailed
from ..core.sandbox_kind import ListenerService
from .bubblewrap import PORT

HELPER = Path(__file__).with_name("network_listener.py")
OPENING = 30.0  # seconds
ENDING = 2.0  # seconds for the helper to exit
FULL = 0.02  # seconds until a request is sent again


class GatewayListeners:
    """The sockets on which the gateway serves the commands of one worker."""

    def __init__(self) -> None:
        self.service: ListenerService | None = None
        self._refused = False
        self._helper: subprocess.Popen[bytes] | None = None
        self._near: socket.socket | None = None
        self._waiting: deque[asyncio.Future[socket.socket]] = deque()  # bound: the starting commands

    @property
    def usable(self) -> bool:
        return self.service is not None and not self._refused

    async def serve(self, process: int, attempt: int) -> Callable[[], None] | None:
        """Serve the gateway in the network of a process, given by its pidfd; return a function that ends it.

        Return None if the helper cannot enter the networks of sandboxes; they are not `usable` from then on.
        """
        assert self.service is not None, "used before there is a gateway"
        try:
            async with asyncio.timeout(OPENING):
                listener = await self._open(process)
        except TimeoutError:
            self.close()
            raise SandboxFailed("no listening socket in the sandbox in time", kind="spawn") from None
        except ProcessLookupError:
            return _end_nothing  # the command has ended, and its own result says why
        except OSError:
            self._refused = True
            return None
        try:
            return await self.service(listener, attempt)
        except BaseException:  # boundary: releases, then raises again
            listener.close()
            raise

    def close(self) -> None:
        """End the helper. Blocks for a moment."""
        if self._near is None or self._helper is None:
            return
        self._loop.remove_reader(self._near)
        self._near.close()
        self._helper.kill()
        self._helper.wait(ENDING)
        self._near = self._helper = None
        for future in self._waiting:
            if not future.done():
                future.set_exception(SandboxFailed("the helper for sockets has ended", kind="spawn"))
        self._waiting.clear()

    async def _open(self, process: int) -> socket.socket:
        await self._ask(process)
        future: asyncio.Future[socket.socket] = self._loop.create_future()
        self._waiting.append(future)  # in the order of the requests, which is that of the replies
        return await future

    async def _ask(self, process: int) -> None:
        while True:
            try:
                socket.send_fds(self._near or self._start(), [b"?"], [process])
                return
            except BlockingIOError:
                await asyncio.sleep(FULL)  # many commands start at once
            except ConnectionError:
                self.close()  # the helper was killed; the next command starts another
                raise SandboxFailed("the helper for sockets has ended", kind="spawn") from None

    def _start(self) -> socket.socket:
        self._loop = asyncio.get_running_loop()
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        python = os.path.realpath(sys.executable)
        with far:
            self._helper = subprocess.Popen(
                [python, "-I", "-S", str(HELPER), str(PORT)],
                stdin=far.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=build_environment(),
                start_new_session=True,
            )
        near.setblocking(False)
        self._loop.add_reader(near, self._take, near)
        self._near = near
        return near

    def _take(self, near: socket.socket) -> None:
        try:
            reply, descriptors, _, _ = socket.recv_fds(near, 1, 1)
        except BlockingIOError:
            return
        except OSError:
            reply, descriptors = b"", []
        if not reply:
            self.close()  # the helper was killed; the next command starts another
            return
        listener = socket.socket(fileno=descriptors[0]) if descriptors else None
        future = self._waiting.popleft()
        if future.done():  # its command has ended
            if listener is not None:
                listener.close()
        elif listener is not None:
            future.set_result(listener)
        else:
            future.set_exception(OSError(reply[0], os.strerror(reply[0])))


def _end_nothing() -> None:
    """End no service."""
