"""Kills of run and view in any order, and runs that are damaged or vanish: each page says what is missing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, expect
from tests.browser_pages import ServedView, open_browser, serve_view
from tests.command_runner import SOURCE, Command, Scene, until
from tests.ledger_runs import new_run, settle_all
from tests.recorded_conversations import recorded
from tests.viewed_runs import run_async
from tests.wait_bounds import stretch

from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger

pytestmark = pytest.mark.xdist_group("view pages")

GATED_SUITE = """
import asyncio
import pathlib

import holdwater as hw

suite = hw.Suite(
    name="gated", instances=lambda: (hw.Instance(id=f"i{n}") for n in range(4)), grade=lambda *_: True
)

async def solve(instance, sandbox, model):
    while instance.id != "i0" and not pathlib.Path(GATE).exists():
        await asyncio.sleep(0.05)
"""


def fetch(view: ServedView, path: str = "/") -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {view.token}"}
    request = urllib.request.Request(view.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=stretch(20.0)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def find_run(view: ServedView) -> str:
    """The address of the only run."""
    [run] = set(re.findall(r'href="(/runs/\w+)"', fetch(view)[1]))
    return run


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    scene.suite(GATED_SUITE, GATE=str(tmp_path / "gate"))
    yield scene
    scene.close()


def start_run(scene: Scene, *words: str) -> Command:
    """A run of which one instance of four is settled, and the others wait for the gate."""
    running = scene.run(*scene.agent(), "--workers", "0", *words)
    until("one is settled", lambda: count_settled(scene.out) == 1 or not running.running)
    assert running.running, running
    return running


def count_settled(run: Path) -> int:
    try:
        with closing(sqlite3.connect(f"file:{run}/ledger.db?mode=ro", uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM outcome").fetchone()[0])
    except sqlite3.Error:
        return 0  # it is being created


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


def test_an_open_page_follows_a_kill_and_a_resume(scene: Scene, browser: Browser) -> None:
    running = start_run(scene)
    with serve_view(scene.place / "view", scene.out) as view:
        page = browser.new_page()
        page.set_default_timeout(1000 * stretch(20.0))
        bound = 1000 * stretch(20.0)
        page.goto(f"{view.url}{find_run(view)}?token={view.token}")
        expect(page.locator(".state.running")).to_be_visible(timeout=bound)

        running.signal(signal.SIGKILL)

        expect(page.locator(".state.unfinished")).to_be_visible(timeout=bound)
        expect(page.get_by_text("1 of 4")).to_be_visible(timeout=bound)
        (scene.place / "gate").touch()
        resumed = scene.resume()
        assert resumed.wait() == 0, resumed
        page.reload()
        expect(page.locator(".state.finished")).to_be_visible(timeout=bound)
        expect(page.get_by_text("4 of 4")).to_be_visible(timeout=bound)
        page.close()


def test_a_killed_view_harms_no_run_and_the_page_says_so(scene: Scene, browser: Browser) -> None:
    running = start_run(scene)
    bound = 1000 * stretch(20.0)
    with serve_view(scene.place / "view", scene.out) as view:
        address = find_run(view)
        page = browser.new_page()
        page.goto(f"{view.url}{address}?token={view.token}")
        expect(page.locator(".state.running")).to_be_visible(timeout=bound)
        view.command.signal(signal.SIGKILL)
        expect(page.get_by_text("No connection to the view")).to_be_visible(timeout=bound)
        page.close()
    assert running.running
    with serve_view(scene.place / "view", scene.out) as view:
        assert find_run(view) == address
        assert "1 of 4" in fetch(view, address)[1]
    (scene.place / "gate").touch()
    assert running.wait() == 0, running
    scene.assert_whole(4)


@pytest.mark.parametrize("killed", ["view", "run"])
def test_a_run_and_its_own_view_can_be_killed(scene: Scene, killed: str) -> None:
    """The run goes on without its view; a view does not outlive its run."""
    running = start_run(scene, "--view")
    until("the view's address is printed", lambda: "view: http://" in running.stderr)
    url, _, token = running.stderr.partition("view: ")[2].split()[0].partition("/?token=")
    view = ServedView(url, token, running)
    assert fetch(view)[0] == 200
    [server] = [child for child in find_children(running.pid) if "serve_beside" in " ".join(child.cmdline())]

    if killed == "view":
        server.kill()
        (scene.place / "gate").touch()
        assert running.wait() == 0, running
        scene.assert_whole(4)
    else:
        running.signal(signal.SIGKILL)
        running.wait()
        until("the view is gone", lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
        with pytest.raises(OSError):  # refused, or reset in the middle
            fetch(view)


def find_children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_an_open_page_says_that_its_run_has_vanished(scene: Scene, browser: Browser) -> None:
    start_run(scene)
    bound = 1000 * stretch(20.0)
    with serve_view(scene.place / "view", scene.out) as view:
        page = browser.new_page()
        page.goto(f"{view.url}{find_run(view)}?token={view.token}")
        expect(page.locator(".state.running")).to_be_visible(timeout=bound)

        scene.out.rename(scene.place / "moved")

        expect(page.get_by_role("heading", name=f"no such directory: `{scene.out}`")).to_be_visible(
            timeout=bound
        )
        assert "No run below" in fetch(view)[1]
        page.close()


def test_pages_of_a_ledger_that_is_being_written_are_whole(tmp_path: Path) -> None:
    """Three portions of 50 samples; the next one is written after a page has shown one of the last."""
    run_async(begin_run(tmp_path / "run"))
    shown = threading.Semaphore(0)
    writer = threading.Thread(target=run_async, args=(settle(tmp_path / "run", shown),))
    with serve_view(tmp_path / "view", tmp_path / "run") as view:
        address = find_run(view)
        writer.start()
        seen = [0]
        while writer.is_alive():
            for path in ("", "/instances", "/extremes"):
                status, page = fetch(view, address + path)
                assert status == 200, page
                if not path:
                    seen.append(int(re.findall(r"(\d+) of \d+", page)[0]))
                    if (seen[-1] - 1) // 50 > (seen[-2] - 1) // 50:
                        shown.release()
        writer.join()
        assert seen == sorted(seen) and len(set(seen)) > 3
        assert "150 of 150" in fetch(view, address)[1]


async def begin_run(path: Path) -> None:
    new_run(path)


async def settle(path: Path, shown: threading.Semaphore) -> None:
    async with Ledger(RunDirectory.open(path)) as ledger:
        for first in (0, 50, 100):
            await settle_all(ledger, [f"n{number:03d}" for number in range(first, first + 50)])
            assert shown.acquire(timeout=stretch(30.0))


def test_pages_say_which_part_of_a_run_is_missing(tmp_path: Path) -> None:
    run_async(recorded(tmp_path / "whole", chat=True, messages=True, gemini=True))
    for name in ("torn", "damaged", "empty", "imageless"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)
    segments = {
        name: sorted((tmp_path / name / "exchanges").rglob("*.seg"))[0] for name in ("torn", "damaged")
    }
    segments["torn"].write_bytes(segments["torn"].read_bytes()[:-3])
    segments["damaged"].write_bytes(b"x" + segments["damaged"].read_bytes()[1:])
    shutil.rmtree(tmp_path / "empty/exchanges")
    shutil.rmtree(tmp_path / "imageless/blobs")

    with serve_view(tmp_path / "view", tmp_path) as view:
        pages = {name: show_transcript(view, name) for name in ("whole", "torn", "damaged", "empty")}
        assert pages["whole"][0] == 200 and "cut short" not in pages["whole"][1]
        assert pages["torn"][0] == 200 and "1 turn of this attempt is missing" in pages["torn"][1]
        assert "What is here?" in pages["torn"][1]
        assert pages["damaged"][0] == 500 and "is damaged at byte 0" in pages["damaged"][1]
        assert pages["empty"][0] == 200 and "2 turns of this attempt are missing" in pages["empty"][1]
        status, page = show_transcript(view, "imageless")
        assert status == 200 and "What is here?" in page
        [image] = set(re.findall(r'src="(/runs/\w+/blobs/[^"]*)"', page))
        status, page = fetch(view, image.replace("&amp;", "&"))
        assert status == 500 and "a blob" in page


def show_transcript(view: ServedView, name: str) -> tuple[int, str]:
    """The transcript of the first attempt of a run."""
    page = fetch(view)[1]
    address = page[: page.index(f"/{name}</a>")].rpartition('href="')[2].partition('"')[0]
    return fetch(view, f"{address}/attempts/1/transcript")


def test_unfinished_creations_and_half_ledgers_are_named(tmp_path: Path) -> None:
    for name in ("whole", "half", "without"):
        run_async(recorded(tmp_path / "runs" / name, chat=True))
    ledger = tmp_path / "runs/half/ledger.db"
    ledger.write_bytes(ledger.read_bytes()[: ledger.stat().st_size // 2])
    for left in (tmp_path / "runs/without").glob("ledger.db*"):
        left.unlink()

    with serve_view(tmp_path / "view", tmp_path / "runs") as view:
        page = fetch(view)[1]
        assert "the ledger is missing" in page
        assert "the ledger is damaged" in page
        assert "1 of 1" in page


@contextmanager
def mount_read_only(place: Path) -> Iterator[list[str]]:
    """The beginning of a command that sees `place` mounted read-only; skip where that is not allowed."""
    line = f"mount --bind '{place}' '{place}' && mount -o remount,ro,bind '{place}' && exec \"$@\""
    words = ["unshare", "--mount", "sh", "-c", line, "sh"]
    if subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine allows no mounts")
    yield words


def test_runs_on_a_read_only_mount_are_shown_or_named(tmp_path: Path) -> None:
    """A killed run leaves a write-ahead log: with its index it can be read, without it the page says so."""
    for name in ("finished", "killed", "copied"):
        run_async(recorded(tmp_path / "runs" / name, chat=True))
    for name in ("killed", "copied"):
        leave_log(tmp_path / "runs" / name)
    (tmp_path / "runs/copied/ledger.db-shm").unlink()
    with mount_read_only(tmp_path / "runs") as words:
        printed = subprocess.run(
            [*words, sys.executable, "-c", LISTED, str(tmp_path / "runs")],
            capture_output=True,
            text=True,
            timeout=stretch(30.0),
            env={"PYTHONPATH": str(SOURCE)},
        )
    assert printed.returncode == 0, printed.stderr
    found = json.loads(printed.stdout)
    assert found["finished"] == ""
    assert found["killed"] == "" and found["event"] == "written last"
    assert "cannot be read in a read-only directory" in found["copied"]
    before = {path.name for path in (tmp_path / "runs/finished").iterdir()}
    assert "ledger.db-shm" not in before


def leave_log(run: Path) -> None:
    """Leave the write-ahead log of a process that was killed after its last commit."""
    code = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('PRAGMA journal_mode = wal');"
        "c.execute(\"INSERT INTO event (at, kind, message, token) VALUES (1, 'x', 'written last', 1)\");"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run / "ledger.db")], check=False)
    assert (run / "ledger.db-wal").stat().st_size > 0


LISTED = """
import json
import sys
from pathlib import Path

from holdwater.viewer.run_pages import read_runs
from holdwater.viewer.run_pool import RunPool

pool = RunPool([Path(sys.argv[1])], Path())
found = {run.found.path.name: run.problem for run in read_runs(pool)}
killed = next(run for run in pool.list_runs() if run.path.name == "killed")
with pool.open(killed.id) as reader:
    found["event"] = reader.events(last=1)[0].message
print(json.dumps(found))
"""
