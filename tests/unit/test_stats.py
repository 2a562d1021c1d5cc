"""A server's figures: rates of the last minute, percentiles of what was last, and what Prometheus reads."""

from __future__ import annotations

import sys

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from holdwater.core.records import ModelUsage
from holdwater.core.serving_protocol import ServerHealth, ServerStats, TokenFigures
from holdwater.core.summary import RunGauge
from holdwater.run.fleet.interface import FleetCondition
from holdwater.run.orders.metrics import render_metrics
from holdwater.run.orders.stats import RECENT, RecentValues, RollingRate, ServerStatistics

BEGAN = 1_000_000.0
WHY = 'a "quoted" why\n'
HEALTH = ServerHealth(ok=True, state="serving", ready=2, wanted=2)
GAUGE = RunGauge(at=BEGAN, running=3, waiting={"slot": 4, WHY: 1}, workers=3, lag=0.5)
CONDITION = FleetCondition(ready=2, starting=0, draining=1, wanted=2, lost=5, recycled=6)


def shown(statistics: ServerStatistics, at: float) -> ServerStats:
    return statistics.snapshot(at, HEALTH, GAUGE, CONDITION, held=7, open=2)


def test_a_rate_is_that_of_the_last_minute() -> None:
    rate = RollingRate(BEGAN)
    for second in range(300):
        rate.add(BEGAN + second + 0.5, 2)
    assert rate.per_second(BEGAN + 299.9) == 2.0
    assert 0.9 < rate.per_second(BEGAN + 329.9) < 1.1, "half of it is nothing"
    assert rate.per_second(BEGAN + 400) == 0.0
    assert rate.per_second(BEGAN + 1e9) == 0.0, "however long nobody asked"


def test_a_young_server_divides_by_its_age_and_tolerates_clock_changes() -> None:
    rate = RollingRate(BEGAN)
    rate.add(BEGAN + 1, 20)
    assert rate.per_second(BEGAN + 10) == 2.0
    rate.add(BEGAN - 3600, 20)
    assert rate.per_second(BEGAN + 10) == 4.0


def test_percentiles_are_of_the_last_values() -> None:
    recent = RecentValues()
    assert recent.percentiles() == {}
    for value in [1e6] * 100 + [float(n) for n in range(1, RECENT + 1)]:
        recent.add(value)
    assert recent.percentiles() == {"p50": 512.0, "p90": 922.0, "p95": 973.0, "p99": 1014.0}


def test_usage_counts_once_in_the_rate_despite_a_momentary_drop() -> None:
    statistics = ServerStatistics(BEGAN)
    statistics.record_usage(
        BEGAN, ModelUsage(requests=1000, input_tokens=10**6)
    )  # by earlier servers of this run
    statistics.record_usage(BEGAN + 10, ModelUsage(requests=1060, input_tokens=10**6 + 600))
    statistics.record_usage(BEGAN + 11, ModelUsage(requests=1020))
    statistics.record_usage(BEGAN + 12, ModelUsage(requests=1060, input_tokens=10**6 + 600))
    assert shown(statistics, BEGAN + 60).turns_per_second == 1.0
    assert shown(statistics, BEGAN + 60).tokens_per_second == 10.0

    statistics.record_usage(
        BEGAN + 61, ModelUsage(requests=900)
    )  # a worker is lost, with what its attempts had used
    statistics.record_usage(BEGAN + 70, ModelUsage(requests=910))
    statistics.record_usage(BEGAN + 71, ModelUsage(requests=970))
    assert shown(statistics, BEGAN + 71).turns_per_second == 1.0
    assert shown(statistics, BEGAN + 71).usage == ModelUsage(requests=970)


def test_statistics_show_every_count() -> None:
    statistics = ServerStatistics(BEGAN, {"passed": 10})
    for _ in range(3):
        statistics.count_order()
    statistics.count_refusal("busy")
    statistics.count_refusal("conflict")
    statistics.count_start(0.25)
    statistics.count_finish(BEGAN + 1, 9.0, "passed")
    statistics.count_finish(BEGAN + 2, 9.0, "agent")

    stats = shown(statistics, BEGAN + 60)

    assert stats.orders == {"open": 2, "accepted": 3, "refused": 2, "refused.busy": 1, "refused.conflict": 1}
    assert stats.rollouts == {"passed": 11, "agent": 1}
    assert stats.uptime == 60 and stats.rollouts_per_second == 2 / 60
    assert stats.latency["p99"] == 9.0 and stats.waited["p50"] == 0.25
    assert (stats.running, stats.held, stats.workers, stats.draining) == (3, 7, 3, 1)
    assert (stats.lost, stats.recycled, stats.lag) == (5, 6, 0.5)


def test_prometheus_reads_every_figure() -> None:
    statistics = ServerStatistics(BEGAN)
    statistics.count_order()
    statistics.count_refusal("busy")
    statistics.count_start(0.25)
    statistics.count_finish(BEGAN + 1, 9.0, "passed")
    statistics.record_usage(
        BEGAN, ModelUsage(requests=4, input_tokens=30, output_tokens=5), ModelUsage(requests=2)
    )

    text = render_metrics(shown(statistics, BEGAN + 60)).decode()

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
    assert render_metrics(shown(statistics, BEGAN + 60)).decode() == text, (
        "nothing is kept between two readings"
    )


def test_figures_take_no_more_memory_after_a_hundred_thousand_rollouts() -> None:
    statistics = ServerStatistics(BEGAN)

    def play(count: int) -> int:
        for n in range(count):
            statistics.count_finish(BEGAN + n / 10, float(n), "passed")
            statistics.count_start(float(n))
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


def test_the_figures_of_tokens_are_metrics() -> None:
    starts = {"first": 2, "branch": 1, "retokenized": 3}
    figures = TokenFigures(replies=10, sampled=70, starts=starts, breaks=0.375, version=5, stale=1)
    stats = shown(ServerStatistics(BEGAN), BEGAN)
    text = render_metrics(msgspec.structs.replace(stats, tokens=figures)).decode()

    assert 'holdwater_token_sequences_total{start="retokenized"} 3.0' in text
    assert "holdwater_token_breaks 0.375" in text
    assert "holdwater_policy_version 5.0" in text
    assert "holdwater_rollouts_stale_total 1.0" in text
