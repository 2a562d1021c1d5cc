"""The browser view in Chromium and over HTTP: pages, keys, hostile text, live, old and broken runs."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser_pages import ServedView, open_page, serve_view
from tests.command_runner import Command, Scene, until
from tests.recorded_conversations import CONVERSATIONS, recorded
from tests.viewed_runs import make_hostile_run, make_parted_run, run_async
from tests.wait_bounds import stretch

from holdwater.core.summary import RunGauge
from holdwater.ledger.attempt_files import log_path
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.rows import SettledFigures

pytestmark = pytest.mark.xdist_group("view pages")

MOST_MEMORY = 80 << 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("view")
    run_async(recorded(place / "runs/talks", **{name: name != "gemini" for name in sorted(CONVERSATIONS)}))
    run_async(make_hostile_run(place / "runs/hostile"))
    run_async(add_gauges(place / "runs/talks"))
    for attempt, name in enumerate(sorted(CONVERSATIONS), 1):
        path = log_path(RunDirectory(place / "runs/talks"), attempt, name)
        path.write_text("a line of the log\n")
    return place / "runs"


async def add_gauges(path: Path) -> None:
    async with Ledger(RunDirectory.open(path)) as ledger:
        for second in range(30):
            await ledger.add_gauge(RunGauge(at=1e9 + second, running=2, memory=second << 20))


def open_run(page: Page, name: str) -> None:
    page.get_by_role("link", name=name, exact=False).first.click()


def test_a_user_clicks_through_all_pages(page: Page, view: ServedView) -> None:
    assert "token" not in page.url
    open_run(page, "talks")
    expect(page.locator("#charts .chart, #charts:empty").first).to_be_attached()
    page.get_by_role("link", name="all instances").click()
    page.get_by_role("link", name="gemini").click()
    expect(page.get_by_role("heading", name="gemini")).to_be_visible()
    page.get_by_role("link", name="transcript").click()
    expect(page.get_by_text("What is here?").first).to_be_visible()
    expect(page.locator(".message img")).to_be_attached()
    page.get_by_label("system").uncheck()
    expect(page.locator(".message.system").first).to_be_hidden()
    page.get_by_role("link", name="raw").first.click()
    assert json.loads(page.inner_text("pre"))["turn"] == 1


def test_filters_are_in_the_address_and_survive_a_reload(page: Page) -> None:
    open_run(page, "talks")
    page.get_by_role("link", name="all instances").click()
    rows = page.locator("#rows tbody tr")
    expect(rows).to_have_count(len(CONVERSATIONS))
    page.select_option("select[name=kind]", "failed")
    expect(rows).to_have_count(1)
    assert "kind=failed" in page.url
    page.reload()
    expect(rows).to_have_count(1)
    page.fill("input[name=name]", "nothing like it")
    expect(rows).to_have_count(0)


def test_keys_step_through_rows_and_instances(page: Page) -> None:
    open_run(page, "talks")
    page.get_by_role("link", name="all instances").click()
    names = sorted(CONVERSATIONS)
    page.wait_for_load_state()  # keys work when the script has run
    expect(page.locator("#rows tbody tr")).to_have_count(len(names))
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=names[0])).to_be_visible()
    page.wait_for_load_state()
    for key, name in (("n", names[1]), ("n", names[2]), ("p", names[1])):
        page.keyboard.press(key)
        expect(page.get_by_role("heading", name=name, exact=False)).to_be_visible()
        page.wait_for_load_state()
    page.keyboard.press("?")
    expect(page.locator("dialog#keys")).to_be_visible()


def test_keys_step_within_the_filtered_list(page: Page) -> None:
    open_run(page, "talks")
    page.get_by_role("link", name="3 passed").click()
    won = [name for name in sorted(CONVERSATIONS) if name != "gemini"]
    page.get_by_role("link", name=won[0], exact=True).click()
    for key, name in (("n", won[1]), ("n", won[2]), ("p", won[1])):
        page.wait_for_load_state()  # the script of the page reads the next key
        page.keyboard.press(key)
        expect(page.get_by_role("heading", name=name)).to_be_visible()
    assert "kind=passed" in page.url
    page.wait_for_load_state()
    page.keyboard.press("/")
    page.get_by_role("link", name="instances").click()
    expect(page.locator("#rows tbody tr")).to_have_count(3)


def test_a_moment_of_the_chart_a_log_and_a_download_are_shown(page: Page, runs: Path) -> None:
    open_run(page, "talks")
    expect(page.locator("#charts canvas")).to_have_count(4)
    expect(page.get_by_role("heading", name="Most tries")).to_be_visible()
    page.locator("#charts .u-over").first.click()
    expect(page.locator("#moment h2")).to_contain_text("attempts")
    page.get_by_role("heading", name="Most tries").locator("xpath=..").get_by_role("link").first.click()
    page.get_by_role("link", name=".log").click()
    expect(page.get_by_text("a line of the log")).to_be_visible()
    page.go_back()
    with page.expect_download() as downloaded:
        page.get_by_role("link", name="download").last.click()
    assert downloaded.value.path().read_text() == "a line of the log\n"


def test_text_of_agents_is_shown_as_text(page: Page) -> None:
    open_run(page, "hostile")
    page.get_by_role("link", name="all instances").click()
    page.get_by_role("link", name="<b>bold</b> & co").click()
    expect(page.get_by_role("heading", name="<b>bold</b> & co", exact=False)).to_be_visible()
    page.get_by_role("link", name="transcript").click()
    expect(page.get_by_text("<script>document.title").first).to_be_visible()
    assert "owned" not in page.title()
    assert page.locator("main script, main img").count() == 0
    assert "\u202e" not in page.content() and "\x1b" not in page.content()


def test_a_long_conversation_loads_as_it_is_scrolled(page: Page) -> None:
    open_run(page, "hostile")
    page.get_by_role("link", name="all instances").click()
    page.get_by_role("link", name="plain").click()
    page.get_by_role("link", name="transcript").click()
    turns = page.locator(".turn")
    expect(turns).to_have_count(20)
    turns.last.scroll_into_view_if_needed()
    page.mouse.wheel(0, 100_000)
    expect(turns).to_have_count(40)
    page.fill("input[name=turn]", "55")
    page.keyboard.press("Enter")
    expect(turns.first).to_have_id("turn-55")
    expect(page.get_by_text("question 54")).to_be_visible()
    expect(turns).to_have_count(6)


def test_a_page_of_a_running_run_follows_it(browser: Browser, tmp_path: Path) -> None:
    """A real run goes on while its page is open."""
    scene = Scene(tmp_path)
    scene.suite(SLOW_SUITE, GATE=str(tmp_path / "gate"))
    running = scene.run(*scene.agent(), "--workers", "1", "--concurrency", "2")
    try:
        until("the run has begun", lambda: (scene.out / "run.json").exists())
        with serve_view(tmp_path / "view", scene.out) as served, open_page(browser, served.url) as page:
            page.set_default_timeout(1000 * stretch(30.0))
            page.goto(served.door)
            page.locator("table.rows a").first.click()
            expect(page.locator(".state.running")).to_be_visible()
            expect(page.get_by_text("0 of 4")).to_be_visible()
            (tmp_path / "gate").touch()
            expect(page.get_by_text("4 of 4")).to_be_visible()
            expect(page.locator(".state.finished")).to_be_visible()
        assert running.wait() == 0, running
    finally:
        scene.close()


SLOW_SUITE = """
import asyncio
import pathlib

import holdwater as hw

suite = hw.Suite(
    name="slow", instances=lambda: (hw.Instance(id=f"i{n}") for n in range(4)), grade=lambda *_: True
)

async def solve(instance, sandbox, model):
    while not pathlib.Path(GATE).exists():
        await asyncio.sleep(0.05)
"""


def test_two_runs_are_shown_side_by_side_from_where_they_part(browser: Browser, tmp_path: Path) -> None:
    for name in ("before", "after"):
        run_async(make_parted_run(tmp_path / "runs" / name, parts_at=4))

    with serve_view(tmp_path / "view", tmp_path / "runs") as served, open_page(browser, served.url) as page:
        page.set_default_timeout(1000 * stretch(10.0))
        page.goto(served.door)
        page.get_by_role("link", name="compare runs").click()
        page.select_option("select[name=a]", label=str(tmp_path / "runs/before"))
        page.select_option("select[name=b]", label=str(tmp_path / "runs/after"))
        page.get_by_role("button", name="compare").click()
        expect(page.get_by_role("heading", name="fixed 1")).to_be_visible()
        page.get_by_role("link", name="same name").click()
        expect(page.get_by_text("The requests are the same up to turn 4.")).to_be_visible()
        expect(page.locator(".sides .turn")).to_have_count(4)
        expect(page.get_by_text("before asks 4")).to_be_visible()
        expect(page.get_by_text("after asks 4")).to_be_visible()
        assert page.get_by_text("question 3").count() == 0


# Over HTTP


def fetch(view: ServedView, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(
        view.url + path, headers={"Authorization": f"Bearer {view.token}", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=stretch(20.0)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def find_id(view: ServedView, name: str) -> str:
    page = fetch(view, "/")[1]
    before = page[: page.index(f"/{name}</a>")]
    return before.rpartition('href="/runs/')[2].partition('"')[0]


def test_strangers_are_refused(view: ServedView) -> None:
    nothing = {"Authorization": ""}
    assert fetch(view, "/", **nothing)[0] == 401
    assert fetch(view, "/?token=guess", **nothing)[0] == 401
    assert fetch(view, "/", Host="rebound.example")[0] == 421
    assert fetch(view, "/", Origin="http://elsewhere.example")[0] == 403
    assert fetch(view, "/", **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert fetch(view, "/static/../server.py")[0] == 404
    request = urllib.request.Request(view.url, headers={"Authorization": f"Bearer {view.token}"})
    with urllib.request.urlopen(request) as reply:
        assert "default-src 'self'" in reply.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/runs/ffffffffffff", 404, "no such run"),
        ("/runs/{run}/instances?sort=luck", 404, "unknown sort order: `luck`"),
        ("/runs/{run}/instances?after=[1", 404, "invalid position in the list"),
        ("/runs/{run}/instances/nobody", 404, "no such instance in the run: `nobody`"),
        ("/runs/{run}/attempts/99/transcript", 404, "the run has no attempt 99"),
        ("/runs/{run}/attempts/1/transcript?thread=7", 404, "the attempt has no thread 7"),
        ("/runs/{run}/attempts/1/file?name=../run.json", 404, "no such file"),
        ("/runs/{run}/attempts/1/raw?turn=x", 404, "`turn` must be a whole number: `x`"),
        ("/runs/{run}/blobs/..%2f..%2frun.json", 404, "no such medium"),
    ],
)
def test_bad_addresses_are_named(view: ServedView, path: str, status: int, message: str) -> None:
    found, page = fetch(view, path.format(run=find_id(view, "talks")))

    assert found == status
    assert message in page.replace("&#39;", "'")


def test_a_ledger_of_the_previous_version_can_be_read_and_is_migrated(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "talks", tmp_path / "old")
    with closing(sqlite3.connect(tmp_path / "old/ledger.db")) as connection:
        for column in SettledFigures._fields:
            connection.execute(f"ALTER TABLE attempt DROP COLUMN {column}")
        connection.execute("DROP TABLE tag")
        connection.execute("PRAGMA user_version = 6")
        connection.commit()

    with serve_view(tmp_path / "view", tmp_path) as view:
        run = find_id(view, "old")
        status, page = fetch(view, f"/runs/{run}/instances?name=chat")
        assert status == 200 and "1 found" in page
        status, page = fetch(view, f"/runs/{run}/instances?sort=cost")
        assert status == 404 and "written by an older holdwater" in page

    run_async(open_ledger(tmp_path / "old"))
    assert read_figures(tmp_path / "old") == read_figures(runs / "talks")
    assert (10, 4) in read_figures(tmp_path / "old")


async def open_ledger(path: Path) -> None:
    """Open a ledger as a resume does."""
    async with Ledger(RunDirectory.open(path)):
        pass


def read_figures(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path / "ledger.db")) as connection:
        query = "SELECT input_tokens, output_tokens FROM attempt ORDER BY id"
        return connection.execute(query).fetchall()


def test_damaged_and_vanished_runs_do_not_hide_the_others(runs: Path, tmp_path: Path) -> None:
    for name in ("whole", "damaged", "cut", "vanishing"):
        shutil.copytree(runs / "talks", tmp_path / "runs" / name)
    (tmp_path / "runs/damaged/ledger.db").write_bytes(b"no database" * 1000)
    segments = sorted((tmp_path / "runs/cut/exchanges").rglob("*.seg"))
    segments[0].write_bytes(segments[0].read_bytes()[:-7])

    with serve_view(tmp_path / "view", tmp_path / "runs") as view:
        ids = {name: find_id(view, name) for name in ("whole", "damaged", "cut", "vanishing")}
        shutil.rmtree(tmp_path / "runs/vanishing")

        assert "the ledger is damaged" in fetch(view, "/")[1]
        assert fetch(view, f"/runs/{ids['damaged']}")[0] == 500
        assert fetch(view, f"/runs/{ids['vanishing']}")[0] == 404
        assert fetch(view, f"/runs/{ids['whole']}")[0] == 200
        attempt = int(segments[0].stem)
        status, page = fetch(view, f"/runs/{ids['cut']}/attempts/{attempt}/transcript")
        assert status == 200 and "What is here?" in page


def test_the_view_stays_small_and_ends_with_a_signal(runs: Path, tmp_path: Path) -> None:
    with serve_view(tmp_path, runs) as view:
        run = find_id(view, "hostile")
        for _ in range(3):
            for path in (
                "",
                "/instances",
                "/timeline",
                "/attempts/1/transcript?turn=30",
                "/attempts/1/raw?turn=60",
            ):
                assert fetch(view, f"/runs/{run}{path}")[0] == 200
        assert psutil.Process(view.command.pid).memory_info().rss < MOST_MEMORY

        view.command.signal(signal.SIGINT)
        assert view.command.wait() == 0, view.command


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused = Command(tmp_path / "commands", "view", str(tmp_path / "nowhere"))

    assert refused.wait() == 2
    assert f"no such directory: `{tmp_path / 'nowhere'}`" in refused.stderr


def test_a_run_with_a_view_prints_its_address_and_takes_it_along(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.suite(SLOW_SUITE, GATE=str(tmp_path / "gate"))
    running = scene.run(*scene.agent(), "--workers", "1", "--view")
    try:
        until("the address is printed", lambda: "view: http://" in running.stderr)
        address = running.stderr.partition("view: ")[2].split()[0]
        url, _, token = address.partition("/?token=")
        view = ServedView(url, token, running)
        assert fetch(view, "/")[0] == 200
        (tmp_path / "gate").touch()
        assert running.wait() == 0, running
        with pytest.raises(urllib.error.URLError):
            fetch(view, "/")
    finally:
        scene.close()
