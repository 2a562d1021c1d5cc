"""What a verifier wrote as a reward, and how the rewards of steps become one grade. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from ...core.errors import GradeFailed
from ...core.records import Grade
from .records import Strategy

PRIMARY = "reward"
LONGEST = 200  # characters of a wrong reward that a message quotes

Rewards = dict[str, float]


def of_json(content: bytes, place: str) -> Rewards:
    """`reward.json`: a dict of finite numbers, which may be empty."""
    if not content.strip():
        raise _unusable(place, "it is empty")
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise _unusable(place, f"not JSON: {_quoted(content)}") from None
    if not isinstance(found, dict):
        raise _unusable(place, f"expected a dict of numbers, got {_quoted(content)}")
    for name, value in found.items():
        if not isinstance(value, int | float) or not _finite(value):
            raise _unusable(place, f"`{name[:80]}` is no finite number: {str(value)[:LONGEST]}")
    return {name: float(value) for name, value in found.items()}


def of_text(content: bytes, place: str) -> Rewards:
    """`reward.txt`: one finite number."""
    if not content.strip():
        raise _unusable(place, "it is empty")
    try:
        value = float(content)
    except ValueError:
        raise _unusable(place, f"expected a number, got {_quoted(content)}") from None
    if not math.isfinite(value):
        raise _unusable(place, f"no finite number: {_quoted(content)}")
    return {PRIMARY: value}


def missing(places: Sequence[str], said: str) -> GradeFailed:
    listed = " nor ".join(f"`{place}`" for place in places)
    return GradeFailed(
        f"the verifier left no reward, neither {listed}: {said or 'it printed nothing'}", kind="reward"
    )


def grade_of(rewards: Mapping[str, float], detail: str) -> Grade:
    """The grade: what is called `reward`, or the mean of all where nothing is. 1 passes; no reward is 0."""
    score = rewards[PRIMARY] if PRIMARY in rewards else sum(rewards.values()) / max(1, len(rewards))
    return Grade(passed=score >= 1, score=score, detail=detail, metrics=dict(rewards))


def combined(steps: Sequence[Rewards], strategy: Strategy | None) -> Rewards:
    """One reward of those of the verified steps: the last, or the mean, in which a missing key is 0."""
    if strategy is Strategy.FINAL:
        return steps[-1]
    names = dict.fromkeys(name for rewards in steps for name in rewards)
    return {name: sum(rewards.get(name, 0.0) for rewards in steps) / len(steps) for name in names}


def short_of(rewards: Rewards, least: Mapping[str, float]) -> bool:
    """Whether a reward is below what the next step needs; one that is not there is below anything."""
    return any(rewards.get(name, -math.inf) < threshold for name, threshold in least.items())


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can be
        return False


def _unusable(place: str, problem: str) -> GradeFailed:
    return GradeFailed(f"the verifier's reward cannot be used: `{place}`: {problem}", kind="reward")


def _quoted(content: bytes) -> str:
    return repr(content[:LONGEST].decode(errors="replace"))
