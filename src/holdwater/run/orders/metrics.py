"""Renders `ServerStats` in the text format of Prometheus, with its own client library.

Each rendering starts from the record: no registry outlives it. `stats.py` does the counting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...core.endpoints import EndpointState
from ...core.records import ModelUsage
from ...core.serving_protocol import ServerStats, TokenFigures

REFUSED = "refused."  # prefix of the counts of refused orders, before the code


def render_metrics(stats: ServerStats) -> bytes:
    registry = CollectorRegistry()
    registry.register(_StatsCollector(stats))
    return generate_latest(registry)


class _StatsCollector(Collector):
    def __init__(self, stats: ServerStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from _health(self._stats)
        yield from _rollouts(self._stats)
        yield from _model(self._stats)
        yield from _endpoints(self._stats)
        yield from _sequences(self._stats.tokens)
        yield from _machine(self._stats)


def _health(stats: ServerStats) -> Iterator[Metric]:
    health = stats.health
    yield _gauge("healthy", "Whether orders are accepted and a worker is ready.", health.ok)
    yield _gauges("state", "The server's state.", "state", {health.state: 1})
    yield _gauge("uptime_seconds", "Seconds since the server started.", stats.uptime)
    yield _gauge("workers", "Worker processes.", stats.workers)
    yield _gauge("workers_ready", "Workers that take rollouts.", health.ready)
    yield _gauge("workers_wanted", "Target number of workers.", health.wanted)
    yield _gauge("workers_draining", "Workers that exit when they are empty.", stats.draining)
    yield _counter("workers_lost", "Workers that died or hung.", stats.lost)
    yield _counter("workers_recycled", "Workers that were drained and replaced.", stats.recycled)


def _rollouts(stats: ServerStats) -> Iterator[Metric]:
    codes = {key.removeprefix(REFUSED): n for key, n in stats.orders.items() if key.startswith(REFUSED)}
    yield _gauge("orders_open", "Orders that are not finished.", stats.orders.get("open", 0))
    yield _counter("orders_accepted", "Accepted orders.", stats.orders.get("accepted", 0))
    yield _counters("orders_refused", "Refused orders, by code.", "code", codes)
    yield _counters("rollouts", "Finished rollouts, by outcome.", "outcome", stats.rollouts)
    yield _gauge("rollouts_running", "Running rollouts.", stats.running)
    yield _gauges("rollouts_waiting", "Waiting rollouts, by reason.", "why", stats.waiting)
    latency, waited = _quantiles(stats.latency), _quantiles(stats.waited)
    yield _gauges(
        "rollout_latency_seconds", "Time from order to result, recent rollouts.", "quantile", latency
    )
    yield _gauges("rollout_wait_seconds", "Time from order to start, recent rollouts.", "quantile", waited)
    for what in ("rollouts", "turns", "tokens"):
        rate = getattr(stats, f"{what}_per_second")
        yield _gauge(f"{what}_per_second", "Rate over the last minute.", rate)


def _model(stats: ServerStats) -> Iterator[Metric]:
    yield _gauge("calls_held", "Model calls that wait for a trainer's answer.", stats.held)
    for prefix, usage in (("", stats.usage), ("saved_", stats.saved)):
        how = "Answered from the record." if prefix else "Paid for."
        yield _counter(f"{prefix}model_calls", f"Model calls. {how}", usage.requests)
        yield _counters(f"{prefix}tokens", f"Tokens. {how}", "kind", _tokens(usage))
    yield _counter("cost_dollars", "Cost of the calls with a known price.", stats.usage.nanodollars / 1e9)


def _endpoints(stats: ServerStats) -> Iterator[Metric]:
    uses = stats.endpoints
    if not uses:
        return
    yield _counters("endpoint_calls", "Calls to a server.", "url", {use.url: use.requests for use in uses})
    yield _counters("endpoint_failures", "Calls that failed.", "url", {use.url: use.failures for use in uses})
    ok = {use.url: float(use.state is EndpointState.OK) for use in uses}
    yield _gauges("endpoint_ok", "Whether a server takes new conversations.", "url", ok)


def _sequences(tokens: TokenFigures) -> Iterator[Metric]:
    yield _counter("token_replies", "Delivered replies with token ids.", tokens.replies)
    yield _counter("token_replies_unknown", "Delivered replies whose ids are not known.", tokens.unknown)
    yield _counter("tokens_sampled", "Sampled tokens in delivered rollouts.", tokens.sampled)
    yield _counters("token_sequences", "Delivered sequences, by why they begin.", "start", tokens.starts)
    yield _gauge("token_breaks", "Share of replies that broke their sequence.", tokens.breaks)
    if tokens.version is not None:
        yield _gauge("policy_version", "The newest version of the policy.", tokens.version)
    staleness = _quantiles(tokens.staleness)
    yield _gauges("rollout_staleness", "Versions behind the newest, recent rollouts.", "quantile", staleness)
    yield _counter("rollouts_stale", "Rollouts beyond the `max_staleness` of their order.", tokens.stale)


def _machine(stats: ServerStats) -> Iterator[Metric]:
    yield _gauge("loop_lag_seconds", "The longest lag of an event loop.", stats.lag)
    yield _gauge("memory_bytes", "Memory of the server and its workers.", stats.memory)
    yield _gauge("memory_limit_bytes", "Memory limit of the server and its workers.", stats.memory_limit)
    yield _gauge("disk_free_bytes", "Free disk space for the run.", stats.disk_free)


def _tokens(usage: ModelUsage) -> dict[str, int]:
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
