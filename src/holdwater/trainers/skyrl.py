"""A generator for SkyRL: a batch of trajectories becomes orders, whose model calls SkyRL's engines answer.

The method `get_generator` of an experiment returns it. `token_rows.py` makes the rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from ..client import (
    AsyncClient,
    GroupTerms,
    ModelChoice,
    ModelSource,
    Order,
    Rollout,
    SampledTokens,
    TokenPolicy,
    TokenPrompt,
    TrajectoryForm,
)
from .token_rows import TokenRow, list_turn_rows, make_row, require_tokens


class SkyRLGenerator:
    """Implements SkyRL's `GeneratorInterface`.

    `connect` makes the client. The key `field` of a trajectory's `env_extras` names its instance; the
    trajectories of one prompt form a group. With `step_wise` each model call has a row of its own. `run`
    names this training in the keys of its orders: if it resumes with the same name, it gets the rollouts
    that it had.
    """

    def __init__(
        self,
        connect: Callable[[], AsyncClient],
        engines: Any,
        tokenizer: Any,
        *,
        field: str = "instance",
        step_wise: bool = False,
        run: str = "",
    ) -> None:
        self._connect = connect
        self._engines = engines
        self._tokenizer = tokenizer
        self._field = field
        self._step_wise = step_wise
        self._run = run or uuid.uuid4().hex

    async def generate(self, input_batch: Any, **_: Any) -> dict[str, Any]:
        """Return a `GeneratorOutput` in the order of the batch."""
        groups = _list_groups(input_batch)
        orders = [self._make_order(input_batch, *group) for group in groups.items()]
        policy = self._make_policy(input_batch.get("sampling_params"))
        try:
            async with self._connect() as client:
                results = await client.gather(orders, policy=policy)
        finally:
            for order in orders:
                for member in range(order.size):
                    await self._engines.finish_session(f"{order.key}/{member}")
        require_tokens(results)
        rollouts: dict[int, Rollout] = {}
        for places, result in zip(groups.values(), results, strict=True):
            rollouts.update(zip(places, result.rollouts, strict=True))
        return self._make_output(input_batch, [rollouts[place] for place in range(len(rollouts))])

    def _make_order(self, batch: Any, name: str, places: list[int]) -> Order:
        metadata = batch.get("batch_metadata")
        return Order(
            key=f"{self._run}/{name}",
            instance=str(batch["env_extras"][places[0]][self._field]),
            size=len(places),
            group=GroupTerms() if len(places) > 1 else None,
            trajectory=TrajectoryForm.TOKENS,
            model=ModelChoice(
                source=ModelSource.TRAINER, version=str(metadata.global_step) if metadata else ""
            ),
        )

    def _make_policy(self, sampling: dict[str, Any] | None) -> TokenPolicy:
        async def sample(prompt: TokenPrompt) -> SampledTokens:
            session = f"{prompt.call.order}/{prompt.call.member}"  # keeps a conversation on one engine
            batch = {"prompt_token_ids": [prompt.ids], "sampling_params": sampling, "session_ids": [session]}
            reply = await self._engines.generate(batch)
            logprobs = reply.get("response_logprobs")
            [ids] = reply["response_ids"]
            return SampledTokens(ids, logprobs[0] if logprobs else None, finish=reply["stop_reasons"][0])

        return TokenPolicy(self._tokenizer, sample)

    def _make_output(self, batch: Any, rollouts: list[Rollout]) -> dict[str, Any]:
        """Return the rows. SkyRL has no row without a reward: one that was not scored is not trained on."""
        rows: list[TokenRow] = []
        owners: list[Rollout] = []
        identities: list[Any] = []
        last: list[bool] = []
        for place, rollout in enumerate(rollouts):
            made = list(list_turn_rows(rollout)) if self._step_wise else []
            made = made or [make_row(rollout, self._tokenizer.pad_token_id)]
            rows += made
            owners += [rollout] * len(made)
            identities += [batch["trajectory_ids"][place]] * len(made) if self._step_wise else []
            last += [False] * (len(made) - 1) + [True]
        pairs = list(zip(rows, owners, strict=True))
        logprobs = [row.known_logprobs for row in rows]
        return {
            "prompt_token_ids": [row.prompt for row in rows],
            "response_ids": [row.response for row in rows],
            "rewards": [(owner.reward or 0.0) * end for owner, end in zip(owners, last, strict=True)],
            "loss_masks": [[bit * (owner.reward is not None) for bit in row.mask] for row, owner in pairs],
            "stop_reasons": ["error" if owner.reward is None else "stop" for owner in owners],
            "rollout_metrics": {
                "generate/unscored": sum(rollout.reward is None for rollout in rollouts),
                "generate/left_out_tokens": sum(row.left_out for row in rows),
            },
            "rollout_logprobs": None if None in logprobs else logprobs,
            "trajectory_ids": identities or None,
            "trajectory_generation_times": [owner.times.acting for owner in owners],
            "rollout_expert_indices": None,
            "is_last_step": last if self._step_wise else None,
            "env_metrics": [dict(owner.metrics) for owner in owners],
        }


def _list_groups(batch: Any) -> dict[str, list[int]]:
    """Return the places of each prompt's trajectories in the batch, by a name for its order."""
    metadata = batch.get("batch_metadata")
    step = f"{metadata.training_phase}/{metadata.global_step}" if metadata else uuid.uuid4().hex
    groups: dict[str, list[int]] = {}
    for place, trajectory in enumerate(batch.get("trajectory_ids") or range(len(batch["prompts"]))):
        groups.setdefault(f"{step}/{getattr(trajectory, 'instance_id', trajectory)}", []).append(place)
    return groups
