"""A server's figures as Prometheus reads them: `Stats` in its text format, by its own library.

Each time anew from the record: there is no registry that outlives it. What is counted is in `stats.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.records import Usage
from ..core.serving import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REFUSED = "refused."  # what the count of orders that were refused with a code begins with


def exposition(stats: Stats) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Figures(stats))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from _health(self._stats)
        yield from _rollouts(self._stats)
        yield from _model(self._stats)
        yield from _machine(self._stats)


def _health(stats: Stats) -> Iterator[Metric]:
    health = stats.health
    yield _gauge("healthy", "Whether orders are taken and a worker is ready for them.", health.ok)
    yield _gauges("state", "The server's state.", "state", {health.state: 1})
    yield _gauge("uptime_seconds", "Since the server began.", stats.uptime)
    yield _gauge("workers", "Worker processes.", stats.workers)
    yield _gauge("workers_ready", "Workers that take rollouts.", health.ready)
    yield _gauge("workers_wanted", "Workers that there should be.", health.wanted)
    yield _gauge("workers_draining", "Workers that leave when they are empty.", stats.draining)
    yield _counter("workers_lost", "Workers that died or hung.", stats.lost)
    yield _counter("workers_recycled", "Workers that were drained and replaced.", stats.recycled)


def _rollouts(stats: Stats) -> Iterator[Metric]:
    codes = {key.removeprefix(REFUSED): n for key, n in stats.orders.items() if key.startswith(REFUSED)}
    yield _gauge("orders_open", "Orders that are not over.", stats.orders.get("open", 0))
    yield _counter("orders_accepted", "Orders that were taken.", stats.orders.get("accepted", 0))
    yield _counters("orders_refused", "Orders that were not taken.", "code", codes)
    yield _counters("rollouts", "Rollouts that are over.", "outcome", stats.rollouts)
    yield _gauge("rollouts_running", "Rollouts that have what they need.", stats.running)
    yield _gauges("rollouts_waiting", "Rollouts that wait, and for what.", "why", stats.waiting)
    latency, waited = _quantiles(stats.latency), _quantiles(stats.waited)
    yield _gauges("rollout_latency_seconds", "From order to result, of the last ones.", "quantile", latency)
    yield _gauges("rollout_wait_seconds", "From order to start, of the last ones.", "quantile", waited)
    for what in ("rollouts", "turns", "tokens"):
        rate = getattr(stats, f"{what}_per_second")
        yield _gauge(f"{what}_per_second", "In the last minute.", rate)


def _model(stats: Stats) -> Iterator[Metric]:
    yield _gauge("calls_held", "Model calls that wait for a trainer's answer.", stats.held)
    for prefix, usage in (("", stats.usage), ("saved_", stats.saved)):
        how = "Answered from the record." if prefix else "Paid for."
        yield _counter(f"{prefix}model_calls", f"Model calls. {how}", usage.requests)
        yield _counters(f"{prefix}tokens", f"Tokens. {how}", "kind", _tokens(usage))
    yield _counter("cost_dollars", "What calls of known cost have cost.", stats.usage.nanodollars / 1e9)


def _machine(stats: Stats) -> Iterator[Metric]:
    yield _gauge("loop_lag_seconds", "The longest lag of an event loop.", stats.lag)
    yield _gauge("memory_bytes", "Memory of the server and its workers.", stats.memory)
    yield _gauge("memory_limit_bytes", "Memory that they could use.", stats.memory_limit)
    yield _gauge("disk_free_bytes", "Free disk for the run.", stats.disk_free)


def _tokens(usage: Usage) -> dict[str, int]:
    return {
        "input": usage.input_tokens,
        "cached": usage.cached_tokens,
        "output": usage.output_tokens,
        "reasoning": usage.reasoning_tokens,
    }


def _quantiles(percentiles: Mapping[str, float]) -> dict[str, float]:
    return {f"{int(name.removeprefix('p')) / 100:g}": value for name, value in percentiles.items()}


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"holdwater_{name}", what, value=value)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(f"holdwater_{name}", what, value=value)


def _gauges(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"holdwater_{name}", what, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def _counters(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"holdwater_{name}", what, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family
