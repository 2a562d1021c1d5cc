"""Every token that a model server sampled is in one sequence with mask 1, by the server's own log."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.server_harness import Server, eventually, serve_model, server
from tests.token_server import SUITE, LoggedSample, TokenModel

import holdwater as hw
from holdwater.client import AsyncClient, Rollout, TokenSequence, TrajectoryForm

REASONS = {
    "plain": ["first"],
    "branch": ["first", "branch", "branch"],
    "compact": ["first", "rewritten"],
    "edit": ["first", "rewritten"],
    "again": ["first", "branch"],
    "quirk": ["first", "retokenized", "retokenized", "retokenized"],
    "child": ["first", "child", "child"],
    "die": ["first"],
    "hold": ["first"],
}


def list_samples(sequences: list[TokenSequence]) -> list[LoggedSample]:
    """The replies with mask 1, each with its whole prompt."""
    return [
        LoggedSample(tuple(turn.prompt), tuple(turn.completion))
        for sequence in sequences
        for turn in sequence.turns()
    ]


async def test_sequences_have_what_the_server_sampled_over_kills_and_branches(tmp_path: Path) -> None:
    async with serve_model(TokenModel()) as upstream:
        upstream.holds = "hold three"
        upstream.gate.clear()
        flags = ("--model", "m", "--base-url", upstream.url, "--token-ids", "auto", "--workers", "1")
        with server(tmp_path, *flags, "--backoff", "0.1", suite=SUITE) as serve:
            async with serve.client() as client:
                await serve.ready(client)
                # One after the other: a reply that is lost with its worker is in the log and in no rollout.
                rollouts = {name: await run(client, name) for name in REASONS if name != "hold"}
                last = asyncio.create_task(run(client, "hold"))
                await eventually(lambda: upstream.waiting == 1, 20.0)
                await kill_and_restart(serve, upstream)
                rollouts["hold"] = await last
                stats = await client.stats()
        trajectories = {trajectory.instance: trajectory for trajectory in hw.read(tmp_path / "run")}

    compare_with_log(rollouts, upstream.log)
    for name, rollout in rollouts.items():
        sequences = rollout.sequences()
        assert [str(sequence.reason) for sequence in sequences] == REASONS[name]
        assert sequences == trajectories[name].sequences()
        assert all(sequence.complete for sequence in sequences)
    assert [name for name, rollout in rollouts.items() if rollout.saved.requests] == ["die", "hold"]
    assert stats.tokens.sampled > 0 and stats.tokens.unknown == 0


async def run(client: AsyncClient, name: str) -> Rollout:
    return await client.run(name, key=name, trajectory=TrajectoryForm.TOKENS)


async def kill_and_restart(serve: Server, upstream: TokenModel) -> None:
    serve.kill()
    await eventually(lambda: upstream.waiting == 0, 20.0)
    upstream.gate.set()
    serve.start()


def compare_with_log(rollouts: dict[str, Rollout], log: list[LoggedSample]) -> None:
    found = Counter(sample for rollout in rollouts.values() for sample in list_samples(rollout.sequences()))
    assert found == Counter(log)
    assert set(found.values()) == {1}
    masks = sum(sum(sequence.mask) for rollout in rollouts.values() for sequence in rollout.sequences())
    assert masks == sum(len(sample.tokens) for sample in log)
