"""The work of `rollout_churn.py` on verifiers: an environment whose agent talks, its server and its client.

    python peer_verifiers.py serve ADDRESS
    python peer_verifiers.py drive ADDRESS URL KIND ROLLOUTS AT_ONCE TURNS BYTES

It runs in its own environment; see `peer_rollouts.py`. The server is one worker: a pool starts each of its
workers by `serve_env` with `max_workers=1`. The agent runs in the worker, as ours does, and calls the
interception server over HTTP, as verifiers requires of every harness.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from typing import Any

import aiohttp
import verifiers.v1 as vf  # type: ignore[import-not-found,unused-ignore]
from content import image, text
from pydantic_core import to_json
from verifiers.v1.configs.client import EvalClientConfig  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.configs.harness import HarnessConfig  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.configs.sampling import SamplingConfig  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.configs.taskset import TasksetConfig  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.harness import Harness  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.runtimes import ProgramResult  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.serve.client import EnvClient  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.serve.pool import serve_env  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.task import Task, TaskData  # type: ignore[import-not-found,unused-ignore]
from verifiers.v1.taskset import Taskset  # type: ignore[import-not-found,unused-ignore]

__all__ = ["ChurnHarness", "ChurnTaskset"]

NAME = "peer_verifiers"  # this module is the plugin of both kinds
_sessions: list[aiohttp.ClientSession] = []  # one session, of the worker


class ChurnData(TaskData):  # type: ignore[misc,unused-ignore]
    kind: str = "text"
    turns: int = 1
    size: int = 1


class ChurnTask(Task[ChurnData]):  # type: ignore[misc,unused-ignore]
    @vf.reward  # type: ignore[untyped-decorator,unused-ignore]
    async def agree(self, trace: Any) -> float:
        return 1.0


class ChurnTaskset(Taskset[ChurnTask, TasksetConfig]):  # type: ignore[misc,unused-ignore]
    def load(self) -> list[ChurnTask]:
        return []


class ChurnHarness(Harness[HarnessConfig]):  # type: ignore[misc,unused-ignore]
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: ChurnData,
    ) -> Any:
        headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
        messages: list[dict[str, Any]] = []
        for turn in range(data.turns):
            messages.append(said(data.kind, f"{data.name}/{turn}", data.size))
            body = to_json({"model": ctx.model, "messages": messages})
            async with _session().post(
                f"{endpoint}/chat/completions", data=body, headers=headers
            ) as response:
                response.raise_for_status()
                reply = await response.json()
            messages.append(reply["choices"][0]["message"])
        return ProgramResult(exit_code=0, stdout="", stderr="")


def said(kind: str, seed: str, size: int) -> dict[str, Any]:
    """Return the same message as `churn_work.py`, which cannot be imported here."""
    if kind == "text":
        return {"role": "user", "content": text(seed, size)}
    picture = base64.b64encode(image(seed, size)).decode()
    parts = [
        {"type": "text", "text": f"Look at {seed}."},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    return {"role": "user", "content": parts}


def _session() -> aiohttp.ClientSession:
    if not _sessions:
        _sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
    return _sessions[0]


def serve(address: str) -> None:
    env = {"taskset": {"id": NAME}, "agent": {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}}}
    serve_env(max_workers=1, address=address, config_data=env)


async def drive(address: str, url: str, kind: str, *numbers: str) -> None:
    """Request the rollouts, with a fixed number in flight; print their size as JSON lines."""
    count, at_once, turns, size = map(int, numbers)
    client = EnvClient(address)
    await client.wait_for_server_startup()
    endpoint = EvalClientConfig(base_url=url, api_key_var="BENCHMARK_KEY")
    print("ready", flush=True)
    left = iter(range(count))
    kept = 0

    async def ask() -> None:
        nonlocal kept
        for number in left:
            task = {"idx": number, "name": f"talk-{number}", "prompt": "Talk.", "kind": kind}
            data = {**task, "turns": turns, "size": size}
            episode = await client.run(endpoint, "benchmark", SamplingConfig(), data)
            trace = episode.traces[0]
            if trace.errors or episode.errors or len(trace.calls) != turns:
                raise SystemExit(f"a rollout failed: {trace.errors or episode.errors}")
            kept += len(episode.model_dump_json())

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(ask())
    await client.close()
    print(kept, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("BENCHMARK_KEY", "benchmark")
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        asyncio.run(drive(*sys.argv[2:]))
