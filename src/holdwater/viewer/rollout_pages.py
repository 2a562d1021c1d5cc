"""The pages about the rollouts of a server: its orders, rewards, held calls and latencies, and one order."""

from __future__ import annotations

from ..core.errors import BadInput
from ..ledger.order_listing import (
    STATES,
    compute_latencies,
    count_orders,
    list_orders,
    list_rollouts,
    list_versions,
    sum_over_time,
)
from ..ledger.reader import LedgerReader
from .page import PageRequest, PageResponse, clean_text, render_data, render_page
from .run_pages import thin_gauges

PAGE_SIZE = 50


def show_rollouts(asked: PageRequest) -> PageResponse:
    state, find = asked.query.get("state", ""), asked.query.get("find", "")
    below = asked.read_number("below") or None
    with asked.pool.open(asked.run) as reader:
        require_server(reader)
        orders = list_orders(reader, PAGE_SIZE + 1, below, state=state, find=find)
        values = {
            "summary": reader.summary(),
            "counts": count_orders(reader),
            "orders": orders[:PAGE_SIZE],
            "more": len(orders) > PAGE_SIZE,
            "latencies": compute_latencies(reader),
            "versions": list_versions(reader),
        }
    return render_page("rollouts.html", asked=asked, run=asked.run, states=STATES, state=state, **values)


def show_order(asked: PageRequest) -> PageResponse:
    """Show the rollouts of one order."""
    number = asked.read_part("order")
    with asked.pool.open(asked.run) as reader:
        require_server(reader)
        found = list_orders(reader, 1, number + 1)
        if not found or found[0].id != number:
            raise BadInput(f"the server has no order {number}")
        rollouts = list_rollouts(reader, number)
    return render_page("order.html", asked=asked, run=asked.run, order=found[0], rollouts=rollouts)


def read_rollout_charts(asked: PageRequest) -> PageResponse:
    """Return the charts: each has an axis and series; `time` says whether the axis is time."""
    with asked.pool.open(asked.run) as reader:
        require_server(reader)
        over_time, versions = sum_over_time(reader), list_versions(reader)
        gauges = thin_gauges(reader.gauges())
    at, counts, rewards, latencies, waits = zip(*over_time, strict=True) if over_time else ((),) * 5
    return render_data(
        [
            {"title": "mean reward", "time": True, "x": at, "series": {"reward": rewards}},
            {
                "title": "mean reward by policy version",
                "x": list(range(len(versions))),
                "labels": [clean_text(name) or "unknown" for name, *_ in versions],
                "series": {"reward": [reward for _, _, reward, _ in versions]},
            },
            {
                "title": "seconds",
                "time": True,
                "x": at,
                "series": {"order to result": latencies, "order to start": waits},
            },
            {"title": "rollouts", "time": True, "x": at, "series": {"finished": counts}},
            {
                "title": "at once",
                "time": True,
                "x": [gauge.at for gauge in gauges],
                "series": {
                    "held calls": [gauge.held for gauge in gauges],
                    "running": [gauge.running for gauge in gauges],
                },
            },
        ]
    )


def require_server(reader: LedgerReader) -> None:
    if reader.config.serving is None:
        raise BadInput("this run has no orders: it is not the run of a server")
