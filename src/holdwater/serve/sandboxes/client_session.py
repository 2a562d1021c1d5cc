"""A client of a sandbox server: the places and sandboxes that it has, and the way back to its gateway.

A conductor holds places, its workers open the sandboxes in them. Everything that a session has ends with it.
`call_handlers.py` carries out the calls.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...core.errors import AttemptInterrupted, RunFailed, SandboxFailed
from ...core.failures import SERVER
from ...core.records import Network
from ...core.sandbox_kind import CONTAINER_PORTS
from ...core.sandbox_protocol import (
    CALL,
    GREETING,
    LONGEST_CALL,
    TUNNEL,
    CallDone,
    CallFailed,
    CallWork,
    CloseSandbox,
    EndGroup,
    FindContext,
    HoldPlace,
    OpenSandbox,
    PutContext,
    ReleasePlace,
    SandboxCall,
    ServerGreeting,
)
from ...image.docker.image_store import name_build_log
from ...version import __version__
from ...web.link_streams import LinkStream, LinkStreams, join_socket
from ...web.message_link import LinkBroken
from .build_contexts import BuildContexts
from .call_handlers import SandboxCaller, describe_error, follow_log
from .group_leases import GroupLeases
from .sandbox_host import HostedPlace, SandboxHost

BACKLOG = 128
CLOSED = "the sandbox server has no such sandbox"
HOLDER_GONE = "the sandbox server has lost the connection to the run's conductor"

MANAGED = HoldPlace | ReleasePlace | EndGroup | FindContext | PutContext | OpenSandbox | CloseSandbox

PlaceKey = tuple[str, int]  # run and attempt
GroupKey = tuple[str, int]  # run and group


class PlaceBook:
    """The places of all sessions, by run and attempt."""

    def __init__(self, host: SandboxHost) -> None:
        self.host = host
        self.draining = False
        self.on_empty: Callable[[], None] = lambda: None
        self._places: dict[PlaceKey, HostedPlace] = {}  # bound: the memory of this machine

    def find(self, key: PlaceKey) -> HostedPlace | None:
        return self._places.get(key)

    async def hold(self, key: PlaceKey, request: HoldPlace, group: GroupLeases | None) -> HostedPlace:
        """Wait for a place; a place of the same attempt ends first."""
        if self.draining:
            raise AttemptInterrupted("the sandbox server is being stopped", kind="draining")
        if (old := self._places.get(key)) is not None:
            await self.end(key, old)
        place = await self.host.hold(request, group)
        self._places[key] = place
        return place

    async def end(self, key: PlaceKey, place: HostedPlace) -> None:
        """End a place and its sandbox."""
        if self._places.get(key) is place:
            del self._places[key]
        await self.host.end(place)
        if not self._places:
            self.on_empty()

    def __len__(self) -> int:
        return len(self._places)


class ClientSession:
    """One client's session; `open` around its life."""

    def __init__(self, name: str, book: PlaceBook, directory: Path, grace: float) -> None:
        self.name = name
        self.streams = LinkStreams(self._accept, first=2)
        self._book = book
        self._directory = directory
        self._grace = grace
        self._gateway: Path | None = None
        self._held: dict[PlaceKey, HostedPlace] = {}  # bound: the memory of this machine, as for the next
        self._opened: dict[PlaceKey, HostedPlace] = {}
        self._groups: dict[GroupKey, GroupLeases] = {}
        self._contexts = BuildContexts(book.host)
        self._tasks: set[asyncio.Task[None]] = set()  # bound: the streams of the link

    @asynccontextmanager
    async def open(self, *, reaches_gateway: bool) -> AsyncIterator[ClientSession]:
        """Greet the client, and take its calls until the block ends."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end)
            gateways = await self._open_gateway(stack) if reaches_gateway else {}
            greeting = ServerGreeting(version=__version__, grace=self._grace, gateways=gateways)
            self._start(self._greet(greeting))
            yield self

    async def hold(self, key: PlaceKey, request: HoldPlace) -> HostedPlace:
        group = None if request.group is None else self._find_group((key[0], request.group))
        place = self._held[key] = await self._book.hold(key, request, group)
        return place

    async def release(self, key: PlaceKey) -> None:
        if (place := self._held.pop(key, None)) is not None:
            await self._book.end(key, place)

    def end_group(self, key: GroupKey) -> None:
        if (group := self._groups.pop(key, None)) is not None:
            group.close()

    def _find_group(self, key: GroupKey) -> GroupLeases:
        if key not in self._groups:
            self._groups[key] = self._book.host.open_group()
        return self._groups[key]

    async def open_sandbox(self, key: PlaceKey, work: OpenSandbox) -> SandboxCaller:
        """Open the sandbox of the attempt's place; without one, wait for a place that ends with it."""
        place = self._book.find(key)
        if place is None:
            place = await self.hold(key, HoldPlace(id="", start=work.start, limits=work.limits))
        if place.sandbox is not None:
            raise SandboxFailed("the sandbox of this attempt is open already", kind="start", again=False)
        self._opened[key] = place
        await self._book.host.open_sandbox(place, work.start, work.limits, self._gateway)
        return SandboxCaller(self._book.host, place)

    def find_sandbox(self, key: PlaceKey) -> SandboxCaller:
        """Return the open sandbox of an attempt; raise if this session has none."""
        place = self._opened.get(key)
        if place is None or place.sandbox is None:
            raise AttemptInterrupted(CLOSED, kind=SERVER)
        return SandboxCaller(self._book.host, place)

    async def close_sandbox(self, key: PlaceKey) -> HostedPlace | None:
        """Close a sandbox; its place stays if a conductor holds it."""
        place = self._opened.pop(key, None)
        if place is not None:
            await place.stack.aclose()
            if key in self._held:
                await self.release(key)
        return place

    def _accept(self, stream: LinkStream) -> None:
        if stream.purpose == CALL:
            task = self._start(self._answer(stream))
            stream.on_reset = partial(_cancel, task)
        else:
            stream.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._book.host.note("session.failed", f"{type(error).__name__}: {error}")

    async def _greet(self, greeting: ServerGreeting) -> None:
        try:
            async with self.streams.open(GREETING) as stream:
                await stream.write_record(greeting)
                stream.end()
                await stream.read()
        except LinkBroken:
            return  # the session is over

    async def _answer(self, stream: LinkStream) -> None:
        """Carry out a call and answer it; every error becomes the answer of this call."""
        async with stream:
            caller: SandboxCaller | None = None
            try:
                call: SandboxCall = await stream.read_record(SandboxCall, LONGEST_CALL)
                key = (call.run, call.attempt)
                if isinstance(call.work, MANAGED):
                    answer: CallDone | CallFailed = await self._manage(key, call.work, stream)
                else:
                    caller = self.find_sandbox(key)
                    answer = await caller.perform(call.work, stream)
            except LinkBroken:
                return
            except Exception as error:  # boundary: fails one call, not the server  # noqa: BLE001
                answer = describe_error(error, caller.place if caller is not None else None)
            try:
                await stream.write_record(answer)
                stream.end()
                while await stream.read():
                    pass  # the rest of a body that was not needed
            except LinkBroken:
                return

    async def _manage(self, key: PlaceKey, work: CallWork, stream: LinkStream) -> CallDone:
        """Open or close a sandbox, hold or release its place, or keep what it needs."""
        match work:
            case HoldPlace():
                return await self._hold_place(key, work, stream)
            case FindContext():
                return CallDone(self._contexts.find(work.digest))
            case PutContext():
                await self._contexts.put(work.digest, stream)
            case OpenSandbox():
                try:
                    return (await self.open_sandbox(key, work)).describe()
                except BaseException:  # boundary: no sandbox stays behind; the error is raised again
                    await self.close_sandbox(key)
                    raise
            case CloseSandbox():
                closed = await self.close_sandbox(key)
                if closed is None:
                    raise AttemptInterrupted(CLOSED, kind=SERVER)
                return SandboxCaller(self._book.host, closed).finish()
            case EndGroup():
                self.end_group((key[0], work.group))
            case _:
                await self.release(key)
        return SandboxCaller.acknowledge()

    async def _hold_place(self, key: PlaceKey, work: HoldPlace, stream: LinkStream) -> CallDone:
        """Hold a place; return its images by the keys of the client. The output of a build goes to it."""
        located = self._contexts.locate(work)
        if work.start.build is None:
            place = await self.hold(key, located)
        else:
            log = self._book.host.logs / name_build_log(work.start.build)
            begun = log.stat().st_size if log.exists() else 0
            place = await follow_log(log, self.hold(key, located), stream, begun)
        pairs = [(work.start, located.start)]
        pairs += [(work.grader, located.grader)] if work.grader and located.grader else []
        images = {near.key: place.images[here.key] for near, here in pairs if here.key in place.images}
        return SandboxCaller(self._book.host, place).finish(images)

    async def _open_gateway(self, stack: AsyncExitStack) -> dict[str, str]:
        """Listen for the agents' model calls; return the gateway's URL by the network of the sandbox."""
        provider = self._book.host.provider
        if address := self._book.host.gateway_address:
            listener = _listen_for_containers(address)
            port = listener.getsockname()[1]
            await self._listen(stack, listener)
            return dict.fromkeys((Network.GATEWAY, Network.OPEN), f"http://{address}:{port}/v1")
        self._gateway = self._directory / "gateway"
        self._directory.mkdir(mode=0o700)
        stack.callback(self._directory.rmdir)
        stack.callback(self._gateway.unlink, missing_ok=True)
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        near.bind(str(self._gateway))
        self._gateway.chmod(0o600)
        await self._listen(stack, near)
        local = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        await self._listen(stack, local)
        url = f"http://127.0.0.1:{local.getsockname()[1]}/v1"
        return {network: provider.gateway_url(url, network) for network in (Network.GATEWAY, Network.OPEN)}

    async def _listen(self, stack: AsyncExitStack, listener: socket.socket) -> None:
        listener.listen(BACKLOG)
        if listener.family == socket.AF_UNIX:
            server = await asyncio.start_unix_server(self._tunnel, sock=listener)
        else:
            server = await asyncio.start_server(self._tunnel, sock=listener)
        stack.callback(server.close)

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection of an agent to the gateway of its worker."""
        try:
            stream = self.streams.open(TUNNEL)
        except LinkBroken:
            writer.close()
            return
        await join_socket(stream, reader, writer)

    async def _end(self) -> None:
        """End the calls, the sandboxes and the places."""
        self.streams.end("the session is over")
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for place in self._held.values():  # a sandbox in it may be of another session, which goes on
            place.ended = place.ended or AttemptInterrupted(HOLDER_GONE, kind=SERVER)
        await asyncio.gather(*(self.close_sandbox(key) for key in list(self._opened)))
        await asyncio.gather(*(self.release(key) for key in list(self._held)))
        for group in list(self._groups):
            self.end_group(group)
        await self._contexts.close()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _listen_for_containers(address: str) -> socket.socket:
    """Listen on one of our ports on the container network: the firewall there allows these."""
    for port in CONTAINER_PORTS:
        try:
            return socket.create_server((address, port), backlog=BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise RunFailed(f"cannot listen for containers: `{address}`: {error.strerror}") from error
    raise RunFailed(f"no free port for containers: `{address}`", kind="gateway")
