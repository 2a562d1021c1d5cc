"""The buttons of the view that control a running run: over HTTP with every refusal, and in Chromium."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from playwright.sync_api import expect
from tests.browser_pages import open_browser, open_page, serve_view
from tests.command_runner import until
from tests.controlled_run import ControlledRun
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.serve.settings import ServerSettings
from holdwater.viewer.run_pool import RunPool
from holdwater.viewer.server import ViewServer

pytestmark = pytest.mark.xdist_group("view pages")

HOSTILE = "<script>document.title = 'owned'</script>"


class OpenedView(NamedTuple):
    """A view of one run, and a client that has its token."""

    session: aiohttp.ClientSession
    page: str  # the address of the run
    form: str  # the token of its forms; empty: it has none

    async def read(self, place: str = "") -> str:
        async with self.session.get(self.page + place) as response:
            return await response.text()

    async def send(self, verb: str, headers: dict[str, str] | None = None, **fields: str) -> tuple[int, str]:
        data = {"form": self.form, **fields}
        url = f"{self.page}/control/{verb}"
        async with self.session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            return response.status, response.headers.get("Location") or await response.text()


@asynccontextmanager
async def open_view(run: Path, *, read_only: bool = False) -> AsyncIterator[OpenedView]:
    pool = RunPool([run], run.parent)
    async with (
        ViewServer(pool, ServerSettings(listen="127.0.0.1:0"), read_only=read_only) as view,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {view.token}"}) as session,
    ):
        opened = OpenedView(session, f"{view.address}/runs/{pool.list_runs()[0].id}", "")
        found = re.search(r'name="form" value="([^"]+)"', await opened.read())
        yield opened._replace(form=found[1] if found else "")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ControlledRun]:
    with ControlledRun(tmp_path / "run") as run:
        run.wait_started(2)
        yield run


async def test_every_button_sends_its_request(run: ControlledRun) -> None:
    async with open_view(run.out) as view:
        status, location = await view.send("pause")
        assert (status, view.page.endswith(location)) == (303, True)
        paused = await view.read()
        assert '<span class="state paused">paused</span>' in paused
        assert "control/unpause" in paused and "control/pause" not in paused
        assert (await view.send("unpause"))[0] == 303
        assert (await view.send("set", settings="concurrency=3 retries=4"))[0] == 303
        assert (await view.send("note", text=HOSTILE))[0] == 303
        status, location = await view.send("cancel", instance="i0", sample="0")
        assert (status, location.partition("/instances/")[2]) == (303, "i0?sample=0")
        assert (await view.send("retry", instance="i1", sample="0"))[0] == 303
        page, instance = await view.read(), await view.read("/instances/i1")

    assert HOSTILE not in page and "&lt;script&gt;" in page
    assert "control/retry" in instance and "control/cancel" in instance
    assert run.wait_outcome("i0").kind == "cancelled"
    assert run.join().outcomes == {"cancelled": 1, "passed": 3}
    assert run.verbs() == {"pause": 1, "unpause": 1, "set": 2, "note": 1, "cancel": 1, "retry": 1}


async def test_a_request_from_elsewhere_is_refused(run: ControlledRun) -> None:
    async with open_view(run.out) as view:
        refused = {
            "no token of the view": await view.send("pause", {"Authorization": "Bearer no"}),
            "no token of the form": await view._replace(form="").send("pause"),
            "another token": await view._replace(form="x" * 43).send("pause"),
            "another origin": await view.send("pause", {"Origin": "http://evil.example"}),
            "another site": await view.send("pause", {"Sec-Fetch-Site": "cross-site"}),
            "a null origin": await view.send("pause", {"Origin": "null"}),
            "another host": await view.send("pause", {"Host": "evil.example"}),
        }
        async with view.session.post(f"{view.page}/control/pause", json={"form": view.form}) as response:
            refused["JSON"] = response.status, ""
        async with view.session.get(f"{view.page}/control/pause", params={"form": view.form}) as response:
            refused["GET"] = response.status, ""
        refused["an unknown verb"] = await view.send("explode")
        refused["a wrong setting"] = await view.send("set", settings="speed=9")
        refused["an unknown instance"] = await view.send("retry", instance="i9", sample="0")

    assert {what: status for what, (status, _) in refused.items()} == {
        "no token of the view": 401,
        "no token of the form": 403,
        "another token": 403,
        "another origin": 403,
        "another site": 403,
        "a null origin": 403,
        "another host": 421,
        "JSON": 415,
        "GET": 405,
        "an unknown verb": 404,
        "a wrong setting": 409,
        "an unknown instance": 409,
    }
    assert "unknown setting: `speed`" in refused["a wrong setting"][1]
    assert hw.show(run.out).paused is None
    assert not run.verbs()


async def test_a_view_that_only_reads_has_no_buttons(run: ControlledRun) -> None:
    async with open_view(run.out, read_only=True) as view:
        pages = await view.read() + await view.read("/instances/i0")
        status, text = await view._replace(form="any").send("pause")

    assert "<form" not in pages
    assert (status, "this view only reads" in text) == (403, True)
    assert hw.show(run.out).paused is None


async def test_a_finished_run_has_no_buttons(run: ControlledRun) -> None:
    async with open_view(run.out) as view:
        run.join()
        page = await view.read()
        status, text = await view.send("pause")

    assert "/control/" not in page
    assert (status, "the run has finished" in text) == (409, True)


def test_a_click_pauses_the_run(run: ControlledRun, tmp_path: Path) -> None:
    with (
        serve_view(tmp_path / "commands", run.out) as view,
        open_browser() as browser,
        open_page(browser, view.url) as page,
    ):
        bound = 1000 * stretch(10.0)
        page.set_default_timeout(bound)
        page.goto(view.door)
        page.goto(f"{view.url}/runs/{RunPool([run.out], run.out).list_runs()[0].id}")

        page.get_by_role("button", name="pause", exact=True).click()
        expect(page.get_by_text("paused since")).to_be_visible(timeout=bound)
        until("the run is paused", lambda: hw.show(run.out).paused)
        page.get_by_role("button", name="unpause").click()
        expect(page.get_by_role("button", name="pause", exact=True)).to_be_visible(timeout=bound)
        page.get_by_label("note").fill("from the browser")
        page.get_by_role("button", name="note").click()
        expect(page.get_by_text("from the browser")).to_be_visible(timeout=bound)

    assert run.join().outcomes == {"passed": 4}
