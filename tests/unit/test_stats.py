"""A server's figures: rates of the last minute, percentiles of what was last, and what Prometheus reads."""

from __future__ import annotations

import sys

from prometheus_client.parser import text_string_to_metric_families

from holdwater.core.records import Usage
from holdwater.core.serving import Health, Stats
from holdwater.core.summary import Gauge
from holdwater.run.fleet import Condition
from holdwater.run.metrics import exposition
from holdwater.run.stats import RECENT, Rate, Recent, Statistics

BEGAN = 1_000_000.0
WHY = 'a "quoted" why\n'
HEALTH = Health(ok=True, state="serving", ready=2, wanted=2)
GAUGE = Gauge(at=BEGAN, running=3, waiting={"slot": 4, WHY: 1}, workers=3, lag=0.5)
CONDITION = Condition(ready=2, starting=0, draining=1, wanted=2, lost=5, recycled=6)


def shown(statistics: Statistics, at: float) -> Stats:
    return statistics.stats(at, HEALTH, GAUGE, CONDITION, held=7, open=2)


def test_a_rate_is_that_of_the_last_minute() -> None:
    rate = Rate(BEGAN)
    for second in range(300):
        rate.add(BEGAN + second + 0.5, 2)
    assert rate.per_second(BEGAN + 299.9) == 2.0
    assert 0.9 < rate.per_second(BEGAN + 329.9) < 1.1, "half of it is nothing"
    assert rate.per_second(BEGAN + 400) == 0.0
    assert rate.per_second(BEGAN + 1e9) == 0.0, "however long nobody asked"


def test_a_young_server_divides_by_its_age_and_a_clock_that_is_set_back_hurts_nobody() -> None:
    rate = Rate(BEGAN)
    rate.add(BEGAN + 1, 20)
    assert rate.per_second(BEGAN + 10) == 2.0
    rate.add(BEGAN - 3600, 20)
    assert rate.per_second(BEGAN + 10) == 4.0


def test_percentiles_are_of_the_last_values() -> None:
    recent = Recent()
    assert recent.percentiles() == {}
    for value in [1e6] * 100 + [float(n) for n in range(1, RECENT + 1)]:
        recent.add(value)
    assert recent.percentiles() == {"p50": 512.0, "p90": 922.0, "p95": 973.0, "p99": 1014.0}


def test_what_is_used_is_a_rate_once_though_an_attempts_usage_is_nowhere_for_a_moment() -> None:
    statistics = Statistics(BEGAN)
    statistics.used(BEGAN, Usage(requests=1000, input_tokens=10**6))  # by earlier servers of this run
    statistics.used(BEGAN + 10, Usage(requests=1060, input_tokens=10**6 + 600))
    statistics.used(BEGAN + 11, Usage(requests=1020))
    statistics.used(BEGAN + 12, Usage(requests=1060, input_tokens=10**6 + 600))
    assert shown(statistics, BEGAN + 60).turns_per_second == 1.0
    assert shown(statistics, BEGAN + 60).tokens_per_second == 10.0

    statistics.used(BEGAN + 61, Usage(requests=900))  # a worker is lost, with what its attempts had used
    statistics.used(BEGAN + 70, Usage(requests=910))
    statistics.used(BEGAN + 71, Usage(requests=970))
    assert shown(statistics, BEGAN + 71).turns_per_second == 1.0
    assert shown(statistics, BEGAN + 71).usage == Usage(requests=970)


def test_what_is_counted_is_shown() -> None:
    statistics = Statistics(BEGAN, {"passed": 10})
    for _ in range(3):
        statistics.ordered()
    statistics.refused("busy")
    statistics.refused("conflict")
    statistics.started(0.25)
    statistics.finished(BEGAN + 1, 9.0, "passed")
    statistics.finished(BEGAN + 2, 9.0, "agent")

    stats = shown(statistics, BEGAN + 60)

    assert stats.orders == {"open": 2, "accepted": 3, "refused": 2, "refused.busy": 1, "refused.conflict": 1}
    assert stats.rollouts == {"passed": 11, "agent": 1}
    assert stats.uptime == 60 and stats.rollouts_per_second == 2 / 60
    assert stats.latency["p99"] == 9.0 and stats.waited["p50"] == 0.25
    assert (stats.running, stats.held, stats.workers, stats.draining) == (3, 7, 3, 1)
    assert (stats.lost, stats.recycled, stats.lag) == (5, 6, 0.5)


def test_prometheus_reads_every_figure() -> None:
    statistics = Statistics(BEGAN)
    statistics.ordered()
    statistics.refused("busy")
    statistics.started(0.25)
    statistics.finished(BEGAN + 1, 9.0, "passed")
    statistics.used(BEGAN, Usage(requests=4, input_tokens=30, output_tokens=5), Usage(requests=2))

    text = exposition(shown(statistics, BEGAN + 60)).decode()

    families = list(text_string_to_metric_families(text))
    read = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert read["holdwater_rollouts_total", "passed"] == 1
    assert read["holdwater_orders_refused_total", "busy"] == 1
    assert read["holdwater_rollouts_waiting", WHY] == 1
    assert read["holdwater_rollout_latency_seconds", "0.99"] == 9.0
    assert read["holdwater_rollout_wait_seconds", "0.5"] == 0.25
    assert read["holdwater_tokens_total", "input"] == 30
    assert read["holdwater_saved_model_calls_total",] == 2
    assert read["holdwater_workers_lost_total",] == 5
    assert read["holdwater_loop_lag_seconds",] == 0.5
    assert read["holdwater_state", "serving"] == 1
    assert all(family.name.startswith("holdwater_") and family.documentation for family in families)
    assert exposition(shown(statistics, BEGAN + 60)).decode() == text, "nothing is kept between two readings"


def test_figures_take_no_more_memory_after_a_hundred_thousand_rollouts() -> None:
    statistics = Statistics(BEGAN)

    def play(count: int) -> int:
        for n in range(count):
            statistics.finished(BEGAN + n / 10, float(n), "passed")
            statistics.started(float(n))
        return sum(sys.getsizeof(part) for part in _parts(statistics))

    early = play(2 * RECENT)
    assert play(100_000) <= early + 64  # an integer may have grown


def _parts(thing: object) -> list[object]:
    """Everything that hangs on it."""
    parts: list[object] = []
    for value in vars(thing).values() if hasattr(thing, "__dict__") else ():
        inner = list(value) if isinstance(value, list | dict) or hasattr(value, "maxlen") else []
        parts += [value, *inner, *_parts(value)]
    return parts
