"""After many rollouts that ended in every way, a server holds nothing of them: registries, then memory.

Nobody may rely on a full collection: in the server and in its worker there is none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.command_runner import SOURCE
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.client import AsyncClient, LimitOverrides, ModelChoice, ModelSource, Order, ServerGone, Started
from holdwater.client.server_connection import ServerConnection
from holdwater.core.serving_protocol import Called, OrderEvent

MiB = 1024 * 1024
AT_ONCE = 6
WITHIN = 15 * MiB  # of what it was
INSTANT = 3.0  # seconds
REST = 30.0  # seconds for memory to go back, and for what is cancelled to be over
FUNCTION = ModelChoice(source=ModelSource.FUNCTION)
OF_A_ROLLOUT = (
    "AttemptState",
    "Scope",
    "Session",
    "AttemptLog",
    "ProcessSandbox",
    "_HeldCall",
    "ActiveOrder",
    "OrderFollower",
)

SUITE = """
import asyncio
import gc
import os

import holdwater as hw
from holdwater.testing.leaks import count_objects

gc.collect = lambda generation=2: 0  # a worker's own collections are full ones
gc.set_threshold(*gc.get_threshold()[:2], 1 << 30)


async def solve(instance, sandbox, model):
    if instance.id == "census":
        return {"pid": os.getpid(), "living": count_objects()}
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"{id(messages)} {turn} " + "x" * 300_000})
        reply = await model.chat(messages)
        messages.append(reply["choices"][0]["message"])
    if instance.id == "hangs":
        await asyncio.sleep(3600)
    return instance.id


suite = hw.Suite(
    name="leaks",
    instances=lambda: [hw.Instance(id=name) for name in ("census", "passes", "fails", "hangs")],
    grade=lambda instance, sandbox, answer: answer != "fails" and answer is not None,
)


def policy(request):
    return "seen"
"""

CONDUCT = """
import gc
import json
import os
import sys
import threading

gc.collect = lambda generation=2: 0
gc.set_threshold(*gc.get_threshold()[:2], 1 << 30)

from holdwater.cli import command
from holdwater.testing.leaks import count_objects


def tell():
    for line in sys.stdin:
        path = line.strip()
        with open(path + ".new", "w") as file:
            json.dump(count_objects(), file)
        os.rename(path + ".new", path)


if __name__ == "__main__":
    threading.Thread(target=tell, daemon=True).start()
    sys.argv[1:1] = ["serve"]
    sys.exit(command())
"""


class Scene:
    """A server of its own, and what is known of its processes."""

    def __init__(self, place: Path, client: AsyncClient, server: subprocess.Popen[bytes]) -> None:
        self.client = client
        self.url = f"unix:{place / 's'}"
        self.worker = 0
        self._place = place
        self._server = server
        self._numbers = itertools.count()

    # How rollouts end.

    async def passes(self) -> str:
        return (await self.client.run("passes", model=FUNCTION)).outcome

    async def fails(self) -> str:
        return (await self.client.run("fails", model=FUNCTION)).outcome

    async def answered(self) -> str:
        """Its client is the model."""
        return (await self.client.run("passes", policy=lambda call: "seen")).outcome

    async def times_out(self) -> str:
        rollout = await self.client.run("hangs", model=FUNCTION, limits=LimitOverrides(acting=stretch(0.5)))
        assert rollout.failure is not None and rollout.failure.kind == "timeout", rollout
        return rollout.outcome

    async def cancelled(self) -> str:
        order = Order(key=self._key(), instance="hangs", model=FUNCTION)
        async with self.client.stream(order) as events:
            await _until(Started, events)
        return await self._closed(order.key)

    async def gone(self) -> str:
        """Its client hangs up with a call that it was to answer."""
        order = Order(key=self._key(), instance="passes", model=ModelChoice(source=ModelSource.TRAINER))
        async with (
            ServerConnection(self.url, None, 1) as server,
            server.open_stream(msgspec.msgpack.encode(order), {}) as frames,
        ):
            while not isinstance(await frames.next(), Called):
                pass
        return await self._closed(order.key)

    def _key(self) -> str:
        return f"own-{next(self._numbers)}"

    async def _closed(self, key: str) -> str:
        result = await _eventually(lambda: self.client.result(key))
        return result.rollouts[0].outcome

    # What is left.

    async def idle(self) -> bool:
        """Its figures say so; they are taken every second."""
        stats = await self.client.stats()
        return (stats.running, stats.held, sum(stats.waiting.values()), stats.orders["open"]) == (0, 0, 0, 0)

    async def registries(self) -> Counter[str]:
        """What is alive of rollouts in both processes, but for the one that looks."""
        rollout = await self.client.run("census", model=FUNCTION)
        assert isinstance(rollout.answer, dict), rollout
        if self.worker:
            assert rollout.answer["pid"] == self.worker, "the worker was replaced"
        self.worker = rollout.answer["pid"]
        own = Counter({name: 1 for name in rollout.answer["living"] if not name.endswith("._HeldCall")})
        found = _of_rollouts(Counter(rollout.answer["living"]) - own)
        return found + await self._left_of_orders()

    async def _left_of_orders(self) -> Counter[str]:
        """The connection of whoever just looked may take an instant to end."""
        until = time.monotonic() + stretch(INSTANT)
        while (found := _of_rollouts(await self._conductors())) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        return found

    async def _conductors(self) -> Counter[str]:
        path = self._place / f"census-{next(self._numbers)}"
        assert self._server.stdin is not None
        self._server.stdin.write(f"{path}\n".encode())
        self._server.stdin.flush()
        await _eventually(lambda: _there(path))
        return Counter(json.loads(path.read_text()))

    def memory(self) -> dict[str, int]:
        return {"worker": _anonymous(self.worker), "conductor": _anonymous(self._server.pid)}


@asynccontextmanager
async def served(place: Path) -> AsyncIterator[Scene]:
    (place / "suite.py").write_text(SUITE)
    (place / "conduct.py").write_text(CONDUCT)
    words = [f"{place}/suite.py:suite", "--agent", f"{place}/suite.py:solve", "--out", str(place / "run")]
    words += ["--policy", f"{place}/suite.py:policy", "--listen", f"unix:{place / 's'}", "--grace", "0.2"]
    words += ["--workers", "1", "--concurrency", str(AT_ONCE), "--memory", "4GiB", "--keep", "none"]
    with (place / "err").open("wb") as err:
        server = subprocess.Popen(
            [sys.executable, str(place / "conduct.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=err,
            env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin:/usr/local/bin"},
        )
    try:
        async with AsyncClient(f"unix:{place / 's'}") as client:
            await _eventually(lambda: _ready(client, server))
            yield Scene(place, client, server)
            await client.drain()
        assert server.wait(stretch(30)) == 0, (place / "err").read_text()[-3000:]
    finally:
        server.kill()
        server.communicate()


async def churn(scene: Scene, count: int) -> Counter[str]:
    """As many rollouts, of each kind the same number; what became of them."""
    kinds: list[Callable[[], Awaitable[str]]] = [scene.passes, scene.fails, scene.answered]
    kinds += [scene.times_out, scene.cancelled, scene.gone]
    room = asyncio.Semaphore(2 * AT_ONCE)
    found: Counter[str] = Counter()

    async def one(kind: Callable[[], Awaitable[str]]) -> None:
        async with room:
            found[f"{kind.__name__}: {await kind()}"] += 1  # type: ignore[attr-defined]

    async with asyncio.TaskGroup() as tasks:
        for _, kind in zip(range(count), itertools.cycle(kinds), strict=False):
            tasks.create_task(one(kind))
    return found


async def leaves_nothing(count: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hw") as path:
        async with served(Path(path)) as scene:
            await churn(scene, 12)
            assert await scene.registries() == Counter()
            base = await lowest(scene)

            found = await churn(scene, count)

            assert found == {
                "passes: passed": count // 6,
                "fails: failed": count // 6,
                "answered: passed": count // 6,
                "times_out: failed": count // 6,
                "cancelled: cancelled": count // 6,
                "gone: cancelled": count // 6,
            }
            assert await scene.registries() == Counter()
            await _eventually(scene.idle)
            assert await back(scene, base) == {}
        audit = hw.audit(Path(path) / "run")
        assert audit.ok, audit


async def lowest(scene: Scene) -> dict[str, int]:
    """Its memory at rest: the least within a few seconds."""
    found = scene.memory()
    for _ in range(15):
        await asyncio.sleep(0.2)
        found = {name: min(value, found[name]) for name, value in scene.memory().items()}
    return found


async def back(scene: Scene, base: dict[str, int]) -> dict[str, float]:
    """By how many MB who has not gone back; empty as soon as all have."""
    until = time.monotonic() + stretch(REST)
    while over := {
        name: round((value - base[name]) / MiB, 1)
        for name, value in scene.memory().items()
        if value > base[name] + WITHIN
    }:
        if time.monotonic() > until:
            return over
        await asyncio.sleep(0.2)
    return {}


async def _until(kind: type[OrderEvent], events: Any) -> None:
    async for event in events:
        if isinstance(event, kind):
            return


async def _eventually(look: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(stretch(REST)):
        while not (found := await look()):
            await asyncio.sleep(0.05)
        return found


async def _ready(client: AsyncClient, server: subprocess.Popen[bytes]) -> bool:
    assert server.poll() is None, "the server ended"
    try:
        return (await client.health()).ok
    except ServerGone:
        return False  # it does not listen yet


async def _there(path: Path) -> bool:
    return path.exists()


def _of_rollouts(found: Counter[str]) -> Counter[str]:
    return Counter({name: count for name, count in found.items() if name.rpartition(".")[2] in OF_A_ROLLOUT})


def _anonymous(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


async def test_sixty_rollouts_leave_nothing_behind() -> None:
    await leaves_nothing(60)


@pytest.mark.proof
async def test_a_thousand_rollouts_leave_nothing_behind() -> None:
    await leaves_nothing(1002)
