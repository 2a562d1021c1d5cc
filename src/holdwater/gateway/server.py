"""The listener: finds the session of each call by its key and refuses what has none.

It listens on a unix socket, for sandboxes, and on 127.0.0.1, for code in the worker. A call's own way is in
`relay.py`, its attempt's in `sessions.py`.
"""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from aiohttp import web

from ..core.authoring import ExchangeLog
from ..core.errors import AttemptOver, BadInput
from ..core.records import MiB
from .body import Admission
from .dialects import chat
from .incoming import Unreadable
from .recorder import Malformed
from .relay import SERVER, Relay, refusal
from .sessions import RecordFailed, Session
from .upstreams import Upstream

LONGEST_SOCKET_PATH = 107  # bytes, the kernel's limit
LONGEST_HEADER = 64 * 1024
MOST_HEADERS = 512
READ_AHEAD = (
    64 * 1024
)  # bytes of a body that are read before it is admitted: half of what a connection can hold
IDLE = 3600.0  # seconds that a connection without calls is kept
CLOSING = 1.0  # seconds that answers get to leave when the gateway closes


def _nothing(what: str) -> None:
    """What happens by default to the news of a failed clean-up."""


class Gateway:
    """One worker's listener. `async with Gateway(upstream, socket) as gateway`."""

    def __init__(
        self,
        upstream: Upstream,
        socket: Path,
        *,
        model: str | None = None,
        admitted_bytes: int = 16 * MiB,
        body_cap: int = 256 * MiB,
        on_failed_cleanup: Callable[[str], None] = _nothing,
    ) -> None:
        if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
            raise BadInput(f"the path of a socket has at most {LONGEST_SOCKET_PATH} bytes: `{socket}`")
        self.socket = socket
        self.model = model
        self.url = ""
        self.sessions: dict[str, Session] = {}  # by key; an entry lives as long as its scope
        self.relay = Relay(upstream, model, Admission(admitted_bytes), body_cap)
        self._on_failed_cleanup = on_failed_cleanup
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway-media")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._executor.shutdown, wait=False)
            server = web.Server(
                self._handle,
                handler_cancellation=True,
                access_log=None,
                keepalive_timeout=IDLE,
                max_line_size=LONGEST_HEADER,
                max_field_size=LONGEST_HEADER,
                max_headers=MOST_HEADERS,
                read_bufsize=READ_AHEAD,
                auto_decompress=False,
            )
            runner = web.ServerRunner(server, shutdown_timeout=CLOSING)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            stack.callback(self.socket.unlink, missing_ok=True)
            await web.SockSite(runner, _unix(self.socket), backlog=1024).start()
            tcp = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
            await tcp.start()
            self.url = f"http://127.0.0.1:{runner.addresses[-1][1]}/v1"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def session(self, attempt: int, log: ExchangeLog) -> AsyncIterator[Session]:
        """A place for `attempt`, whose exchanges go to `log`. Its key works in this scope and never after."""
        session = Session(attempt, log, self._executor)
        self.sessions[session.key] = session
        try:
            yield session
        finally:
            del self.sessions[session.key]
            if not await session.close():
                self._on_failed_cleanup(f"calls of attempt {attempt} did not end when it closed")

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        where = (request.method, request.path)
        if where == ("HEAD", "/"):
            return web.Response(headers=SERVER)
        session = self.sessions.get(_key(request))
        if session is None:
            return refusal(401, "no attempt is running with this key", "invalid_api_key")
        if where == ("POST", "/v1/chat/completions"):
            return await self._chat(request, session)
        if where == ("GET", "/v1/models"):
            body = chat.models_body(self.model)
            return web.Response(body=body, content_type="application/json", headers=SERVER)
        return refusal(404, f"not served here: `{request.method} {request.path[:200]}`", "not_found")

    async def _chat(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        try:
            async with session.call():
                return await self.relay.pass_on(request, session)
        except AttemptOver as error:
            return refusal(400, error.message, "attempt_over")
        except Unreadable as error:
            return refusal(error.status, str(error))
        except Malformed as error:
            return refusal(400, f"the request cannot be read: {error}")
        except RecordFailed as error:
            return refusal(500, error.message, "record")


def _key(request: web.BaseRequest) -> str:
    headers = request.headers
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _unix(path: Path) -> sockets.socket:
    """A socket that only this user can reach: it gets its mode before anyone can connect."""
    path.unlink(missing_ok=True)
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener
