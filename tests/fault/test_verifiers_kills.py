"""Workers, servers and clients that are killed while prime-rl's client waits: every rollout comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.server_harness import Server, eventually, kill, server
from tests.verifiers_harness import TokenModel, token_model, tokenize, verifiers_client

import holdwater as hw

SIZES = [12, pytest.param(256, marks=pytest.mark.proof)]
TURNS = 3


def make_tasks(count: int) -> list[dict[str, object]]:
    """Groups of eight: the same task as often, as prime-rl sends it."""
    return [{"task": {"id": f"i{number // 8 % 8}"}} for number in range(count)]


def make_flags(size: int, listen: str = "127.0.0.1:0") -> list[str]:
    protocol = ("--protocol", "verifiers", "--protocol-listen", listen)
    # What is declared need not be learned first: all run at once.
    return [*protocol, "--concurrency", str(size), "--sandbox-memory", "32MiB"]


async def hold_turn(model: TokenModel, size: int, said: str) -> None:
    """Wait until all rollouts wait for the model."""
    await eventually(lambda: model.waiting == size, 40.0 + size / 4, lambda: f"{model.waiting} wait; {said}")


def check_traces(lines: list[dict[str, object]]) -> None:
    for line in lines:
        [trace] = line["traces"]  # type: ignore[misc, index]
        [branch] = trace["branches"]
        assert line["ok"] and line["same_task"] and trace["turns"] == TURNS
        assert branch["token_ids"] == tokenize(trace["messages"])


@pytest.mark.parametrize("size", SIZES)
async def test_a_killed_worker_costs_no_rollout_of_a_verifiers_client(tmp_path: Path, size: int) -> None:
    flags = [*make_flags(size), "--workers", "2", "--least-workers", "2"]
    async with token_model() as model:
        model.gate.clear()
        with server(tmp_path, *flags) as serve:
            async with serve.client() as watch:
                await serve.ready(watch, workers=2)
            async with verifiers_client(await find_address(serve), model.url, *make_tasks(size)) as client:
                assert await client.read_line() == {"ready": True}
                await hold_turn(model, size, serve.said)
                await model.release()
                await hold_turn(model, size, serve.said)
                kill(serve.workers()[0])
                model.gate.set()
                lines = await client.read_rollouts(size)
                assert await client.read_line() == {"healthy": True}
    audit = hw.audit(tmp_path / "run")

    check_traces(lines)
    assert (audit.planned, audit.settled, audit.lost, audit.duplicated) == (size, size, 0, 0)


@pytest.mark.parametrize("size", SIZES)
async def test_a_killed_server_answers_the_waiting_client_when_it_is_back(tmp_path: Path, size: int) -> None:
    flags = make_flags(size, f"unix:{tmp_path}/vf.socket")
    async with token_model() as model:
        model.gate.clear()
        with server(tmp_path, *flags) as serve:
            async with verifiers_client(
                f"ipc://{tmp_path}/vf.socket", model.url, *make_tasks(size)
            ) as client:
                assert await client.read_line() == {"ready": True}
                await hold_turn(model, size, serve.said)
                await model.release()
                await hold_turn(model, size, serve.said)
                serve.kill()
                model.gate.set()
                serve.start()
                lines = await client.read_rollouts(size)  # the client has sent nothing since
                assert await client.read_line() == {"healthy": True}
            # A request is removed once its answer has left.
            await eventually(lambda: not list((tmp_path / "run" / "requests").iterdir()), 20.0)
    audit = hw.audit(tmp_path / "run")

    check_traces(lines)
    assert (audit.planned, audit.settled, audit.lost, audit.duplicated) == (size, size, 0, 0)


async def test_cancelled_tasks_and_a_killed_client_end_their_rollouts(tmp_path: Path) -> None:
    async with token_model() as model:
        model.gate.clear()
        with server(tmp_path, *make_flags(4), "--grace", "0.5") as serve:
            tasks = make_tasks(2)
            async with verifiers_client(await find_address(serve), model.url, *tasks) as client:
                assert await client.read_line() == {"ready": True}
                await hold_turn(model, 2, serve.said)
                client.cancel()
                assert await client.read_rollouts(2) == [{"number": n, "cancelled": True} for n in range(2)]
                await eventually(lambda: model.waiting == 0, 20.0, lambda: serve.said)
                assert await client.read_line() == {"healthy": True}
            async with verifiers_client(await find_address(serve), model.url, *tasks) as client:
                assert await client.read_line() == {"ready": True}
                await hold_turn(model, 2, serve.said)
                client.kill()
                await eventually(lambda: model.waiting == 0, 20.0, lambda: serve.said)
            await eventually(lambda: count_cancelled(serve) == 4, 20.0, lambda: serve.said)
            await eventually(lambda: not list((tmp_path / "run" / "requests").iterdir()), 20.0)


def count_cancelled(serve: Server) -> int:
    return hw.show(serve.out).outcomes.get("cancelled", 0)


async def find_address(serve: Server) -> str:
    """The address that the server says."""
    await eventually(lambda: "for `verifiers`" in serve.said, 20.0, lambda: serve.said)
    return serve.said.partition(" for `verifiers`")[0].rpartition(" ")[2]
