"""`holdwater search` and the page of a search in Chromium: hits as they come, and an end with the page."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import psutil
import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browser_pages import ServedView, open_page, serve_view
from tests.command_runner import Command, until
from tests.ledger_runs import new_run, passed, planned
from tests.recorded_conversations import CONVERSATIONS, Recording, chat, recorded, says
from tests.viewed_runs import run_async
from tests.wait_bounds import stretch

from holdwater.api.process import INTERRUPTED
from holdwater.core.records import Attempt, Outcome
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import segment_path
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.search_index import NAME

pytestmark = pytest.mark.xdist_group("view search")

HOSTILE = "<img src=x onerror=\"document.title = 'owned'\">\u202edesrever \x1b[31m"
MANY = 60  # turns with the same word: more than a page shows
LINKS = 3000  # attempts whose segments are the same file
LARGE = 1 << 20
MOST_MEMORY = 80 << 20


async def make_talk(path: Path) -> None:
    """A conversation whose turns have a word in common and one of their own."""
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned(f"talk {HOSTILE}".replace("\x1b", "").replace("\u202e", ""))])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
        recording, said = Recording(directory, attempt), list[str]()
        for number in range(MANY):
            said.append(f"question {number} {HOSTILE}")
            recording.add(chat(*said), says(f"common answer {number} {HOSTILE}"))
            said.append(f"common answer {number} {HOSTILE}")
        recording.log.close()
        await ledger.settle(passed(attempt, ledger.token, MANY))
        outcome = Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0)
        await ledger.close_sample(outcome)


async def make_endless(path: Path) -> RunDirectory:
    """A run that takes long to search: its attempts share one large segment."""
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("endless")])
        first = await ledger.next_attempt()
        await asyncio.gather(
            *(
                ledger.begin_attempt(Attempt(id=first + number, instance=row, sample=0, number=number + 1))
                for number in range(LINKS)
            )
        )
    recording = Recording(directory, 1)
    recording.add(chat("begin"), says("unique beginning"))
    recording.log.close()
    recording = Recording(directory, 2)
    for _ in range(8):
        recording.add(chat(os.urandom(LARGE // 16).hex()), says("ok"))
    recording.log.close()
    for attempt in range(3, LINKS):
        link = segment_path(directory, attempt)
        link.parent.mkdir(exist_ok=True)
        link.hardlink_to(segment_path(directory, 2))
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("search") / "runs"
    run_async(recorded(place / "dialects", **dict.fromkeys(sorted(CONVERSATIONS), True)))
    run_async(make_talk(place / "talk"))
    return place


def search_for(page: Page, text: str, run: str = "") -> None:
    page.get_by_role("link", name="search", exact=True).click()
    page.fill("input[name=text]", text)
    if run:
        page.select_option("select[name=run]", label=run)
    page.get_by_role("button", name="search", exact=True).click()


def test_hits_come_and_lead_to_their_turn(page: Page) -> None:
    search_for(page, "QUESTION 7 ")

    expect(page.locator("#hits tr")).to_have_count(1)
    expect(page.locator("#search")).to_contain_text("That is all")
    expect(page.locator("mark")).to_have_text("question 7 ")
    page.locator("#hits a").click()
    expect(page.locator("#turn-8")).to_be_visible()
    expect(page.get_by_text("question 7 ").first).to_be_visible()


def test_all_runs_are_searched_and_one_if_it_is_chosen(page: Page, runs: Path) -> None:
    search_for(page, "look first")
    expect(page.locator("#hits tr")).to_have_count(len(CONVERSATIONS))
    page.select_option("select[name=run]", label=str(runs / "talk"))
    page.get_by_role("button", name="search", exact=True).click()
    expect(page.locator("#search")).to_contain_text("That is all")
    expect(page.locator("#hits tr")).to_have_count(0)
    assert "text=look+first" in page.url and "run=" in page.url
    page.reload()
    expect(page.locator("input[name=text]")).to_have_value("look first")
    expect(page.locator("#search")).to_contain_text("1 attempt, ")


def test_a_page_has_a_bounded_number_of_hits(page: Page) -> None:
    search_for(page, "common answer")
    expect(page.locator("#more")).to_be_visible()
    expect(page.locator("#hits tr")).to_have_count(50)
    page.locator("#more").click()
    expect(page.locator("#hits tr")).to_have_count(MANY - 50)
    expect(page.locator("#hits tr").first).to_contain_text("turn 51")
    assert "after=" in page.url


def test_names_and_excerpts_are_text(page: Page) -> None:
    search_for(page, "onerror")
    expect(page.locator("#more")).to_be_visible()
    expect(page.locator("#hits")).to_contain_text("<img src=x")
    assert page.locator("main img").count() == 0 and "owned" not in page.title()
    assert "\u202e" not in page.content() and "\x1b" not in page.content()


def test_an_index_is_built_from_the_page_and_used(page: Page, runs: Path) -> None:
    search_for(page, "question 9", str(runs / "talk"))
    page.get_by_role("button", name="build an index").click()
    expect(page.locator("#work")).to_have_text("the index is complete")
    page.reload()
    expect(page.get_by_text("Transcripts are searched with an index")).to_be_visible()
    expect(page.locator("#hits tr")).to_have_count(1)
    (runs / "talk" / NAME).unlink()
    page.reload()
    expect(page.locator("#hits tr")).to_have_count(1)


def test_a_request_without_the_form_builds_no_index(view: ServedView, runs: Path) -> None:
    with open_stream(view, f"/search/index?run={find_id(view, 'talk')}") as stream:
        until_text(stream, "the form is not of this view")
    assert not (runs / "talk" / NAME).exists()


def test_a_damaged_index_is_told_and_does_not_matter(page: Page, runs: Path) -> None:
    (runs / "talk" / NAME).write_bytes(b"no database")
    search_for(page, "question 9", str(runs / "talk"))
    expect(page.locator("#hits tr")).to_have_count(1)
    expect(page.locator("#problems")).to_contain_text("the index is not used: its file is damaged")
    page.get_by_role("button", name="update the index").click()
    expect(page.locator("#work")).to_have_text("the index is complete")
    expect(page.locator("#problems")).to_contain_text("built anew")
    (runs / "talk" / NAME).unlink()


# A search that goes on


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run_async(make_endless(tmp_path_factory.mktemp("endless") / "run"))


def count_read(process: psutil.Process) -> int:
    return int(process.io_counters().read_chars)


def has_segment(process: psutil.Process) -> bool:
    return any(opened.path.endswith(".seg") for opened in process.open_files())


def test_a_search_ends_with_its_page(endless: RunDirectory, browser: Browser, tmp_path: Path) -> None:
    """3 GB are behind the first hit; the search of a page that goes reads a small part of them."""
    whole = (LINKS - 3) * segment_path(endless, 2).stat().st_size
    with serve_view(tmp_path, endless.path) as view, open_page(browser, view.url) as page:
        process = psutil.Process(view.command.pid)
        page.set_default_timeout(1000 * stretch(10.0))
        page.goto(view.door)
        before = count_read(process)
        search_for(page, "unique beginning")
        expect(page.locator("#hits tr")).to_have_count(1)
        expect(page.locator("#search")).to_contain_text("read in")
        until("the scan", lambda: has_segment(process))

        page.get_by_role("link", name="holdwater", exact=True).click()

        until("the search ends", lambda: not has_segment(process))
        assert count_read(process) - before < whole / 2
        assert process.memory_info().rss < MOST_MEMORY


def test_a_search_ends_when_its_connection_is_cut(endless: RunDirectory, tmp_path: Path) -> None:
    whole = (LINKS - 3) * segment_path(endless, 2).stat().st_size
    with serve_view(tmp_path, endless.path) as view:
        process = psutil.Process(view.command.pid)
        before = count_read(process)
        with open_stream(view, f"/search/hits?text={quote('unique beginning')}") as stream:
            until_text(stream, "unique beginning")
            until("the scan", lambda: has_segment(process))

        until("the search ends", lambda: not has_segment(process))
        assert count_read(process) - before < whole / 2


def find_id(view: ServedView, name: str) -> str:
    with open_stream(view, "/") as stream:
        page = until_text(stream, f"/{name}</a>")
    return page[: page.index(f"/{name}</a>")].rpartition('href="/runs/')[2].partition('"')[0]


def until_text(stream: socket.socket, text: str) -> str:
    """Return what was received when it contains the text."""
    received = b""
    while text.encode() not in received:
        piece = stream.recv(65536)
        assert piece, received
        received += piece
    return received.decode(errors="replace")


def open_stream(view: ServedView, path: str) -> socket.socket:
    host, _, port = view.url.removeprefix("http://").partition(":")
    stream = socket.create_connection((host, int(port)), timeout=stretch(20.0))
    headers = f"Host: {host}:{port}\r\nAuthorization: Bearer {view.token}\r\n"
    stream.sendall(f"GET {path} HTTP/1.1\r\n{headers}\r\n".encode())
    return stream


# In the terminal


def play(place: Path, *words: str) -> Command:
    command = Command(place / ".commands", "search", *words)
    command.wait()
    return command


def test_the_terminal_prints_hits_and_says_so_by_its_status(runs: Path, tmp_path: Path) -> None:
    found = play(tmp_path, "question 7 ", str(runs))
    assert found.wait() == 0, found
    [line] = found.stdout.splitlines()
    assert line.startswith(f"{runs / 'talk'} talk <img") and " turn 8 user: question 7 <img" in line
    assert "\x1b" not in line and "\u202e" not in line

    assert play(tmp_path, "nowhere", str(runs)).wait() == 1


def test_json_has_a_document_a_line(runs: Path, tmp_path: Path) -> None:
    found = play(tmp_path, "look first", str(runs / "dialects"), "--json")

    hits = [json.loads(line) for line in found.stdout.splitlines()]
    assert [(hit["instance"], hit["turn"], hit["match"]) for hit in hits] == [
        (name, 1, "Look first") for name in sorted(CONVERSATIONS)
    ]
    assert {hit["run"] for hit in hits} == {str(runs / "dialects")}


def test_an_index_of_the_terminal_is_kept(runs: Path, tmp_path: Path) -> None:
    found = play(tmp_path, "question 7 ", str(runs / "talk"), "--index")

    assert found.wait() == 0 and (runs / "talk" / NAME).exists()
    assert play(tmp_path, "question 7 ", str(runs / "talk")).stdout == found.stdout
    (runs / "talk" / NAME).unlink()


def test_a_run_that_cannot_be_searched_is_named(runs: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_async(make_talk(tmp_path / "runs" / name))
    (tmp_path / "runs/a/ledger.db").write_bytes(b"no database" * 100)

    found = play(tmp_path, "question 7 ", str(tmp_path / "runs"))

    assert found.wait() == 2
    assert "the ledger is damaged" in found.stderr and "b talk" in found.stdout


def test_ctrl_c_stops_the_search(endless: RunDirectory, tmp_path: Path) -> None:
    command = Command(tmp_path / ".commands", "search", "unique beginning", str(endless.path), "--json")
    until("the first hit is printed", lambda: "unique beginning" in command.stdout)

    command.signal(signal.SIGINT)

    assert command.wait() == INTERRUPTED


def test_an_older_ledger_is_searched_without_answers(runs: Path, tmp_path: Path) -> None:
    run_async(make_talk(tmp_path / "run"))
    with closing(sqlite3.connect(tmp_path / "run/ledger.db")) as connection:
        connection.execute("ALTER TABLE attempt DROP COLUMN answer")
        connection.execute("ALTER TABLE attempt DROP COLUMN version")
        connection.execute("DROP TABLE tag")
        connection.execute("PRAGMA user_version = 7")
        connection.commit()

    assert play(tmp_path, "question 7 ", str(tmp_path / "run")).wait() == 0
