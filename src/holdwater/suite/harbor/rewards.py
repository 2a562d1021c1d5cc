"""Parses a verifier's rewards and combines the rewards of steps into one grade. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from ...core.errors import GradeFailed
from ...core.records import Grade
from .records import RewardStrategy

PRIMARY = "reward"
LONGEST_QUOTE = 200  # characters of an invalid reward quoted in a message

Rewards = dict[str, float]


def parse_json_reward(content: bytes, place: str) -> Rewards:
    """Parse `reward.json`: a dict of finite numbers, which may be empty."""
    if not content.strip():
        raise _unusable_reward(place, "it is empty")
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise _unusable_reward(place, f"not JSON: {_quote(content)}") from None
    if not isinstance(found, dict):
        raise _unusable_reward(place, f"expected a dict of numbers, got {_quote(content)}")
    for name, value in found.items():
        if not isinstance(value, int | float) or not _finite(value):
            raise _unusable_reward(
                place, f"`{name[:80]}` is not a finite number: {str(value)[:LONGEST_QUOTE]}"
            )
    return {name: float(value) for name, value in found.items()}


def parse_text_reward(content: bytes, place: str) -> Rewards:
    """Parse `reward.txt`: one finite number."""
    if not content.strip():
        raise _unusable_reward(place, "it is empty")
    try:
        value = float(content)
    except ValueError:
        raise _unusable_reward(place, f"expected a number, got {_quote(content)}") from None
    if not math.isfinite(value):
        raise _unusable_reward(place, f"not a finite number: {_quote(content)}")
    return {PRIMARY: value}


def missing_reward(places: Sequence[str], said: str) -> GradeFailed:
    listed = " nor ".join(f"`{place}`" for place in places)
    return GradeFailed(
        f"the verifier left no reward, neither {listed}: {said or 'it printed nothing'}", kind="reward"
    )


def grade_of(rewards: Mapping[str, float], detail: str) -> Grade:
    """Return the grade: the score is `reward`, or the mean of all rewards. 1 passes; no rewards score 0."""
    score = rewards[PRIMARY] if PRIMARY in rewards else sum(rewards.values()) / max(1, len(rewards))
    return Grade(passed=score >= 1, score=score, detail=detail, metrics=dict(rewards))


def combine_rewards(steps: Sequence[Rewards], strategy: RewardStrategy | None) -> Rewards:
    """Combine the rewards of the verified steps: the last step's, or the mean; a missing key counts as 0."""
    if strategy is RewardStrategy.FINAL:
        return steps[-1]
    names = dict.fromkeys(name for rewards in steps for name in rewards)
    return {name: sum(rewards.get(name, 0.0) for rewards in steps) / len(steps) for name in names}


def short_of(rewards: Rewards, least: Mapping[str, float]) -> bool:
    """Return whether a reward is below the minimum for the next step; a missing one is always below."""
    return any(rewards.get(name, -math.inf) < threshold for name, threshold in least.items())


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _unusable_reward(place: str, problem: str) -> GradeFailed:
    return GradeFailed(f"the verifier's reward cannot be used: `{place}`: {problem}", kind="reward")


def _quote(content: bytes) -> str:
    return repr(content[:LONGEST_QUOTE].decode(errors="replace"))
