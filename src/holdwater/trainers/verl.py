"""An agent loop for verl: each call of `run` orders one rollout, whose model calls verl's servers answer.

Its place in a configuration of agent loops is `_target_: holdwater.trainers.verl.VerlAgentLoop`. verl makes a
new loop for each rollout, in several processes, and computes advantages over its own groups.
"""

from __future__ import annotations

from typing import Any

from ..client import AsyncClient, Rollout, SampledTokens, TokenPolicy, TokenPrompt, TrajectoryForm
from .token_rows import make_row


class VerlAgentLoop:
    """Runs the instance that the field `field` of the dataset names, on the server at `url`.

    The arguments after `url` and `field` are those with which verl makes its agent loops.
    """

    def __init__(
        self,
        url: str,
        field: str = "instance",
        *,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        **_: Any,
    ) -> None:
        self._url = url
        self._field = field
        self._sizes = trainer_config.config.actor_rollout_ref.rollout
        self._servers = server_manager
        self._tokenizer = tokenizer

    async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
        """Return an `AgentLoopOutput`."""

        async def sample(prompt: TokenPrompt) -> SampledTokens:
            request = f"{prompt.call.order}/{prompt.call.member}"  # keeps a conversation on one server
            reply = await self._servers.generate(
                request, prompt_ids=prompt.ids, sampling_params=dict(sampling_params)
            )
            version = str(reply.extra_fields.get("global_steps", ""))
            return SampledTokens(reply.token_ids, reply.log_probs or None, version)

        policy = TokenPolicy(self._tokenizer, sample)
        async with AsyncClient(self._url) as client:
            rollout = await client.run(
                str(fields[self._field]), policy=policy, trajectory=TrajectoryForm.TOKENS
            )
        return self._make_output(rollout)

    def _make_output(self, rollout: Rollout) -> Any:
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        row = make_row(rollout, self._tokenizer.pad_token_id)
        row = row.cut(self._sizes.prompt_length, self._sizes.response_length)
        scored = rollout.reward is not None
        steps = [int(version) for version in row.versions if version.isdigit()]
        return AgentLoopOutput(
            prompt_ids=row.prompt,
            response_ids=row.response,
            # verl has no row without a reward: one that was not scored is not trained on.
            response_mask=row.mask if scored else [0] * len(row.mask),
            response_logprobs=row.known_logprobs,
            reward_score=rollout.reward if rollout.reward is not None else 0.0,
            num_turns=2 * rollout.exchanges,
            metrics=AgentLoopMetrics(generate_sequences=rollout.times.acting),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "min_global_steps": min(steps, default=None),
                "max_global_steps": max(steps, default=None),
                "reward_extra_info": {"scored": float(scored), "left_out": float(row.left_out)},
            },
        )
