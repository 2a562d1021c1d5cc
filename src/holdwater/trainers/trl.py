"""Rollouts for TRL's `GRPOTrainer`: a `rollout_func`, and the reward function that belongs to it.

A prompt of the dataset names an instance. TRL repeats each prompt for every member of its group; each group
becomes an order. `trl_async.py` is for the asynchronous trainer.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Unpack

from msgspec.structs import replace

from ..client import Client, GroupTerms, Instance, ModelChoice, ModelSource, Order, TrajectoryForm
from ..client.async_client import OrderOptions
from .token_rows import make_row, require_tokens


class TrlRollouts:
    """A `rollout_func`: orders a group for each prompt and returns a row for each rollout.

    `run` names this training in the keys of its orders: a trainer that resumes from a checkpoint with the
    same name gets the rollouts that it had. `find_instance` maps a prompt to an instance or its id; by
    default the prompt is the id, or the last message of a conversational prompt. `options` are those of
    `client.run`.
    """

    def __init__(
        self,
        client: Client,
        *,
        run: str = "",
        find_instance: Callable[[Any], str | Instance] | None = None,
        **options: Unpack[OrderOptions],
    ) -> None:
        self.left_out = 0  # sampled tokens that no row has: their rollouts have several sequences
        self._client = client
        self._policy = options.pop("policy", None)
        self._on_event = options.pop("on_event", None)
        self._run = run or uuid.uuid4().hex
        self._find_instance = find_instance or _read_id
        self._model_key = options.pop("model_key", None)
        self._model = options.pop("model", ModelChoice())
        self._options: dict[str, Any] = {"trajectory": TrajectoryForm.TOKENS, **options}
        self._batches: Counter[str] = Counter()  # of the newest step

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        orders = list(self._make_orders(prompts, trainer))
        results = self._client.gather(
            orders, policy=self._policy, on_event=self._on_event, model_key=self._model_key
        )
        rollouts = require_tokens(results)
        rows = [make_row(rollout, trainer.processing_class.pad_token_id) for rollout in rollouts]
        self.left_out += sum(row.left_out for row in rows)
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.response for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.mask for row in rows],
            "rollout_reward": [rollout.reward for rollout in rollouts],
        }

    def _make_orders(self, prompts: list[Any], trainer: Any) -> Iterator[Order]:
        training = trainer.model.training
        most = trainer.num_generations if training else trainer.num_generations_eval
        step = trainer.state.global_step
        place = f"{self._run}/{step}/{'train' if training else 'eval'}/{trainer.accelerator.process_index}"
        if place not in self._batches:
            self._batches.clear()
        self._batches[place] += 1  # a step may take several batches
        model = self._model
        if self._policy is not None or model.source is ModelSource.ENDPOINT:
            model = replace(model, version=model.version or str(step))
        for number, (prompt, size) in enumerate(_count_groups(prompts, most)):
            yield Order(
                key=f"{place}/{self._batches[place]}/{number}",
                instance=self._find_instance(prompt),
                size=size,
                group=GroupTerms() if size > 1 else None,
                model=model,
                **self._options,
            )


def score_rollouts(rollout_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the rewards of the suite; TRL leaves a rollout with None out of its group."""
    return rollout_reward


def _count_groups(prompts: list[Any], most: int) -> Iterator[tuple[Any, int]]:
    """Yield each run of equal prompts as groups of at most `most`."""
    for prompt, run in groupby(prompts):
        left = sum(1 for _ in run)
        while left > 0:
            yield prompt, min(left, most)
            left -= most


def _read_id(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
