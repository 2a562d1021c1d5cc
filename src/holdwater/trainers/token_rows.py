"""Makes rows of rollouts, as trainers take them: prompt, response, mask and log probabilities as lists.

The adapters beside it pass the rows on. `core/token_sequences.py` has the sequences that the rows come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..client import OrderResult, Rollout
from ..core.errors import BadInput
from ..core.token_sequences import TokenSequence


class TokenRow(NamedTuple):
    """One row of a trainer's batch; the response begins with the first sampled token."""

    prompt: list[int]
    response: list[int]
    mask: list[int]  # for the response; 1: sampled by the model
    logprobs: list[float]  # for the response; 0.0 where the mask is 0, NaN where the upstream sent none
    versions: tuple[str, ...] = ()  # of the policies that sampled it
    left_out: int = 0  # sampled tokens of the rollout that are not in this row

    @property
    def known_logprobs(self) -> list[float] | None:
        """The log probabilities, or None if one is missing."""
        return self.logprobs if all(map(math.isfinite, self.logprobs)) else None

    def cut(self, prompt: int, response: int) -> TokenRow:
        """Return the end of the prompt and the beginning of the response, at most so many tokens."""
        return self._replace(
            prompt=self.prompt[-prompt:],
            response=self.response[:response],
            mask=self.mask[:response],
            logprobs=self.logprobs[:response],
        )


def make_row(rollout: Rollout, empty: int) -> TokenRow:
    """Return the rollout as one row: its sequence with the most sampled tokens.

    A rollout without tokens gives a row of the token `empty` alone, with the mask 0.
    """
    sequences = rollout.sequences()
    if not sequences:
        return TokenRow([empty], [empty], [0], [0.0])
    longest = max(sequences, key=_count_sampled)
    left_out = sum(map(_count_sampled, sequences)) - _count_sampled(longest)
    return _split(longest)._replace(left_out=left_out)


def list_sequence_rows(rollout: Rollout) -> Iterator[TokenRow]:
    """Yield a row for each sequence: every sampled token is in one of them."""
    return map(_split, filter(_count_sampled, rollout.sequences()))


def list_turn_rows(rollout: Rollout) -> Iterator[TokenRow]:
    """Yield a row for each sampled reply, for step-wise training."""
    for sequence in rollout.sequences():
        for turn in sequence.turns():
            ids, logprobs = turn.completion.tolist(), turn.logprobs.tolist()
            yield TokenRow(turn.prompt.tolist(), ids, [1] * len(ids), logprobs, (turn.version,))


def require_tokens(results: Iterable[OrderResult]) -> list[Rollout]:
    """Return all rollouts; raise if some were scored and none has token ids: nothing could be learned."""
    rollouts = [rollout for result in results for rollout in result.rollouts]
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if scored and not any(rollout.sequences() for rollout in scored):
        raise BadInput(
            f"no token ids in {len(scored)} scored rollouts",
            "use a `TokenPolicy`, or an endpoint that returns `prompt_token_ids` and `token_ids`",
        )
    return rollouts


def _split(sequence: TokenSequence) -> TokenRow:
    first = sequence.prompt
    return TokenRow(
        sequence.ids[:first].tolist(),
        sequence.ids[first:].tolist(),
        sequence.mask[first:].tolist(),
        sequence.logprobs[first:].tolist(),
        sequence.versions,
    )


def _count_sampled(sequence: TokenSequence) -> int:
    return sum(sequence.mask)
