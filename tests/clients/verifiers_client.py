"""Calls an environment server with the client of `verifiers`; runs in an environment that has the package.

    python verifiers_client.py ADDRESS < WORK, a JSON object

It prints `ready` when the server is healthy, and then one JSON line for each rollout, in the order of their
ends. A line `cancel` on its stdin cancels all rollouts that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import runpy
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.types import SamplingConfig

KINDS = {"eval": EvalClientConfig, "train": TrainClientConfig}


class SceneData(vf.TaskData):
    """A task of the tests, with fields that only its own class has."""

    answer: str | None = None
    notes: dict[str, Any] | None = None


class SceneTask(vf.Task[SceneData]):
    pass


async def main(address: str, work: dict[str, Any]) -> None:
    if "taskset" in work:
        work["tasks"] = [{"object": task} for task in load_tasks(**work["taskset"])]
    client = EnvClient(address)
    await client.wait_for_server_startup(timeout=work["patience"], interval=0.2)
    say({"ready": True})
    tasks = [asyncio.create_task(run(client, work, number)) for number in range(len(work["tasks"]))]
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read_input, tasks)
    await asyncio.gather(*tasks, return_exceptions=True)
    say({"healthy": await client.health()})
    await client.close()


def load_tasks(path: str, taskset: str, config: str, **options: Any) -> list[vf.Task]:
    """Return the tasks of a taskset, as prime-rl loads them."""
    module = runpy.run_path(path)
    with contextlib.redirect_stdout(sys.stderr):  # a taskset may print
        return list(module[taskset](module[config](**options)))


async def run(client: EnvClient, work: dict[str, Any], number: int) -> None:
    given = {**work, **work["tasks"][number]}
    task = given.get("object") or SceneTask(SceneData(idx=number, **given["task"]))
    endpoint = KINDS[given["kind"]](
        base_url=given["url"], api_key_var=given["key"], headers=given.get("headers", {})
    )
    sampling = SamplingConfig(**given.get("sampling", {}))
    deltas = 0

    def count(delta: dict[str, Any]) -> None:
        nonlocal deltas
        deltas += 1

    try:
        data = task.data.model_dump(mode="json")  # as prime-rl sends it
        episode = await client.run(endpoint, work["model"], sampling, data, on_delta=count)
    except RuntimeError as error:
        say({"number": number, "refused": str(error)})
    except asyncio.CancelledError:
        say({"number": number, "cancelled": True})
        raise
    else:
        say({"number": number, "deltas": deltas, **describe(episode, task)})


def describe(episode: vf.WireEpisode, task: vf.Task) -> dict[str, Any]:
    return {
        "ok": episode.ok,
        "same_task": (episode.task.key, episode.task.hash) == (task.key, task.hash),
        "data": episode.task.data.model_dump(mode="json"),
        "errors": [error.model_dump() for error in episode.errors],
        "traces": [describe_trace(trace) for trace in episode.traces],
    }


def describe_trace(trace: vf.Trace) -> dict[str, Any]:
    return {
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "reward": trace.reward,
        "rewards": {name: reward and reward.model_dump() for name, reward in trace.rewards.items()},
        "metrics": trace.metrics,
        "stop": trace.stop_condition,
        "errors": [error.model_dump() for error in trace.errors],
        "turns": trace.num_turns,
        "usage": trace.usage and trace.usage.model_dump(),
        "tools": [tool.name for tool in trace.tools],
        "messages": [message.model_dump(exclude_none=True) for message in trace.messages],
        "branches": [
            {
                "token_ids": branch.token_ids,
                "mask": branch.sampled_mask,
                "logprobs": branch.logprobs,
                "experts": None
                if branch.routed_experts is None
                else branch.routed_experts.flatten().tolist(),
            }
            for branch in trace.branches
        ],
    }


def read_input(tasks: list[asyncio.Task[None]]) -> None:
    line = sys.stdin.buffer.raw.read(100)
    if not line:
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    elif line.strip() == b"cancel":
        for task in tasks:
            task.cancel()


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.stdin.buffer.raw.readline())))
