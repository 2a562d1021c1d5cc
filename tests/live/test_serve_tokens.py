"""Tokens as a client gets them: packed results, stale rollouts, and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.live.test_serve_orders import serving

import holdwater as hw
from holdwater.client import CallAnswer, Instance, PolicyCall, StaleAction, TokenFigures, TrajectoryForm

ASKED = Instance(id="own", instruction="task", data={"turns": 3})


class VersionedPolicy:
    """Answers each call with ids of one token a message, and with the next version."""

    def __init__(self, *versions: str, with_prompt: bool = True) -> None:
        self._versions = iter(versions)
        self._with_prompt = with_prompt

    def __call__(self, call: PolicyCall) -> CallAnswer:
        message = {"role": "assistant", "content": "fine"}
        logprobs = {"content": [{"token": token, "logprob": -0.5} for token in "78"]}
        choice = {"index": 0, "message": message, "token_ids": [7, 8], "logprobs": logprobs}
        prompt: list[int] = []
        for sent in call.messages:
            prompt += [7, 8] if sent["role"] == "assistant" else [1, 2, 3]
        reply: dict[str, Any] = {"choices": [choice]}
        if self._with_prompt:
            reply["prompt_token_ids"] = prompt
        return CallAnswer(call=call.id, reply=reply, version=next(self._versions))


async def test_stale_rollouts_are_flagged_or_dropped_and_counted(tmp_path: Path) -> None:
    versions = ("step-1", "step-2", "step-4")
    tokens = TrajectoryForm.TOKENS
    async with serving(tmp_path) as client:
        fresh = await client.run(ASKED, policy=VersionedPolicy("1", "1", "1"), trajectory=tokens)
        flagged = await client.run(
            ASKED, policy=VersionedPolicy(*versions), trajectory=tokens, max_staleness=2
        )
        dropped = await client.run(
            ASKED, policy=VersionedPolicy(*versions), max_staleness=2, when_stale=StaleAction.DROP
        )
        allowed = await client.run(
            ASKED, policy=VersionedPolicy(*versions), trajectory=tokens, max_staleness=3
        )
        figures = (await client.stats()).tokens

    [sequence] = flagged.sequences()
    assert sequence.ids.tolist() == [1, 2, 3, 7, 8, 1, 2, 3, 7, 8, 1, 2, 3, 7, 8]
    assert sequence.versions == versions
    assert [(r.staleness, r.stale, r.reward) for r in (fresh, flagged, dropped, allowed)] == [
        (0, False, 1.0),
        (3, True, 1.0),
        (3, True, None),
        (3, False, 1.0),
    ]
    assert (dropped.outcome, dropped.trajectory, dropped.sequences()) == ("passed", None, [])
    assert figures == TokenFigures(
        replies=12,
        sampled=24,
        starts={"first": 4},
        version=4,
        staleness={"p50": 3.0, "p90": 3.0, "p95": 3.0, "p99": 3.0},
        stale=2,
    )


@pytest.mark.parametrize("form", [TrajectoryForm.TOKENS, TrajectoryForm.NODES])
async def test_a_result_that_is_read_twice_is_counted_once(tmp_path: Path, form: TrajectoryForm) -> None:
    async with serving(tmp_path) as client:
        policy = VersionedPolicy("1", "2", "3")
        first = await client.run(ASKED, key="k", policy=policy, trajectory=form)
        again = await client.result("k")
        figures = (await client.stats()).tokens
    [trajectory] = hw.read(tmp_path / "run")

    assert again is not None
    assert again.rollouts[0].sequences() == first.sequences() == trajectory.sequences()
    assert (figures.replies, figures.starts, figures.breaks) == (3, {"first": 1}, 0.0)


async def test_replies_without_ids_of_their_prompt_are_counted(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        policy = VersionedPolicy("1", "1", "1", with_prompt=False)
        rollout = await client.run(ASKED, policy=policy, trajectory=TrajectoryForm.TOKENS)
        figures = (await client.stats()).tokens

    assert (rollout.sequences(), rollout.unknown_replies, figures.unknown) == ([], 3, 3)
