"""The pages of a server's orders in Chromium: held calls as they are now, rewards by version, one order."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser_pages import open_page, serve_view
from tests.command_runner import Command, until
from tests.recorded_conversations import recorded
from tests.server_harness import SUITE
from tests.viewed_runs import run_async
from tests.wait_bounds import stretch

from holdwater.client import CallAnswer, Client, PolicyCall
from holdwater.core.records import Instance
from holdwater.ledger.order_listing import (
    compute_latencies,
    count_orders,
    list_orders,
    list_rollouts,
    list_versions,
    sum_over_time,
)
from holdwater.ledger.reader import LedgerReader

pytestmark = pytest.mark.xdist_group("view rollouts")

HOSTILE = "<b>v2</b>\u202e"


class TrainedServer(NamedTuple):
    """A server whose orders have been answered by two versions of a policy; one call is still held."""

    path: Path
    release: threading.Event  # lets the policy answer the held call


@contextmanager
def serve_orders(place: Path) -> Iterator[TrainedServer]:
    place.mkdir()
    (place / "suite.py").write_text(SUITE)
    words = ("serve", f"{place}/suite.py:suite", "--agent", f"{place}/suite.py:solve", "--workers", "1")
    command = Command(place, *words, "--listen", "127.0.0.1:0", "--out", str(place / "run"))
    until("the address", lambda: "serving: " in command.stderr)
    found = re.search(r"serving: (\S+)", command.stderr)
    assert found is not None
    release = threading.Event()
    try:
        with Client(found[1]) as client, ThreadPoolExecutor(1) as threads:
            place_orders(client)
            waiting = threads.submit(place_held_order, client, release)
            until("a call is held", lambda: client.stats().held == 1)
            try:
                yield TrainedServer(place / "run", release)
            finally:
                release.set()
                waiting.result(stretch(30.0))
    finally:
        command.kill()


def place_orders(client: Client) -> None:
    for number, version in enumerate(("v1", "v1", HOSTILE)):
        instance = Instance(id=f"task {number}", data={"score": number / 2, "turns": 2})
        client.run(instance, key=f"order {number}", policy=answer_as(version))
    client.run_group("i1", 3, key="a group", policy=answer_as("v1"))


def answer_as(version: str) -> object:
    def answer(call: PolicyCall) -> CallAnswer:
        return CallAnswer(call=call.id, text="yes", version=version)

    return answer


def place_held_order(client: Client, release: threading.Event) -> None:
    def answer(call: PolicyCall) -> str:
        release.wait()
        return "late"

    client.run("i2", key="held", policy=answer)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedServer]:
    with serve_orders(tmp_path_factory.mktemp("rollouts") / "server") as served:
        yield served


@pytest.fixture(scope="module")
def runs(server: TrainedServer) -> Path:
    return server.path


@pytest.fixture
def page(page: Page) -> Page:
    page.locator("table.rows a").first.click()
    page.get_by_role("link", name="rollouts", exact=True).click()
    return page


def test_orders_rewards_and_charts_are_shown(page: Page) -> None:
    rows = page.locator("table.orders tbody tr")
    expect(rows).to_have_count(5)
    expect(rows.nth(1)).to_contain_text("a group")
    expect(rows.nth(1)).to_contain_text("3 of 3")
    expect(page.get_by_text("5: 1 open, 4 delivered")).to_be_visible()
    expect(page.locator("#rollout-charts .chart")).not_to_have_count(0)
    expect(page.get_by_text("mean reward by policy version")).to_be_visible()
    expect(page.locator("#held")).to_have_text("1 held call")
    assert page.locator("main b").count() == 0 and "\u202e" not in page.content()
    expect(page.get_by_role("cell", name="<b>v2</b>").first).to_be_visible()


def test_a_filter_of_orders_survives_a_reload(page: Page) -> None:
    page.select_option("select[name=state]", "open")
    rows = page.locator("table.orders tbody tr")
    expect(rows).to_have_count(1)
    page.reload()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("held")
    page.select_option("select[name=state]", "")
    page.fill("input[name=find]", "ORDER 2")
    page.get_by_role("button", name="find").click()
    expect(rows).to_have_count(1)
    assert "find=ORDER+2" in page.url


def test_an_order_leads_to_its_rollouts(page: Page) -> None:
    page.get_by_role("link", name="a group").click()
    expect(page.get_by_text("3 rollouts, scored together")).to_be_visible()
    rows = page.locator("table.rows tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(2)).to_contain_text("2.000")
    rows.first.get_by_role("link", name="transcript").click()
    expect(page.locator(".turn").first).to_be_visible()


def test_the_ledger_has_the_figures_of_the_page(server: TrainedServer) -> None:
    with LedgerReader(server.path) as reader:
        orders = list_orders(reader, 10)
        assert [(order.key, order.state, order.reward) for order in orders] == [
            ("held", "open", None),
            ("a group", "delivered", 1.0),
            ("order 2", "delivered", 1.0),
            ("order 1", "delivered", 0.5),
            ("order 0", "delivered", 0.0),
        ]
        assert [order.key for order in list_orders(reader, 2, below=orders[1].id)] == ["order 2", "order 1"]
        assert count_orders(reader) == (5, 1, 4)
        assert {name: (count, reward) for name, count, reward, _ in list_versions(reader)} == {
            "v1": (5, 0.7),
            HOSTILE: (1, 1.0),
        }
        assert sum(count for _, count, *_ in sum_over_time(reader)) == 6
        assert set(compute_latencies(reader)) == {"latency", "wait"}
        rollouts = list_rollouts(reader, orders[1].id)
        assert [(rollout.member, rollout.reward, rollout.version) for rollout in rollouts] == [
            (0, 0.0, "v1"),
            (1, 1.0, "v1"),
            (2, 2.0, "v1"),
        ]
        assert all(rollout.waited is not None and rollout.latency is not None for rollout in rollouts)


def test_a_page_follows_the_server(page: Page, server: TrainedServer) -> None:
    """This test is the last: the held call is answered."""
    expect(page.locator("#held")).to_have_text("1 held call")
    server.release.set()
    expect(page.locator("#held")).to_have_text("0 held calls")
    expect(page.get_by_text("5: 0 open, 5 delivered")).to_be_visible()


def test_a_run_without_orders_has_no_such_page(browser: Browser, tmp_path: Path) -> None:
    run_async(recorded(tmp_path / "run", chat=True))
    with serve_view(tmp_path / "view", tmp_path / "run") as view, open_page(browser, view.url) as page:
        page.goto(view.door)
        page.locator("table.rows a").first.click()
        expect(page.get_by_role("link", name="all instances")).to_be_visible()
        assert page.get_by_role("link", name="rollouts").count() == 0
