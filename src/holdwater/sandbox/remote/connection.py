"""The connection of a worker or a conductor to a sandbox server: a session, renewed when the server lost it.

Calls of all sandboxes go through it, and the model calls of agents come back through it, to this worker's
gateway. The server side is in `serve/sandboxes/`.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import secrets
import ssl
import time
from collections.abc import AsyncIterable, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    TCPConnector,
    WSCloseCode,
    WSServerHandshakeError,
)

from ...core.errors import (
    AttemptError,
    AttemptInterrupted,
    AttemptOver,
    HoldwaterError,
    ImageFailed,
    LimitReached,
    ResourceExhausted,
    RunFailed,
    SandboxFailed,
)
from ...core.failures import SERVER
from ...core.records import FailureOrigin
from ...core.sandbox_protocol import (
    CALL,
    GATEWAY_HEADER,
    GREETING,
    HEALTH_PATH,
    LINK_PATH,
    LONGEST_CALL,
    RECEIVED_HEADER,
    SESSION_HEADER,
    TUNNEL,
    AnyAnswer,
    CallDone,
    CallFailed,
    ContentPiece,
    SandboxCall,
    SandboxServerHealth,
    ServerAccess,
    ServerGreeting,
)
from ...web.link_streams import LinkStream, LinkStreams, join_socket
from ...web.message_link import HEARTBEAT, LARGEST_MESSAGE, SESSION_OVER, LinkBroken

PAUSE = 0.5  # seconds between two tries to connect
CONNECT_SECONDS = 10.0
READY_SECONDS = 60.0  # for a session to come about before a sandbox is opened
DRAINING, SESSION_GONE, UNAUTHORIZED = 503, 410, 401  # statuses of a refused link
RAISED: dict[FailureOrigin, type[AttemptError]] = {
    FailureOrigin.RESOURCE: ResourceExhausted,
    FailureOrigin.LIMIT: LimitReached,
    FailureOrigin.IMAGE: ImageFailed,
    FailureOrigin.INTERRUPTED: AttemptInterrupted,
}  # any other failure of the server is one of the sandbox: it never ends the run

TakePiece = Callable[[bytes], Awaitable[object]]


class RemoteSession:
    """A session on the server. Its sandboxes live as long as it does."""

    def __init__(self, accept: Callable[[LinkStream], None]) -> None:
        self.name = secrets.token_hex(16)
        self.streams = LinkStreams(accept, first=1)
        self.greeting: asyncio.Future[ServerGreeting] = asyncio.get_running_loop().create_future()
        self.begun = False  # the server has known it
        self.connected = False
        self.seen_at = time.monotonic()  # the end of the last connection

    async def call(
        self, call: SandboxCall, content: AsyncIterable[bytes] | None = None, take: TakePiece | None = None
    ) -> CallDone:
        """Make a call with `content` and return its answer; `take` receives the pieces before it."""
        try:
            async with self.streams.open(CALL) as stream:
                try:
                    await stream.write_record(call)
                    if content is not None:
                        async for piece in content:
                            await stream.write(piece)
                    stream.end()
                except LinkBroken:
                    if self.streams.broken:
                        raise
                return await self._read_answer(stream, call, take)
        except LinkBroken as error:
            raise AttemptInterrupted(
                f"the sandbox is lost with its server: {error.message}", kind=SERVER
            ) from None

    async def _read_answer(self, stream: LinkStream, call: SandboxCall, take: TakePiece | None) -> CallDone:
        while True:
            answer: AnyAnswer = await stream.read_record(AnyAnswer, LONGEST_CALL)
            if isinstance(answer, ContentPiece):
                if take is not None:
                    await take(answer.content)
            elif isinstance(answer, CallDone):
                return answer
            else:
                raise _make_error(answer, call)


class RemoteConnection:
    """Keeps a session open: `async with RemoteConnection(access, reaches_gateway=True) as connection`."""

    def __init__(self, access: ServerAccess, *, reaches_gateway: bool) -> None:
        self.problem = ""  # why there is no connection at present
        self.gateway: Path | None = None  # the socket of this worker's gateway
        self._access = access
        self._reaches_gateway = reaches_gateway
        self._tunnels: set[asyncio.Task[None]] = set()  # bound: the streams of the link
        self._closed = False

    async def __aenter__(self) -> Self:
        self._http = open_http(self._access)
        self._session = RemoteSession(self._accept)
        self._keeper = asyncio.ensure_future(self._keep_session())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._session.streams.end("the connection is closed")
        tasks = {self._keeper, *self._tunnels}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self._http.close()

    @property
    def connected(self) -> bool:
        return self._session.connected

    @property
    def greeting(self) -> ServerGreeting | None:
        """The server's greeting of the present session, if it has come."""
        found = self._session.greeting
        return found.result() if found.done() and not found.cancelled() else None

    async def join_session(self, seconds: float | None = READY_SECONDS) -> RemoteSession:
        """Return the present session once the server has greeted it; None: wait as long as it takes."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    session = self._session
                    await asyncio.wait({session.greeting})  # it is cancelled with a lost session
                    if not session.greeting.cancelled() and not session.streams.broken:
                        return session
        except TimeoutError:
            problem = self.problem or "it does not answer"
            raise AttemptInterrupted(f"no connection to the sandbox server: {problem}", kind=SERVER) from None

    async def _keep_session(self) -> None:
        while True:
            reason = await self._hold_session(self._session)
            self._session.streams.end(reason)
            self._session.greeting.cancel()
            self._session = RemoteSession(self._accept)

    async def _hold_session(self, session: RemoteSession) -> str:
        """Connect again and again until the session is lost; return the reason."""
        while True:
            try:
                await self._connect(session)
            except WSServerHandshakeError as error:
                if session.begun and error.status == SESSION_GONE:
                    return "it has ended the session, or was started again"
                self.problem = describe_refusal(error.status)
            except LinkBroken as error:
                return error.message
            except (ClientError, OSError, TimeoutError, TypeError, ValueError) as error:
                self.problem = describe_problem(error)
            grace = session.greeting.result().grace if session.greeting.done() else math.inf
            if time.monotonic() - session.seen_at > grace:
                return f"the connection was cut for longer than {grace:g} s: {self.problem}"
            await asyncio.sleep(PAUSE)

    async def _connect(self, session: RemoteSession) -> None:
        """Connect once and exchange messages until the connection ends."""
        link = session.streams.link
        headers = {SESSION_HEADER: session.name, GATEWAY_HEADER: "1" if self._reaches_gateway else "0"}
        if session.begun:
            headers[RECEIVED_HEADER] = str(link.received)
        socket = await self._http.ws_connect(
            self._access.url + LINK_PATH, headers=headers, heartbeat=HEARTBEAT, max_msg_size=LARGEST_MESSAGE
        )
        try:
            await link.join(socket, partial(self._on_joined, session))
            self.problem = "the connection was cut"
        finally:
            session.connected, session.seen_at = False, time.monotonic()
            await socket.close(code=SESSION_OVER if self._closed else WSCloseCode.OK)

    def _on_joined(self, session: RemoteSession) -> None:
        session.begun = session.connected = True
        self.problem = ""

    def _accept(self, stream: LinkStream) -> None:
        """Take a stream that the server opens: its greeting, or a connection of an agent to the gateway."""
        session = self._session
        work = self._greet(session, stream) if stream.purpose == GREETING else self._reach_gateway(stream)
        task = asyncio.ensure_future(work)
        self._tunnels.add(task)
        task.add_done_callback(self._tunnels.discard)

    async def _greet(self, session: RemoteSession, stream: LinkStream) -> None:
        async with stream:
            try:
                greeting: ServerGreeting = await stream.read_record(ServerGreeting, LONGEST_CALL)
            except LinkBroken as error:
                session.streams.end(error.message)
                return
            stream.end()
            if not session.greeting.done():
                session.greeting.set_result(greeting)

    async def _reach_gateway(self, stream: LinkStream) -> None:
        async with stream:
            if stream.purpose != TUNNEL or self.gateway is None:
                return
            try:
                reader, writer = await asyncio.open_unix_connection(os.fspath(self.gateway))
            except OSError:
                return  # the gateway is closing: the agent's connection is closed too
            await join_socket(stream, reader, writer)


def open_http(access: ServerAccess) -> ClientSession:
    """Return a client for the server; raise `RunFailed` for certificates that cannot be read."""
    try:
        context = ssl.create_default_context(cafile=access.ca) if access.ca else True
    except OSError as error:
        raise RunFailed(f"cannot read the certificates of `--sandbox-ca`: `{access.ca}`: {error}") from None
    return ClientSession(
        headers={"Authorization": f"Bearer {access.token}"},
        connector=TCPConnector(ssl=context),
        timeout=ClientTimeout(total=None, connect=CONNECT_SECONDS),
        trust_env=False,
    )


async def ask_health(access: ServerAccess) -> SandboxServerHealth:
    """Return the state of the server; raise `RunFailed` if it cannot be used."""
    async with open_http(access) as http:
        try:
            async with http.get(access.url + HEALTH_PATH, timeout=ClientTimeout(CONNECT_SECONDS)) as response:
                body = await response.read()
                if response.status != 200:
                    raise _make_access_error(access, describe_refusal(response.status))
            return msgspec.json.decode(body, type=SandboxServerHealth)
        except (ClientError, OSError, TimeoutError) as error:
            raise _make_access_error(access, describe_problem(error)) from None
        except msgspec.MsgspecError as error:
            raise _make_access_error(access, f"it is no sandbox server of this version: {error}") from None


def _make_access_error(access: ServerAccess, problem: str) -> HoldwaterError:
    return RunFailed(
        f"cannot use the sandbox server: `{access.url}`: {problem}",
        "`holdwater sandboxd` is such a server; see `holdwater help remote`",
        kind=SERVER,
    )


def describe_refusal(status: int) -> str:
    """Return the meaning of a status of the server."""
    return {
        UNAUTHORIZED: "it does not accept the token",
        DRAINING: "it is being stopped",
        SESSION_GONE: "it does not know the session",
        421: "it does not know this name of itself: see `--allow-host` of `holdwater sandboxd`",
    }.get(status, f"it answers with status {status}")


def describe_problem(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, ClientConnectorCertificateError):
        return f"its certificate is refused: {error.certificate_error}"
    if isinstance(error, ClientConnectorError) and error.os_error.errno:
        return f"it cannot be reached: {os.strerror(error.os_error.errno)}"
    return str(error) or type(error).__name__


def _make_error(answer: CallFailed, call: SandboxCall) -> Exception:
    """Return the error that the server reports as the error that a sandbox of this machine raises."""
    if answer.over:
        return AttemptOver(answer.message)
    if answer.errno:
        path: Any = getattr(call.work, "path", "")
        return OSError(answer.errno, os.strerror(answer.errno), path or errno.errorcode.get(answer.errno, ""))
    kind = RAISED.get(answer.where, SandboxFailed)
    return kind(answer.message, answer.hint, kind=answer.kind, again=answer.again)
