"""Serves the environment protocol of `verifiers`: ZeroMQ and msgpack, as its client and prime-rl speak it.

Each request to run a task is an order of one rollout. The protocol has no keys, no groups and no resending:
`request_spool.py` makes up for the last, `protocols.py` refuses addresses that need the first.
`router_socket.py` receives and sends, `trace_episode.py` has the messages.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Generic, Self

import msgspec

from ..conversation.trace_graph import TraceGraph, build_trace_graphs
from ..conversation.trajectory import ExchangeTree
from ..core.errors import RequestRefused, RunStopped
from ..core.masking import clean_text
from ..core.records import FailureOrigin, Instance
from ..core.serving_protocol import Order, Rollout
from ..ledger.attempt_files import taken_out_path
from ..ledger.directory import RunDirectory
from ..ledger.reader import LedgerReader
from ..rollout.periodic_task import PeriodicTask
from .backend import OrderT, ServerBackend
from .protocols import ProtocolSettings
from .request_spool import RequestSpool
from .router_socket import RETRY, RouterSocket
from .trace_episode import (
    REPLY,
    CancelRequest,
    RunRequest,
    decode_request,
    encode_episode,
    encode_refusal,
    encode_reply,
    make_order,
    name_order,
)

MOST_OPEN = 2  # times the server's queue: more requests are refused, fewer wait for room in the queue
PATROL = 1.0  # seconds between two looks at the clients
HEALTHY_SECONDS = 10.0  # a health request waits so long for a worker; its client gives up earlier
MOST_WARNED = 100  # names of variables that are remembered


class PendingRun(Generic[OrderT]):
    """A request whose reply has not been sent."""

    def __init__(self, request_id: bytes, peer: bytes | None, grace: float) -> None:
        self.request_id = request_id
        self.grace = grace  # seconds until it is cancelled if its client stays away
        self.peer = peer  # None: it was sent to a server that is gone
        self.lost_at = None if peer is not None else time.monotonic()  # since when the peer is unknown
        self.ticket: OrderT | None = None
        self.cancelled = False


class VerifiersServer(Generic[OrderT]):
    """`async with VerifiersServer(backend, settings) as server` listens on `server.address`."""

    def __init__(self, backend: ServerBackend[OrderT], settings: ProtocolSettings) -> None:
        self.address = ""
        self._backend = backend
        self._settings = settings
        self._socket = RouterSocket(settings.place)
        self._spool = RequestSpool(settings.directory / "requests")
        self._runs: dict[bytes, PendingRun[OrderT]] = {}  # by request; bound: MOST_OPEN times the queue
        self._writing: dict[bytes | None, asyncio.Lock] = {}  # by client: one reply in memory; bound: clients
        self._warned: set[str] = set()  # bound: MOST_WARNED
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._socket)
            self.address = self._socket.address
            self._reader = stack.enter_context(LedgerReader(RunDirectory.open(self._settings.directory)))
            self._reading = stack.enter_context(
                ThreadPoolExecutor(1, thread_name_prefix="holdwater-episodes")
            )
            self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._working: set[asyncio.Task[None]] = set()  # bound: the open requests
            stack.callback(self._cancel_tasks)
            patrol = PeriodicTask("protocol", PATROL, self._patrol)
            self._start(patrol.perform(self._settings.note))
            self._spool.prepare()
            self._resume()
            self._start(self._receive())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def _cancel_tasks(self) -> None:
        for task in self._working:
            task.cancel()

    # Messages in.

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.receive()
            if len(frames) != 4:
                self._settings.note("protocol.invalid", f"a message of {len(frames)} frames instead of 4")
                continue
            peer, request_id, method, payload = frames
            if method == b"run" and request_id not in self._runs:
                run = self._runs[request_id] = PendingRun(request_id, peer, self._settings.grace)
                self._start(self._perform(run, payload))
            else:
                self._start(self._answer(peer, request_id, method, payload))

    async def _answer(self, peer: bytes, request_id: bytes, method: bytes, payload: bytes) -> None:
        """Answer a request that needs no rollout."""
        reply: bytes | None
        try:
            match method:
                case b"health":
                    reply = await self._confirm_health()
                case b"cancel":
                    reply = self._cancel(peer, payload)
                case b"run":
                    reply = encode_refusal("a request with this id runs already")
                case _:
                    reply = encode_refusal(f"unknown method: {method[:40]!r}")
        except Exception as error:  # boundary: fails one request, not the server  # noqa: BLE001
            reply = encode_refusal(_explain(error))
        if reply is not None:
            await self._socket.send(peer, request_id, [(REPLY, reply)])

    # Requests.

    async def _confirm_health(self) -> bytes | None:
        """Return the reply of a healthy server. A client takes silence, and nothing else, as unhealthy."""
        until = time.monotonic() + HEALTHY_SECONDS
        while not self._backend.health().ok:
            if time.monotonic() > until:
                return None
            await asyncio.sleep(RETRY)
        return encode_reply()

    def _cancel(self, peer: bytes, payload: bytes) -> bytes:
        request: CancelRequest = decode_request(payload, CancelRequest)
        run = self._runs.get(request.request_id.encode())
        if run is None or run.peer != peer:
            return encode_reply(cancelled=False)
        self._withdraw(run, "its client cancelled it")
        return encode_reply(cancelled=True)

    def _withdraw(self, run: PendingRun[OrderT], reason: str) -> None:
        run.cancelled = True
        if run.ticket is not None and not run.ticket.finished:
            self._backend.cancel(run.ticket, reason)

    async def _perform(self, run: PendingRun[OrderT], payload: bytes) -> None:
        """Run the task of a request, and reply."""
        try:
            order, key = self._admit(run, payload)
            del payload
            ticket = await self._place(order, key)
            run.ticket = ticket
            async with self._backend.follow(ticket):
                if run.cancelled:
                    self._withdraw(run, "its client cancelled it")
                seen = ticket.version
                while not ticket.finished:
                    seen = await self._backend.wait_for_change(ticket, seen)
                sent = await self._deliver(run, ticket)
            if sent:
                await self._backend.mark_delivered(ticket)
        except Exception as error:  # boundary: fails one request, not the server  # noqa: BLE001
            await self._refuse(run, _explain(error))
        self._spool.remove(run.request_id)
        del self._runs[run.request_id]

    def _admit(self, run: PendingRun[OrderT], payload: bytes) -> tuple[Order, str | None]:
        """Return the order for a request, and the key of its endpoint; the request is on disk then."""
        if len(self._runs) > MOST_OPEN * self._settings.queue:
            raise RequestRefused("busy", f"{len(self._runs)} requests are open")
        request: RunRequest = decode_request(payload, RunRequest)
        key = name_order(run.request_id.decode(errors="replace"))
        order = make_order(key, request, self._find_instance(request.task_data))
        self._spool.save(run.request_id, payload)
        return order, self._find_key(request.client.api_key_var)

    def _find_instance(self, task: dict[str, Any]) -> str | Instance:
        """Return the instance that a suite makes of a task, or the id that the task has."""
        if self._settings.make_instance is not None:
            return self._settings.make_instance(task)
        name = task.get("id") or task.get("name")
        if not isinstance(name, str) or not name:
            raise RequestRefused(
                "unknown", "neither `id` nor `name` of the task names an instance of the suite"
            )
        return name

    def _find_key(self, variable: str) -> str | None:
        key = self._settings.keys.get(variable)
        if key is None and variable not in self._warned and len(self._warned) < MOST_WARNED:
            self._warned.add(variable)
            self._settings.note(
                "protocol.key",
                f"the endpoints get no key: a client names `{clean_text(variable)[:80]}`,"
                " which `--protocol-key` does not",
            )
        return key

    async def _place(self, order: Order, key: str | None) -> OrderT:
        """Place an order, also if that has to wait for room: the protocol's clients do not try again."""
        while True:
            try:
                return await self._backend.place(order, key)
            except RequestRefused as error:
                if error.code != "busy":
                    raise
                await asyncio.sleep(error.after or RETRY)

    def _resume(self) -> None:
        """Place the orders of the requests that an earlier server has left, for clients that still wait."""
        for request_id, payload in self._spool.list_requests():
            run = self._runs[request_id] = PendingRun(request_id, None, self._settings.return_grace)
            self._start(self._perform(run, payload))

    # Replies.

    async def _deliver(self, run: PendingRun[OrderT], ticket: OrderT) -> bool:
        """Send the episode of a finished order; return whether a client has it."""
        result = await self._backend.read_result(ticket)
        rollout = result.rollouts[0]
        if rollout.outcome == FailureOrigin.CANCELLED:
            return await self._refuse(run, "Cancelled: the rollout was cancelled")
        async with self._writing.setdefault(run.peer, asyncio.Lock()):
            loop = asyncio.get_running_loop()
            messages = await loop.run_in_executor(self._reading, self._encode, run.request_id, rollout)
            return await self._reply(run, messages)

    def _encode(self, request_id: bytes, rollout: Rollout) -> list[tuple[bytes, bytes]]:
        """Read the conversations of a rollout and encode its episode; it blocks."""
        request: RunRequest = decode_request(self._spool.load(request_id), RunRequest)
        settings = self._settings
        context = {"suite": settings.suite, "agent": settings.agent, "run": str(settings.directory)}
        graphs, scores = self._read_graphs(rollout.attempt), self._read_scores(rollout.attempt)
        return list(encode_episode(request.task_data, rollout, graphs, {**context, "scores": scores}))

    def _read_scores(self, attempt: int) -> dict[str, Any]:
        """Return what the suite has kept of a graded attempt in verifiers' own form."""
        if not self._settings.scores:
            return {}
        try:
            content = (taken_out_path(self._reader.directory, attempt) / self._settings.scores).read_bytes()
        except FileNotFoundError:  # it was not graded
            return {}
        scores: dict[str, Any] = msgspec.json.decode(content)
        return scores

    def _read_graphs(self, attempt: int) -> list[TraceGraph]:
        acted = self._reader.acting_attempt(attempt) if attempt else 0
        if not acted or self._reader.find_unrecorded_policy((acted,)) is not None:
            return [TraceGraph("", [], [], [])]
        return build_trace_graphs(ExchangeTree(self._reader.directory, acted))

    async def _refuse(self, run: PendingRun[OrderT], reason: str) -> bool:
        return await self._reply(run, [(REPLY, encode_refusal(reason))])

    async def _reply(self, run: PendingRun[OrderT], messages: Sequence[tuple[bytes, bytes]]) -> bool:
        """Send the messages to the run's client; if that is unknown, to all that may be the same client.

        Each client ignores messages for requests that it does not wait for.
        """
        while True:
            if run.peer is not None and await self._socket.send(run.peer, run.request_id, messages):
                return True
            lost_at = run.lost_at = run.lost_at or time.monotonic()
            self._socket.peers.refresh(scan=True)
            sent = [
                await self._socket.send(peer, run.request_id, messages)
                for peer in self._socket.peers.list_since(lost_at - PATROL)
            ]
            if any(sent):
                return True
            if run.cancelled or time.monotonic() > lost_at + run.grace:
                return False
            await asyncio.sleep(PATROL / 4)

    # Clients that are gone.

    async def _patrol(self) -> None:
        """Cancel the runs of clients that are gone and have not come back."""
        now, peers = time.monotonic(), self._socket.peers
        peers.refresh(scan=any(run.lost_at is not None for run in self._runs.values()))
        for peer, lock in list(self._writing.items()):
            if not lock.locked() and (peer is None or not peers.holds(peer)):
                del self._writing[peer]
        for run in self._runs.values():
            if run.peer is not None and not peers.holds(run.peer):
                run.peer, run.lost_at = None, now
            if run.lost_at is None or now < run.lost_at + run.grace or run.cancelled:
                continue
            if not peers.list_since(run.lost_at - PATROL):  # a client that reconnects is a new one
                self._withdraw(run, "its client is gone")


def _explain(error: Exception) -> str:
    """Return a problem as the client's exception shows it."""
    if isinstance(error, RequestRefused | RunStopped):
        code = error.code if isinstance(error, RequestRefused) else "broken"
        hint = f"; {error.hint}" if error.hint else ""
        return f"{code}: {error.message}{hint}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return clean_text(f"internal: {type(error).__name__}: {error} ({where})")[:2000]
