"""Agents that say what they are told in any dialect, a trainer that answers in its own time, and a line.

For tests of held calls against a server in a process of its own: `server_harness.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.dialect_requests import DIALECTS, speak, text_of
from tests.server_harness import Server, eventually

import holdwater as hw
from holdwater.client import PolicyCall, Rollout
from holdwater.dialect import DIALECTS as SPOKEN
from holdwater.dialect.interface import RequestTarget

SUITE = '''
import asyncio
from pathlib import Path
import aiohttp
import holdwater as hw

HERE = Path(__file__).parent


async def solve(instance, sandbox, model):
    """Posts what it was told to, one after the other; what it was answered, as it came."""
    answers = []
    headers = {"Authorization": f"Bearer {model.key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as http:
        for path, body, more in instance.data["requests"]:
            data = open(HERE / body[1:], "rb") if body.startswith("@") else body.encode()
            url = model.url.removesuffix("/v1") + path
            async with http.post(url, data=data, headers=more) as response:
                answers.append([response.status, await response.text()])
    return answers


async def grade(instance, sandbox, answer):
    while instance.data.get("slow") and not (HERE / "graded").exists():
        await asyncio.sleep(0.02)
    return answer is not None


suite = hw.Suite(name="held", instances=list, grade=grade, group=lambda instance, members: None)
'''
WAYS = [(dialect, stream) for dialect in DIALECTS for stream in (False, True)]


def talk(name: str, way: tuple[str, bool], turns: int = 1, **data: Any) -> hw.Instance:
    """An agent that says its turns in one dialect. What it was answered before is always the same to it."""
    dialect, stream = way
    requests = []
    for turn in range(turns):
        texts = [text for n in range(turn) for text in (f"{name} {n}", "so")]
        request = speak(dialect, *texts, f"{name} {turn}", stream=stream)
        requests.append([request.path, request.body.decode(), dict(request.headers)])
    return hw.Instance(id=name, data={"requests": requests, **data})


def talks(name: str, count: int) -> dict[str, tuple[str, bool]]:
    return {f"{name}-{n}": WAYS[n % len(WAYS)] for n in range(count)}


def said(call: PolicyCall) -> str:
    """What the agent said last."""
    return str(call.chat["messages"][-1]["content"])


def heard(way: tuple[str, bool], rollout: Rollout) -> list[str]:
    """What the agent was answered."""
    dialect, stream = way
    assert rollout.outcome == "passed", rollout.failure
    found = []
    for status, body in rollout.answer:
        assert status == 200, body
        if stream:
            reader = SPOKEN[dialect].stream(
                SPOKEN[dialect].adapt_request({}, RequestTarget("v1beta/models/m:x"), None)
            )
            assert list(reader.events(body.encode()))
            body = reader.reply()
        found.append(text_of(dialect, json.loads(body)))
    return found


class Trainer:
    """Holds back its answers until it is told `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: Counter[str] = Counter()
        self.waiting = 0

    async def __call__(self, call: PolicyCall) -> str:
        text = said(call)
        self.asked[text] += 1
        self.waiting += 1
        try:
            await self.go.wait()
        finally:
            self.waiting -= 1
        return f"to {text}"


@asynccontextmanager
async def line(serve: Server) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A line to the server, and what cuts all connections over it."""
    host, port = serve.url.removeprefix("http://").split(":")
    writers: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # it was cut
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far, back = await asyncio.open_connection(host, int(port))
        except ConnectionError:
            return writer.close()  # the server is not there yet
        writers.update((writer, back))
        async with asyncio.TaskGroup() as both:
            both.create_task(pump(reader, back))
            both.create_task(pump(far, writer))
        writers.difference_update((writer, back))

    def cut() -> None:
        for writer in writers:
            writer.transport.abort()

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", cut
        cut()
        await eventually(lambda: not writers, 5.0)
