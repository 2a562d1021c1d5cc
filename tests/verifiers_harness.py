"""A server that speaks the verifiers protocol, its real client in an environment of its own, and a model that
returns token ids.

For tests of what prime-rl sees. A token of the model is a byte of the text, or a mark between messages.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.server_harness import Model, serve_model
from tests.verifiers_commands import PYTHON, find_interpreter
from tests.wait_bounds import stretch

CLIENT = Path(__file__).parent / "clients" / "verifiers_client.py"
MARKS = {"system": 300, "user": 301, "assistant": 302, "tool": 303}
END = 304
LOGPROB = -0.25
EXPERTS = 251  # of its one layer; a token's number decides which one is chosen


class TokenModel(Model):
    """A model that returns the ids and log probabilities of its tokens to those who ask."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()  # bound: the keys of a test

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization", ""))
        response = await super().answer(request)
        body = await request.json()
        if response.status != 200 or not body.get("return_token_ids"):
            return response
        reply = json.loads(response.body)  # type: ignore[arg-type]
        [choice] = reply["choices"]
        sampled = [*choice["message"]["content"].encode(), END]
        choice["token_ids"] = sampled
        rows = [token % EXPERTS for token in [*tokenize(body["messages"]), MARKS["assistant"], *sampled][:-1]]
        data = base64.b64encode(bytes(rows)).decode()
        choice["routed_experts"] = {"data": data, "shape": [len(rows), 1, 1], "start": 0}
        choice["logprobs"] = {"content": [{"token": "", "logprob": LOGPROB} for _ in sampled]}
        reply["prompt_token_ids"] = [*tokenize(body["messages"]), MARKS["assistant"]]
        reply["usage"] = {
            "prompt_tokens": len(reply["prompt_token_ids"]),
            "completion_tokens": len(sampled),
        }
        return web.json_response(reply)


def tokenize(messages: list[dict[str, Any]]) -> list[int]:
    tokens: list[int] = []
    for message in messages:
        tokens += [MARKS[message["role"]], *str(message["content"]).encode(), END]
    return tokens


def token_model() -> AbstractAsyncContextManager[TokenModel]:
    return serve_model(TokenModel())


class ClientProcess:
    """The package's client in a process of its own, at work."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None and self._process.stderr is not None
        async with asyncio.timeout(stretch(90)):
            line = await self._process.stdout.readline()
            if not line:
                raise AssertionError((await self._process.stderr.read()).decode())
        found: dict[str, Any] = json.loads(line)
        return found

    async def read_rollouts(self, count: int) -> list[dict[str, Any]]:
        """Return the rollouts in the order of the tasks."""
        return sorted([await self.read_line() for _ in range(count)], key=lambda line: line["number"])

    def cancel(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"cancel\n")

    def kill(self) -> None:
        self._process.kill()


@asynccontextmanager
async def verifiers_client(
    address: str, url: str, *tasks: dict[str, Any], **work: Any
) -> AsyncIterator[ClientProcess]:
    """Run the tasks with the package's client, once the server is healthy.

    Each of `tasks` is `{"task": {...}}`, with what differs from `work`.
    """
    find_interpreter()
    work = {"model": "policy", "kind": "train", "key": "SCENE_KEY", "patience": stretch(30), **work}
    work |= {"url": url, "tasks": tasks}
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        CLIENT,
        address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=2**26,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/root")},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(work).encode() + b"\n")
    try:
        yield ClientProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
