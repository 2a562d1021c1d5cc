"""The load of the gateway benchmark: requests of agents, contenders, and the cost of a round of calls.

Every contender gets the same bytes from the same client. `raw_http.py` has the client and the upstream,
`gateway_proxies.py` the proxies; `gateway_rate.py` selects the figures.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from content import text
from gateway_proxies import Listening
from launch import HERE, MODEL
from raw_http import Connection, request_head

from holdwater.rollout.allocator import choose_settings

MESSAGE = 4_000  # bytes of a message in a long history
SAID = 400  # bytes that each turn adds
SHORT = 4  # turns of a short conversation, from its first to its last
CHAT_PATH, MESSAGES_PATH = "/v1/chat/completions", "/v1/messages"  # the same bodies fit both
PATIENCE = 60.0  # seconds for a proxy to listen, and to end


class Workload(NamedTuple):
    """The requests of a round, and how many there are."""

    name: str
    size: int  # approximate bytes of a request
    alone: int  # sequential calls: latency
    at_once: int  # connections that then call concurrently: CPU and memory
    each: int  # calls per connection
    rounds: int = 1
    stream: bool = False
    said: int = SAID  # bytes that each turn adds; the model adds half as many


class Memory(NamedTuple):
    """Resident bytes: now, and the maximum since `forget`."""

    now: int
    peak: int


class Contender:
    """A server under test: the upstream itself, or a proxy in front of it."""

    def __init__(
        self, name: str, listening: Listening, pid: int | None, share: int = 1, path: str = CHAT_PATH
    ) -> None:
        self.name = name
        self.path = path
        self.keys = listening.keys
        self.port = listening.port
        self.share = share  # it gets one of this many calls
        self._pid = pid

    def cpu(self) -> float:
        """Return the user and system time so far; 0 for the upstream, which is not a proxy."""
        if self._pid is None:
            return 0.0
        return sum(_cpu(pid) for pid in self._pids())

    def memory(self) -> Memory:
        if self._pid is None:
            return Memory(0, 0)
        read = [_status(pid) for pid in self._pids()]
        return Memory(sum(now for now, _ in read), sum(peak for _, peak in read))

    def forget(self) -> None:
        """Reset the peak."""
        for pid in self._pids() if self._pid is not None else ():
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def _pids(self) -> list[int]:
        assert self._pid is not None
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        return [self._pid, *map(int, children)]


class Round(NamedTuple):
    """The figures of one round of calls."""

    latencies: list[float]  # seconds, of sequential calls
    cpu: float  # seconds of the proxy per call
    rate: float  # calls per second


class Talk:
    """One agent's side of a conversation. A short one restarts every few turns; a long one only grows."""

    def __init__(self, name: str, workload: Workload) -> None:
        self._seeds = (f"{name}/{number}" for number in itertools.count())
        self._stream = workload.stream
        self._more = workload.said
        self._size = workload.size
        self._short = workload.size < 2 * MESSAGE
        self._turns = 0
        self._history = b""

    def body(self) -> bytes:
        """Return the next request."""
        if self._turns % SHORT == 0 if self._short else not self._history:
            self._history = self._beginning()
        else:
            replied = _message("assistant", _WORDS[: self._more // 2])
            self._history += b"," + replied + b"," + self._said(self._more)
        self._turns += 1
        opening = b'{"model":"%s","max_tokens":1024,"stream":%s,"messages":[' % (
            MODEL.encode(),
            b"true" if self._stream else b"false",
        )
        return b"".join((opening, self._history, b"]}"))

    def _beginning(self) -> bytes:
        if self._short:
            return self._said(max(1, self._size - (SHORT - 1) * (self._more * 3 // 2 + 100) // 2))
        return b",".join(_long_history(self._size))

    def _said(self, size: int) -> bytes:
        return _message("user", f"{next(self._seeds)} {_WORDS[:size]}")


class Caller:
    """The client's connections to one contender, each with its own conversation and key."""

    def __init__(self, contender: Contender, workload: Workload) -> None:
        self.contender = contender
        self.workload = workload
        self._connections: list[Connection] = []  # bound: the workload's connections
        self._talks = [Talk(f"{contender.name}/{n}", workload) for n in range(workload.at_once)]

    async def open(self) -> None:
        """Connect, and send every conversation once, so that a recording contender knows it."""
        for _ in self._talks:
            self._connections.append(await self._connected())
        await self._all(1)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    async def round(self) -> Round:
        share = self.contender.share
        alone = max(1, self.workload.alone // share) if self.workload.alone else 0
        latencies = [await self._call(0) for _ in range(alone)]
        each = max(1, self.workload.each // share)
        before, begun = self.contender.cpu(), time.perf_counter()
        await self._all(each)
        seconds = time.perf_counter() - begun
        calls = each * len(self._talks)
        return Round(latencies, (self.contender.cpu() - before) / calls, calls / seconds)

    async def _all(self, each: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._talks)):
                group.create_task(self._calls(number, each))

    async def _calls(self, number: int, count: int) -> None:
        for _ in range(count):
            await self._call(number)

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self.contender.port)
        return connection

    async def _call(self, number: int) -> float:
        if self._connections[number].closed:
            self._connections[number] = await self._connected()
        keys = self.contender.keys
        body = self._talks[number].body()
        head = request_head(self.contender.path, keys[number % len(keys)], len(body))
        begun = time.perf_counter()
        await self._connections[number].call(head, body)
        return time.perf_counter() - begun


class Figures(NamedTuple):
    """The figures of all rounds of a contender and a workload."""

    rounds: list[Round]
    before: int
    memory: Memory

    @property
    def cpu(self) -> float:
        return median(each.cpu for each in self.rounds)

    def quantile(self, share: float) -> float:
        ordered = sorted(latency for each in self.rounds for latency in each.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def compared(contenders: Sequence[Contender], workload: Workload, rounds: int) -> dict[str, Figures]:
    """Run rounds of all contenders in alternation, so that other load on the machine affects all of them."""
    callers = [Caller(contender, workload) for contender in contenders]
    seen: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    before = {}
    for caller in callers:
        caller.contender.forget()
        before[caller.contender.name] = caller.contender.memory().now
        await caller.open()
    for _ in range(rounds):
        for caller in callers:
            seen[caller.contender.name].append(await caller.round())
    for caller in callers:
        caller.close()
    return {c.name: Figures(seen[c.name], before[c.name], c.memory()) for c in contenders}


@contextmanager
def started(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[tuple[bytes, int]]:
    """Run a script of this directory in its own process; yield its first line and its process id."""
    with subprocess.Popen(
        [sys.executable, str(HERE / command[0]), *command[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(env or {})},
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            yield process.stdout.readline(), process.pid
        finally:
            process.stdin.close()
            process.wait(PATIENCE)


@contextmanager
def upstream() -> Iterator[int]:
    """Run the upstream; yield its port."""
    with started(["raw_http.py"]) as (line, _):
        yield int(line)


@contextmanager
def bare(port: int) -> Iterator[Contender]:
    with started(["gateway_proxies.py", "bare", str(port)]) as (line, pid):
        yield Contender("bare aiohttp", msgspec.json.decode(line, type=Listening), pid)


@contextmanager
def ours(
    port: int, sessions: int, directory: Path, name: str = "holdwater", path: str = CHAT_PATH
) -> Iterator[Contender]:
    """Run our gateway with a worker's allocator settings; calls on another `path` are translated."""
    kind = "ours" if path == CHAT_PATH else "translating"
    command = ["gateway_proxies.py", kind, str(port), str(sessions), str(directory)]
    with started(command, choose_settings(os.environ)) as (line, pid):
        yield Contender(name, msgspec.json.decode(line, type=Listening), pid, path=path)


def _long_history(size: int) -> Iterator[bytes]:
    roles = itertools.cycle(("user", "assistant"))
    for number in range(size // MESSAGE):
        yield _message(next(roles), f"{number} {_WORDS[number : number + MESSAGE - 50]}")


def _message(role: str, said: str) -> bytes:
    return b'{"role":"%s","content":"%s"}' % (role.encode(), said.encode())


_WORDS = text("words", 2 * MESSAGE)


def _cpu(pid: int) -> float:
    """Return CPU seconds as counted by the scheduler: ticks are too coarse for a short round."""
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _status(pid: int) -> tuple[int, int]:
    """Return the resident bytes: now, and the maximum."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
