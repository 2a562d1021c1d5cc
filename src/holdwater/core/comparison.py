"""Compares two runs of one suite: fixed and broken instances, and the paired difference with its interval.

Pure statistics over the scores of matched instances. `api/comparison.py` reads the runs.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from msgspec import field, structs

from .branch_tree import BranchTree
from .fork_origin import ForkOrigin
from .record import Record
from .records import NO_USAGE, ModelUsage
from .summary import PassCounts, PassRate, Z, compute_pass_rates, estimate_pass

RESAMPLES = 2000
FLIPS = 20_000
MOST_RESAMPLED = 5000  # instances; from there on the mean is normal, and a resample would take too long
SEED = 20  # the same runs give the same interval
POWER_Z = 0.8416212335729143  # 80 % of a normal distribution are below so many standard deviations
BOOTSTRAP = "bootstrap over instances"
VISIBLE = 0.03  # the difference that `more_samples` is about


class InstanceScores(NamedTuple):
    """The closed samples of one instance in one run."""

    digest: bytes
    scored: int = 0
    passed: int = 0
    total: float = 0.0  # the sum of the scores
    unscored: int = 0  # samples that ended without a score

    @property
    def share(self) -> float:
        return self.passed / self.scored

    @property
    def mean(self) -> float:
        return self.total / self.scored


RunScores = Mapping[str, InstanceScores]
"""Instance id -> its scores."""


class PairedDifference(Record, frozen=True):
    """The mean over instances of (other run - baseline), with its 95 % interval and p-value."""

    difference: float
    interval: tuple[float, float]
    p: float
    method: str


class TagComparison(Record, frozen=True):
    """The instances with one tag."""

    tag: str
    instances: int
    baseline: float  # the mean share of passed samples
    other: float
    difference: float
    interval: tuple[float, float]


class RunComparison(Record, frozen=True):
    """One run against a baseline, over the instances that both have with the same content."""

    baseline: str  # directories
    run: str
    fixed: tuple[str, ...] = ()  # at least half of the samples pass, in the baseline fewer
    broken: tuple[str, ...] = ()
    same: int = 0
    unscored: tuple[str, ...] = ()  # without a scored sample in one of the runs: left out
    changed: tuple[str, ...] = ()  # same id, other content: left out
    missing: tuple[str, ...] = ()  # in the baseline alone: left out
    added: tuple[str, ...] = ()  # in the other run alone: left out
    matrix: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # baseline's result -> other's -> instances
    instances: int = 0  # that are compared
    difference: float | None = None  # of the shares of passed samples; None: no instance is compared
    interval: tuple[float, float] | None = None
    p: float | None = None
    method: str = ""
    score: PairedDifference | None = None  # of the scores, if they are not just 0 and 1
    # Further samples of each instance, in each run, that would show a difference of 3 points (80 % power).
    more_samples: int | None = None
    tags: tuple[TagComparison, ...] = ()

    def is_worse(self, tolerance: float) -> bool:
        """Return whether the whole interval is below `-tolerance`."""
        return self.interval is not None and self.interval[1] < -tolerance


class RunFigures(Record, frozen=True):
    """One of the compared runs."""

    run: str  # its directory
    suite: str
    agent: str
    model: str | None
    state: str
    samples: int  # of each instance
    settled: int
    outcomes: dict[str, int]
    score: float | None
    pass_at: tuple[PassRate, ...]
    usage: ModelUsage = NO_USAGE
    cost: float | None = None
    seconds: float = 0.0
    fork: ForkOrigin | None = None  # the attempt that it repeats up to a turn


class ComparisonReport(RunComparison, frozen=True, kw_only=True):
    """The output of `compare --json`: the first two runs, and each further run against the first."""

    runs: tuple[RunFigures, ...]
    others: tuple[RunComparison, ...] = ()
    branches: tuple[BranchTree, ...] = ()  # of attempts of the compared runs, in the compared forks of them


def compare_scores(
    baseline: RunScores,
    other: RunScores,
    names: tuple[str, str],
    tags: Mapping[str, Sequence[str]] | None = None,
) -> RunComparison:
    """Compare two runs; `tags` has the tags of each instance."""
    both = [name for name in baseline if name in other]
    matched = [name for name in both if baseline[name].digest == other[name].digest]
    pairs = {
        name: (baseline[name], other[name])
        for name in matched
        if baseline[name].scored and other[name].scored
    }
    verdicts = {name: (_passes(a), _passes(b)) for name, (a, b) in pairs.items()}
    comparison = RunComparison(
        baseline=names[0],
        run=names[1],
        fixed=tuple(name for name, pair in verdicts.items() if pair == (False, True)),
        broken=tuple(name for name, pair in verdicts.items() if pair == (True, False)),
        same=sum(a == b for a, b in verdicts.values()),
        unscored=tuple(name for name in matched if name not in pairs),
        changed=tuple(name for name in both if baseline[name].digest != other[name].digest),
        missing=tuple(name for name in baseline if name not in other),
        added=tuple(name for name in other if name not in baseline),
        matrix=_count_results(baseline, other, matched),
        instances=len(pairs),
    )
    return _add_differences(comparison, pairs, tags or {}) if pairs else comparison


Pairs = Mapping[str, tuple[InstanceScores, InstanceScores]]


def _add_differences(
    comparison: RunComparison, pairs: Pairs, tags: Mapping[str, Sequence[str]]
) -> RunComparison:
    shares = measure_shares(pairs.values())
    graded = any(a.total != a.passed or b.total != b.passed for a, b in pairs.values())
    fields = {name: getattr(comparison, name) for name in RunComparison.__struct_fields__}
    fields |= {name: getattr(shares, name) for name in PairedDifference.__struct_fields__}
    fields["score"] = estimate_difference([b.mean - a.mean for a, b in pairs.values()]) if graded else None
    fields["more_samples"] = count_more_samples(list(pairs.values()))
    fields["tags"] = tuple(_compare_tags(pairs, tags))
    return RunComparison(**fields)


def _passes(scores: InstanceScores) -> bool:
    return 2 * scores.passed >= scores.scored and scores.passed > 0


def _count_results(
    baseline: RunScores, other: RunScores, matched: Iterable[str]
) -> dict[str, dict[str, int]]:
    counts = Counter((_name_result(baseline[name]), _name_result(other[name])) for name in matched)
    results = ("passed", "failed", "not scored")
    return {a: {b: counts[a, b] for b in results} for a in results}


def _name_result(scores: InstanceScores) -> str:
    if not scores.scored:
        return "not scored"
    return "passed" if _passes(scores) else "failed"


def _compare_tags(pairs: Pairs, tags: Mapping[str, Sequence[str]]) -> Iterable[TagComparison]:
    members: dict[str, list[tuple[InstanceScores, InstanceScores]]] = {}
    for name, pair in pairs.items():
        for tag in dict.fromkeys(tags.get(name, ())):
            members.setdefault(tag, []).append(pair)
    for tag, tagged in sorted(members.items(), key=lambda item: (-len(item[1]), item[0])):
        found = measure_shares(tagged)
        yield TagComparison(
            tag=tag,
            instances=len(tagged),
            baseline=math.fsum(a.share for a, _ in tagged) / len(tagged),
            other=math.fsum(b.share for _, b in tagged) / len(tagged),
            difference=found.difference,
            interval=found.interval,
        )


def measure_shares(pairs: Iterable[tuple[InstanceScores, InstanceScores]]) -> PairedDifference:
    """Return the difference of the shares of passed samples; instances are the independent units."""
    listed = list(pairs)
    if all(a.scored == b.scored == 1 for a, b in listed):
        fixed = sum(b.passed > a.passed for a, b in listed)
        broken = sum(b.passed < a.passed for a, b in listed)
        return compare_single_samples(len(listed), fixed, broken)
    return estimate_difference([b.share - a.share for a, b in listed])


def compare_single_samples(instances: int, fixed: int, broken: int) -> PairedDifference:
    """Return the difference of two shares over the same instances, one sample of each.

    The interval is Bonett and Price's: it has two more instances, of which one is fixed and one broken.
    """
    size = instances + 2
    centre = (fixed - broken) / size
    spread = math.sqrt(((fixed + broken + 2) / size - centre * centre) / size)
    low, high = max(-1.0, centre - Z * spread), min(1.0, centre + Z * spread)
    p = compute_mcnemar(fixed, broken)
    method = "McNemar's exact test, Bonett-Price interval"
    return PairedDifference((fixed - broken) / instances, (low, high), p, method)


def compute_mcnemar(fixed: int, broken: int) -> float:
    """Return the two-sided p-value of McNemar's exact test."""
    changed = fixed + broken
    if not changed:
        return 1.0
    scale = changed * math.log(2)
    tail = math.fsum(
        math.exp(_log_choose(changed, number) - scale) for number in range(min(fixed, broken) + 1)
    )
    return min(1.0, 2 * tail)


def _log_choose(size: int, number: int) -> float:
    return math.lgamma(size + 1) - math.lgamma(number + 1) - math.lgamma(size - number + 1)


def estimate_difference(differences: Sequence[float]) -> PairedDifference:
    """Return the mean difference of instances with its interval and the p-value of a sign-flip test."""
    low, high, method = estimate_interval(differences)
    counts = Counter(round(value, 12) for value in differences)
    mean = math.fsum(differences) / len(differences)
    return PairedDifference(mean, (low, high), compute_sign_test(counts), f"{method}, sign-flip test")


def estimate_interval(differences: Sequence[float]) -> tuple[float, float, str]:
    """Return the 95 % interval of the mean difference, and its method.

    Student's t holds the truth more often than bootstraps of the same width, also with few instances.
    """
    size = len(differences)
    mean = math.fsum(differences) / size
    if max(differences) - min(differences) < 1e-12:  # at most this share of instances differs unseen
        half, method = min(1.0, 3 / size), "rule of three"
    else:
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (size - 1) / size)
        half, method = _student_quantile(size - 1) * spread, "Student's t over instances"
    return mean - half, mean + half, method


def bootstrap_pass_rates(scored: PassCounts) -> tuple[PassRate, ...]:
    """Return pass@1, pass@2 and so on, each with the interval of a bootstrap over instances.

    A resample draws instances, each with all its samples: they are no independent trials. A `k` for which all
    instances agree keeps Wilson's interval, because no resample differs.
    """
    if sum(scored.values()) > MOST_RESAMPLED:
        return tuple(_widen_normally(rate, scored) for rate in compute_pass_rates(scored))
    cells, weights = list(scored), list(accumulate(scored.values()))
    chance = random.Random(SEED)
    draws = [
        Counter(chance.choices(range(len(cells)), cum_weights=weights, k=weights[-1]))
        for _ in range(RESAMPLES if cells else 0)
    ]
    return tuple(_resample_rate(rate, cells, draws) for rate in compute_pass_rates(scored))


def _resample_rate(
    rate: PassRate, cells: Sequence[tuple[int, int]], draws: Iterable[Mapping[int, int]]
) -> PassRate:
    values = {place: estimate_pass(n, c, rate.k) for place, (n, c) in enumerate(cells) if n >= rate.k}
    if len(set(values.values())) == 1:
        return rate
    means = []
    for draw in draws:
        size = sum(count for place, count in draw.items() if place in values)
        if size:
            total = math.fsum(values[place] * count for place, count in draw.items() if place in values)
            means.append(total / size)
    low, high = _expand_percentiles(sorted(means), rate.value, rate.instances)
    return structs.replace(rate, low=max(0.0, low), high=min(1.0, high), method=BOOTSTRAP)


def _widen_normally(rate: PassRate, scored: PassCounts) -> PassRate:
    """Return the rate with the normal interval: the mean of so many instances is normal."""
    cells = [(estimate_pass(n, c, rate.k), count) for (n, c), count in scored.items() if n >= rate.k]
    spread = math.fsum(count * (value - rate.value) ** 2 for value, count in cells)
    half = Z * math.sqrt(spread / max(1, rate.instances - 1) / rate.instances)
    if not half:
        return rate
    low, high = max(0.0, rate.value - half), min(1.0, rate.value + half)
    return structs.replace(rate, low=low, high=high, method="normal interval over instances")


def _expand_percentiles(means: Sequence[float], mean: float, size: int) -> tuple[float, float]:
    """Return the 95 % interval of sorted means of resamples of `size` values.

    The percentiles are expanded as for Student's t: few instances would give too narrow an interval.
    """
    expansion = math.sqrt(size / (size - 1)) * _student_quantile(size - 1) / Z
    low, high = means[int(0.025 * len(means))], means[int(0.975 * len(means)) - 1]
    return mean + (low - mean) * expansion, mean + (high - mean) * expansion


def _student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t by the expansion of Cornish and Fisher."""
    z = Z
    terms = (
        z,
        (z**3 + z) / (4 * freedom),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3),
    )
    return math.fsum(terms)


def compute_sign_test(counts: Mapping[float, int]) -> float:
    """Return the two-sided p-value of the sum, if each difference could as well have the other sign."""
    sizes: Counter[float] = Counter()
    for value, count in counts.items():
        sizes[abs(value)] += count
    sizes.pop(0.0, None)
    if not sizes:
        return 1.0
    seen = abs(math.fsum(value * count for value, count in counts.items()))
    chance = random.Random(SEED)
    extreme = sum(_flip_signs(sizes, chance) >= seen - 1e-9 for _ in range(FLIPS))
    return (extreme + 1) / (FLIPS + 1)


def _flip_signs(sizes: Mapping[float, int], chance: random.Random) -> float:
    positive = ((value, count, chance.getrandbits(count).bit_count()) for value, count in sizes.items())
    return abs(math.fsum(value * (2 * heads - count) for value, count, heads in positive))


def count_more_samples(pairs: Sequence[tuple[InstanceScores, InstanceScores]]) -> int | None:
    """Return how many more samples of each instance would show a difference of `VISIBLE`, in both runs.

    The instances are fixed, so only the chance within them counts: the share of passes of one instance
    varies with p (1 - p) / samples. With one sample of each, the instances that changed estimate that.
    """
    size = len(pairs)
    samples = min(min(a.scored, b.scored) for a, b in pairs)
    if samples == 1:
        noise = math.fsum((b.share - a.share) ** 2 for a, b in pairs) / size
    else:
        noise = math.fsum(_variance(a) + _variance(b) for a, b in pairs) / size
    needed = math.ceil(noise * ((Z + POWER_Z) / VISIBLE) ** 2 / size)
    return max(0, needed - samples)


def _variance(scores: InstanceScores) -> float:
    """Return the unbiased variance of one sample of the instance."""
    return scores.share * (1 - scores.share) * scores.scored / (scores.scored - 1)
