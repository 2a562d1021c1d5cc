"""A server in a process of its own, a model that counts, and agents that do as their instance says.

For tests of what a trainer sees: the command as it is, real sockets, real workers, real kills.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
from aiohttp import web
from tests.forked_command import ForkedCommand
from tests.wait_bounds import stretch

from holdwater.client import AsyncClient

SUITE = '''
import asyncio, functools, operator, os, signal, time
import holdwater as hw

def instances():
    for n in range(8):
        yield hw.Instance(id=f"i{n}", instruction=f"task {n}", data={"turns": 3})

async def grade(instance, sandbox, answer):
    if instance.data.get("grade") == "raises":
        raise RuntimeError("no grade")
    return hw.Grade(passed=True, score=float(instance.data.get("score", 1.0)))

async def group(instance, members):
    if instance.data.get("group") == "raises":
        raise RuntimeError("no group")
    for member in members:
        if instance.data.get("judge"):
            await member.spawn(judge, f"judge {member.number}", name="judge")
    return [hw.Grade(passed=True, score=float(m.number), metrics={"of": len(members)}) for m in members]

async def judge(instance, sandbox, model):
    await model.chat([{"role": "user", "content": instance.instruction}])

async def solve(instance, sandbox, model):
    """Turns, each after a pause; then what the instance says."""
    data = instance.data
    messages = [{"role": "user", "content": instance.instruction}]
    text = ""
    for turn in range(data.get("turns", 1)):
        if data.get("pause"):
            await asyncio.sleep(data["pause"])
        reply = await model.chat(messages)
        text = reply["choices"][0]["message"]["content"]
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    if data.get("end") == "raise":
        raise RuntimeError("the agent gave up")
    if data.get("end") == "sleep":
        await asyncio.sleep(3600)
    if data.get("end") == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data.get("end") == "hang":
        time.sleep(3600)
    if data.get("compute"):  # one call in C, which holds the interpreter all the while
        late = functools.partial(operator.lt, time.monotonic() + data["compute"])
        next(filter(late, iter(time.monotonic, None)))
    return text

suite = hw.Suite(name="scene", instances=instances, grade=grade, group=group)
'''


BODIES = 8


class Model:
    """An endpoint that counts what it is asked; `gate` holds its replies while it is clear.

    It does not take what says `refuse`.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()  # by the whole conversation
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = self.most = 0
        self.url = ""
        self.refuses = 0  # the status that everybody gets
        self.bodies: list[dict[str, Any]] = []  # bound: BODIES

    async def release(self) -> None:
        """Answer the calls that wait, and hold the next ones."""
        self.gate.set()
        self.gate.clear()
        await asyncio.sleep(0)  # those that waited go on first
        assert self.waiting == 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        said = [str(message["content"]) for message in body["messages"]]
        self.asked["|".join(said)] += 1
        self.bodies = [*self.bodies, body][-BODIES:]
        if self.refuses:
            return web.json_response({"error": {"message": "refused"}}, status=self.refuses)
        if said[-1] == "refuse":
            return web.json_response({"error": {"message": "no such thing", "code": "invalid"}}, status=400)
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        message = {"role": "assistant", "content": f"reply {len(said)} to {said[0][:40]}"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return web.json_response({"object": "chat.completion", "choices": choices, "usage": usage})


ModelT = TypeVar("ModelT", bound=Model)


def model() -> AbstractAsyncContextManager[Model]:
    return serve_model(Model())


@asynccontextmanager
async def serve_model(found: ModelT) -> AsyncIterator[ModelT]:
    """Serve a model until the block ends; its `url` is set."""
    app = web.Application(client_max_size=2**30)
    app.router.add_post("/v1/chat/completions", found.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield found
    finally:
        found.gate.set()
        await runner.cleanup()


class Server:
    """`holdwater serve`, which can be killed and started again."""

    def __init__(self, place: Path, *flags: str, suite: str = SUITE) -> None:
        self.place = place
        self.out = place / "run"
        self.url = f"http://127.0.0.1:{_free_port()}"
        (place / "command_runner.py").write_text(suite)
        self.words = [
            "serve",
            str(place / "command_runner.py:suite"),
            "--agent",
            str(place / "command_runner.py:solve"),
            "--listen",
            self.url.removeprefix("http://"),
            "--out",
            str(self.out),
            *flags,
        ]
        self.process: ForkedCommand | None = None
        self.errors = place / "serve.err"

    def start(self) -> None:
        with self.errors.open("ab") as errors:
            self.process = ForkedCommand(self.words, errors.fileno(), errors.fileno())

    def kill(self) -> None:
        """kill -9, workers and all that they started included."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ctrl-C, twice if need be; the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(stretch(30))

    @property
    def token(self) -> str:
        return (self.out / "token").read_text().strip()

    @property
    def said(self) -> str:
        return self.errors.read_text(errors="replace")

    def workers(self) -> list[int]:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        return [child.pid for child in children if "holdwater.rollout.worker" in child.cmdline()]

    def client(self, **settings: Any) -> AsyncClient:
        return AsyncClient(self.url, **{"patience": stretch(20.0), **settings})

    async def ready(self, client: AsyncClient, workers: int = 1) -> None:
        """Wait until so many workers take orders."""
        await eventually(lambda: self._ready(client, workers), 20.0, lambda: self.said)

    async def _ready(self, client: AsyncClient, workers: int) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.said
        try:
            health = await client.health()
        except Exception:  # boundary: it is not there yet
            return False
        return health.ok and health.ready >= workers


@contextmanager
def server(place: Path, *flags: str, suite: str = SUITE) -> Iterator[Server]:
    found = Server(place, *flags, suite=suite)
    found.start()
    try:
        yield found
    finally:
        found.stop()


async def eventually(done: Callable[[], Any], seconds: float, why: Callable[[], str] = str) -> None:
    """Wait until it is so; `seconds` are those of a quiet machine."""
    bound = stretch(seconds)
    until = time.monotonic() + bound
    while True:
        result = done()
        if await result if asyncio.iscoroutine(result) else result:
            return
        assert time.monotonic() < until, f"not so after {bound:g} s: {why()}"
        await asyncio.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
