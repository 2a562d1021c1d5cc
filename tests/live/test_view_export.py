"""The static export in Chromium without a server: it shows what the view shows, and nothing half-written."""

from __future__ import annotations

import functools
import html
import json
import re
import signal
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser_pages import open_page, serve_view
from tests.command_runner import Command, Scene, until
from tests.forked_command import run_forked
from tests.ledger_runs import new_run, passed, planned
from tests.recorded_conversations import CONVERSATIONS, PIXELS, Recording, chat, recorded, says
from tests.viewed_runs import TURNS, make_hostile_run, make_parted_run, run_async
from tests.wait_bounds import stretch

from holdwater.core.records import Attempt, Outcome
from holdwater.core.summary import RunGauge
from holdwater.ledger.attempt_files import log_path, patch_path
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger

pytestmark = pytest.mark.xdist_group("view pages")

SECRET = "a-key-that-nobody-may-read-51"
LOG = "the last line of the log"
PATCH = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old <line>\n+new <line>\n"
INSTANCES = 120  # of a list with three pages


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export") / "runs"
    run_async(make_talks(place / "talks"))
    run_async(make_hostile_run(place / "hostile"))
    return place


async def make_talks(path: Path) -> None:
    """A run with everything that a page can show: conversations, images, charts, logs, patches."""
    directory = await recorded(path, **{name: name != "gemini" for name in sorted(CONVERSATIONS)})
    log_path(directory, 1, "chat").write_text(f"{LOG}\n")
    patch_path(directory, 1).write_text(PATCH)
    async with Ledger(directory) as ledger:
        for second in range(30):
            await ledger.add_gauge(RunGauge(at=1e9 + second, running=2, memory=second << 20, binds="slots"))


@pytest.fixture(scope="module")
def site(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of all runs, in a directory whose name needs quoting."""
    out = tmp_path_factory.mktemp("site") / "two words, ü"
    export(runs, out)
    return out


def export(*words: str | Path) -> dict[str, object]:
    """What `view RUN --export DIR --json` prints."""
    *runs, out = words
    result = run_forked("view", *map(str, runs), "--export", str(out), "--json")
    assert result.returncode == 0, result.stderr
    report: dict[str, object] = json.loads(result.stdout)
    return report


@contextmanager
def open_files(browser: Browser, index: Path) -> Iterator[Page]:
    """A page of an export, opened as a file: it asks nothing but its neighbours, and prints no error."""
    with open_page(browser, index.parent.as_uri()) as page:
        page.set_default_timeout(1000 * stretch(10.0))
        page.goto(index.as_uri())
        yield page


def open_instance(page: Page, run: str, name: str) -> None:
    page.get_by_role("link", name=run).first.click()
    page.get_by_role("link", name="all instances").click()
    page.get_by_role("link", name=name, exact=True).click()


def test_a_user_clicks_through_the_files_of_an_export(browser: Browser, site: Path) -> None:
    with open_files(browser, site / "index.html") as page:
        page.get_by_role("link", name="talks").first.click()
        expect(page.locator("#charts canvas")).to_have_count(4)
        expect(page.get_by_role("heading", name="Most tries")).to_be_visible()
        page.get_by_role("link", name="all instances").click()
        page.get_by_role("link", name="chat").click()
        expect(page.locator(".diff .added").last).to_have_text("+new <line>")
        for key, name in (("n", "gemini"), ("p", "chat")):
            page.keyboard.press(key)
            expect(page.get_by_role("heading", name=name)).to_be_visible()
            page.wait_for_load_state()  # the script of the page reads the next key
        page.get_by_role("link", name="000001-chat.log").click()
        expect(page.get_by_text(LOG)).to_be_visible()
        page.go_back()
        page.get_by_role("link", name="transcript").click()
        expect(page.get_by_text("What is here?").first).to_be_visible()
        page.get_by_label("system").uncheck()
        expect(page.locator(".message.system").first).to_be_hidden()
        image = page.locator(".message img").first.get_attribute("src")
        assert image is not None
        assert read_target(page.url, image) == PIXELS
        assert page.locator("form [name]:visible").count() == 0


def read_target(url: str, link: str) -> bytes:
    return Path(unquote(urlsplit(urljoin(url, link)).path)).read_bytes()


def test_an_export_shows_what_the_view_shows(
    browser: Browser, runs: Path, site: Path, tmp_path: Path
) -> None:
    """The same clicks lead to the same text, but for what needs a server."""
    clicks = ("talks", "all instances", "gemini", "transcript"), ("hostile", "all instances", "plain")
    with serve_view(tmp_path, runs) as served:
        for names in clicks:
            live, static = list[str](), list[str]()
            with open_page(browser, served.url) as page:
                page.goto(served.door)
                live = read_texts(page, names)
            with open_files(browser, site / "index.html") as page:
                static = read_texts(page, names)
            assert static == live


def read_texts(page: Page, names: tuple[str, ...]) -> list[str]:
    """The text of the page after each click, without forms and links to what an export leaves out."""
    texts = []
    page.set_default_timeout(1000 * stretch(10.0))
    for name in names:
        page.get_by_role("link", name=name).first.click()
        page.wait_for_load_state("networkidle")
        page.evaluate(
            "document.querySelectorAll('form, .chart, #charts, .models').forEach((part) => part.remove())"
        )
        texts.append(page.inner_text("main"))
    return texts


def test_every_link_of_an_export_leads_to_a_file(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    dead = []
    for page in pages:
        text = page.read_text()
        for link in re.findall(r' (?:href|src)="([^"]*)"', text):
            path, _, place = html.unescape(link).partition("#")
            target = page if not path else (page.parent / unquote(path)).resolve()
            named = not place or f' id="{place}"' in target.read_text()
            if not target.is_file() or not named:
                dead.append((page.name, link))
    assert dead == []
    assert not [page for page in pages if 'hx-get="' in page.read_text()]


def test_an_export_works_from_an_archive_and_from_a_file_server(
    browser: Browser, site: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "site.zip", "w") as archive:
        for path in sorted(site.rglob("*")):
            archive.write(path, f"sent/{path.relative_to(site)}")
    with zipfile.ZipFile(tmp_path / "site.zip") as archive:
        archive.extractall(tmp_path / "elsewhere")

    with open_files(browser, tmp_path / "elsewhere/sent/index.html") as page:
        open_instance(page, "talks", "gemini")
        expect(page.get_by_role("heading", name="gemini")).to_be_visible()
    with serve_files(tmp_path) as url, open_page(browser, url) as page:
        page.set_default_timeout(1000 * stretch(10.0))
        page.goto(f"{url}/elsewhere/sent/")
        open_instance(page, "talks", "gemini")
        expect(page.get_by_role("heading", name="gemini")).to_be_visible()


@contextmanager
def serve_files(place: Path) -> Iterator[str]:
    """A plain file server, as Python has it."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(place))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_text_of_agents_is_text_in_an_export(browser: Browser, site: Path) -> None:
    with open_files(browser, site / "index.html") as page:
        open_instance(page, "hostile", "<b>bold</b> & co")
        page.get_by_role("link", name="transcript").click()
        expect(page.get_by_text("<script>document.title").first).to_be_visible()
        assert "owned" not in page.title()
        assert page.locator("main img").count() == 0
        page.get_by_role("link", name="more turns follow").click()
        expect(page.locator(".turn").first).to_have_id("turn-21")
        page.get_by_role("link", name="turn 25", exact=True).click()
        assert page.url.endswith("#turn-25")


def test_long_lists_are_exported_page_by_page(browser: Browser, tmp_path: Path) -> None:
    run_async(plan_instances(tmp_path / "run", INSTANCES))

    report = export(tmp_path / "run", tmp_path / "site")

    assert report["problems"] == []
    with open_files(browser, tmp_path / "site/index.html") as page:
        page.get_by_role("link", name=str(tmp_path / "run")).click()
        page.get_by_role("link", name="all instances").click()
        rows = page.locator("#rows tbody tr")
        seen = rows.all_inner_texts()
        for _ in range(2):
            page.get_by_role("link", name="later").click()
            seen += rows.all_inner_texts()
        assert len(seen) == len(set(seen)) == INSTANCES
        page.get_by_role("link", name="earlier").click()
        page.get_by_role("link", name="earlier").click()
        expect(page.get_by_role("link", name="i000", exact=True)).to_be_visible()
    lists = [path for path in (tmp_path / "site").rglob("*instances*.html") if "found" in path.read_text()]
    assert len(lists) == 3


async def plan_instances(path: Path, count: int) -> None:
    async with Ledger(new_run(path)) as ledger:
        await ledger.plan([planned(f"i{number:03d}") for number in range(count)])


def test_long_texts_are_exported_whole_beside_their_page(browser: Browser, tmp_path: Path) -> None:
    """Windows of large turns are shorter; each turn of the outline leads to a page that shows it."""
    texts = run_async(make_long_talk(tmp_path / "run"))

    export(tmp_path / "run", tmp_path / "site")

    with open_files(browser, tmp_path / "site/index.html") as page:
        open_instance(page, str(tmp_path / "run"), "long")
        page.get_by_role("link", name="transcript").click()
        link = page.get_by_role("link", name="show all").first.get_attribute("href")
        assert link is not None
        assert read_target(page.url, link).decode() == texts[0]
        page.locator(".rail a[data-turn='17']").click()
        expect(page.locator("#turn-17")).to_be_in_viewport()


async def make_long_talk(path: Path) -> list[str]:
    """A run with 30 turns of 100 KB."""
    directory, texts = new_run(path), list[str]()
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("long")])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
        recording, said = Recording(directory, attempt), list[str]()
        for number in range(30):
            texts.append(f"question {number} " + "word " * 20_000)
            said.append(texts[-1])
            recording.add(chat(*said), says(f"answer {number}"))
            said.append(f"answer {number}")
        recording.log.close()
        await ledger.settle(passed(attempt, ledger.token, 30))
        await ledger.close_sample(Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0))
    return texts


def test_two_runs_are_exported_with_their_comparison(browser: Browser, tmp_path: Path) -> None:
    for name in ("before", "after"):
        run_async(make_parted_run(tmp_path / "runs" / name, parts_at=4))

    export(tmp_path / "runs/before", tmp_path / "runs/after", tmp_path / "site")

    with open_files(browser, tmp_path / "site/index.html") as page:
        page.get_by_role("link", name="compare runs").click()
        expect(page.get_by_role("heading", name="fixed 1")).to_be_visible()
        page.get_by_role("link", name="same name").click()
        expect(page.get_by_text("The requests are the same up to turn 4.")).to_be_visible()
        page.get_by_role("link", name="whole transcript").first.click()
        expect(page.locator(".turn")).to_have_count(6)


def test_an_instance_is_exported_as_one_file(browser: Browser, runs: Path, tmp_path: Path) -> None:
    for run, name in (("talks", "chat"), ("hostile", "plain")):
        out = tmp_path / "alone" / f"{name}.html"
        report = export(runs / run, "--instance", name, out)
        assert report["path"] == str(out)
        assert [path.name for path in out.parent.iterdir()] == [out.name]
        text = out.read_text()
        assert not re.search(r' (?:href|src)="(?!#|data:image/)', text)

        with open_files(browser, out) as page:
            expect(page.get_by_role("heading", name=name)).to_be_visible()
            page.get_by_role("link", name="transcript").click()
            if name == "chat":
                expect(page.get_by_text("What is here?").first).to_be_in_viewport()
                expect(page.locator(".message img[src^='data:image/png;base64,']")).to_be_attached()
                expect(page.get_by_text(LOG)).to_be_attached()
            else:
                expect(page.locator(".turn")).to_have_count(TURNS)
                page.get_by_role("link", name=f"turn {TURNS}", exact=True).click()
                expect(page.get_by_text(f"question {TURNS - 1}")).to_be_in_viewport()
                assert "owned" not in page.title()
            page.keyboard.press("?")
            expect(page.locator("dialog#keys")).to_be_visible()
        out.unlink()


def test_only_chosen_instances_have_pages(browser: Browser, runs: Path, tmp_path: Path) -> None:
    export(runs / "talks", "--failed", tmp_path / "failed")
    export(runs / "talks", "--only", "c*", "--only", "mess*", tmp_path / "only")

    for out, names in (("failed", ["gemini"]), ("only", ["chat", "messages"])):
        found = sorted(path.stem for path in (tmp_path / out).glob("runs/*/instances/*.html"))
        assert found == names
        with open_files(browser, tmp_path / out / "index.html") as page:
            page.get_by_role("link", name="talks").first.click()
            page.get_by_role("link", name="all instances").click()
            expect(page.locator("#rows tbody tr")).to_have_count(len(CONVERSATIONS))
            expect(page.locator("#rows tbody a[href]")).to_have_count(len(names))


def test_masked_values_stay_masked(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.suite(TELLING_SUITE)
    running = scene.run(*scene.agent(), "--env", f"PASSWORD={SECRET}", "--workers", "0")
    assert running.wait() == 0, running
    scene.close()

    export(scene.out, tmp_path / "site")

    texts = {path: path.read_bytes() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert any(b"the value is" in text for text in texts.values())
    assert [path for path, text in texts.items() if SECRET.encode() in text] == []


TELLING_SUITE = """
import holdwater as hw

suite = hw.Suite(
    name="telling", instances=lambda: iter([hw.Instance(id="one")]), grade=lambda *_: True
)

async def solve(instance, sandbox, model):
    await sandbox.run("echo the value is $PASSWORD")
    return "the value is " + (await sandbox.run("echo $PASSWORD")).stdout
"""


def test_an_export_replaces_nothing_but_an_export(runs: Path, tmp_path: Path) -> None:
    def try_export(*words: str) -> tuple[int, str]:
        result = run_forked("view", str(runs / "talks"), "--export", str(tmp_path / "site"), *words)
        return result.returncode, result.stderr

    (tmp_path / "site").mkdir()
    assert try_export()[0] == 0  # it is empty
    status, message = try_export()
    assert status == 2 and "holds an export already" in message and "`--force` replaces it" in message
    (tmp_path / "site/runs/left.html").write_text("of the earlier export")
    assert try_export("--force")[0] == 0
    assert not (tmp_path / "site/runs/left.html").exists()

    (tmp_path / "site/holdwater-export.json").unlink()
    for words in ((), ("--force",)):
        status, message = try_export(*words)
        assert status == 2 and "is not empty and holds no export" in message
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    run_async(plan_instances(tmp_path / "run", 5000))
    (tmp_path / "out").mkdir()
    exporting = Command(
        tmp_path / "commands", "view", str(tmp_path / "run"), "--export", str(tmp_path / "out/site")
    )
    until("pages are written", lambda: list((tmp_path / "out").glob("*/runs/*/instances/*.html")))
    exporting.signal(signal.SIGINT)

    assert exporting.wait() == 3, exporting
    assert list((tmp_path / "out").iterdir()) == []


def test_a_page_that_cannot_be_read_says_so(runs: Path, tmp_path: Path) -> None:
    run_async(recorded(tmp_path / "run", chat=True, messages=True))
    [segment, _] = sorted((tmp_path / "run/exchanges").rglob("*.seg"))
    segment.write_bytes(segment.read_bytes().replace(b"hW", b"xx", 1))

    report = export(tmp_path / "run", tmp_path / "site")

    [problem] = report["problems"]  # type: ignore[misc]
    assert "is damaged at byte 0" in str(problem)
    [page] = (tmp_path / "site").rglob("attempts/1/transcript*.html")
    assert "is damaged at byte 0" in page.read_text()
    assert "What is here?" in next((tmp_path / "site").rglob("attempts/2/transcript*.html")).read_text()


def test_an_export_of_a_running_run_is_a_picture_of_it(browser: Browser, runs: Path, tmp_path: Path) -> None:
    with RunDirectory.open(runs / "talks").lock():
        export(runs / "talks", tmp_path / "site")

    with open_files(browser, tmp_path / "site/index.html") as page:
        page.get_by_role("link", name="talks").first.click()
        expect(page.get_by_text("4 of 4")).to_be_visible()
        assert page.locator("[data-live]").count() == 0
