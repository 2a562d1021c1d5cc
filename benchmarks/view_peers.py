"""Measures the browser view beside a run, and beside Inspect View on the same conversations, for `view.py`.

A tab is Chromium's largest renderer, by PSS. A transcript can be read when its first answer is on the screen.
Both servers run on this machine; bytes are those that Chromium received.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from gauge import MB
from launch import HERE, holdwater, upstream
from peers import environment, version
from playwright.sync_api import Browser, sync_playwright
from table import Row, at_most, say
from view_runs import fetch, find_runs, serve, write_talks

SHAPES = (  # name, instances, turns, characters of a question
    ("500 turns", 1, 500, 2000),
    ("20,000 turns", 1, 20_000, 200),
    ("2,000 instances", 2000, 20, 500),
    ("50 MB message", 1, 2, 50 << 20),
)
TALKS, PAIRS = 300, 5  # of the run beside a view
MOST_SLOWER = 1.02
PATIENCE = 300_000.0  # milliseconds until a transcript is given up
PROBE = 0.05  # seconds between two readings of memory


class SeenTranscript(NamedTuple):
    """The costs of opening one transcript."""

    seconds: float
    server: float  # peak of its memory, MB
    tab: float  # MB
    received: float  # MB


def measure_peers(place: Path, share: int) -> list[Row]:
    """Open the same conversations in both views, each in a tab of its own."""
    python = environment("inspect-ai", ("inspect-ai", "openai"))
    shapes = [
        (name, max(1, count // share) if count > 1 else 1, turns, size) for name, count, turns, size in SHAPES
    ]
    logs = place / "logs"
    logs.mkdir()
    say("writing the conversations for both")
    slugs = [(slug(name), count, turns, size) for name, count, turns, size in shapes]
    subprocess.run([python, HERE / "peer_inspect_view.py", logs, json.dumps(slugs)], check=True)
    for name, count, turns, size in slugs:
        write_talks(place / "runs" / name, count, turns, size)
    rows = []
    with start_browser() as browser:
        for name, *_ in shapes:
            ours = open_ours(browser, place / "runs", slug(name))
            theirs = open_inspect(browser, python, logs, slug(name))
            rows += compare(name, ours, theirs, f"Inspect View {version(python, 'inspect-ai')}")
    return rows


def slug(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")


def compare(name: str, ours: SeenTranscript, theirs: SeenTranscript | str, who: str) -> list[Row]:
    named = {
        "until the transcript can be read": ("seconds", "s"),
        "peak memory of the server": ("server", "MB"),
        "memory of the tab": ("tab", "MB"),
        "received": ("received", "MB"),
    }
    rows = []
    for what, (field, unit) in named.items():
        rows.append(Row(f"{name}: {what}", round(getattr(ours, field), 2), unit))
        value = theirs if isinstance(theirs, str) else round(getattr(theirs, field), 2)
        rows.append(Row(f"{name}: {what}", value, unit, who=who))
    return rows


def open_ours(browser: Browser, runs: Path, name: str) -> SeenTranscript:
    with serve(runs) as (served, pid):
        run = find_runs(served)[name]
        address = f"{served['url']}/runs/{run}/attempts/1/transcript"
        fetch(served, "/")
        seen = open_transcript(browser, pid, f"{served['url']}/?token={served['token']}", address)
    assert isinstance(seen, SeenTranscript), seen
    return seen


def open_inspect(browser: Browser, python: Path, logs: Path, name: str) -> SeenTranscript | str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [str(python.parent / "inspect"), "view", "start", "--log-dir", str(logs), "--port", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}/"
        await_server(url)
        address = f"{url}#/logs/{name}.eval/samples/sample/{name}-0000/1/messages"
        return open_transcript(browser, process.pid, "about:blank", address)
    finally:
        process.kill()
        process.wait()


def await_server(url: str) -> None:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=60):
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"nothing listens on {url}")


def open_transcript(browser: Browser, pid: int, door: str, address: str) -> SeenTranscript | str:
    """Open the page at `address`, wait for its first answer, and read what it cost."""
    context = browser.new_context()
    page = context.new_page()
    session = context.new_cdp_session(page)
    received = 0

    def count(event: dict[str, Any]) -> None:
        nonlocal received
        received += event["encodedDataLength"]

    page.goto(door)
    session.on("Network.loadingFinished", count)
    session.send("Network.enable")
    try:
        with watch_memory(pid) as read_peak:
            begun = time.perf_counter()
            page.goto(address, wait_until="commit")
            page.get_by_text("answer 1", exact=True).first.wait_for(timeout=PATIENCE)
            seconds = time.perf_counter() - begun
            page.wait_for_timeout(2000)  # memory and bytes that follow
        return SeenTranscript(seconds, read_peak(), read_tab(), received / MB)
    except Exception as error:  # noqa: BLE001 - a peer's page that breaks is a result
        return str(error).splitlines()[0]
    finally:
        context.close()


@contextmanager
def watch_memory(pid: int) -> Iterator[Callable[[], float]]:
    """Read the memory of a process and its children until the block ends; yield a function for its peak."""
    peak = 0.0
    over = threading.Event()

    def read() -> None:
        nonlocal peak
        while not over.wait(PROBE):
            try:
                process = psutil.Process(pid)
                family = (process, *process.children(recursive=True))
                peak = max(peak, sum(member.memory_info().rss for member in family) / MB)
            except psutil.Error:
                continue

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lambda: peak
    finally:
        over.set()
        thread.join()


def read_tab() -> float:
    """Return the memory of this process's largest renderer."""
    sizes = [0.0]
    for process in psutil.Process().children(recursive=True):
        try:
            if "--type=renderer" in process.cmdline():
                sizes.append(process.memory_full_info().pss / MB)
        except psutil.Error:
            continue
    return max(sizes)


@contextmanager
def start_browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


# A run with and without a view that follows it.


class PlayedRun(NamedTuple):
    """A run, and the view that followed it."""

    seconds: float
    cpu: float  # seconds, of conductor and workers
    view_cpu: float  # seconds, of the view; 0 without one


def measure_beside(place: Path, share: int) -> list[Row]:
    """Play the same run with and without an open view, in alternating order."""
    played: dict[bool, list[PlayedRun]] = {True: [], False: []}
    with upstream(3, 200) as url:
        play_run(place / "first", url, TALKS // share // 4, viewed=False)  # compiles and fills caches
        for pair in range(max(2, PAIRS // share)):
            for viewed in (True, False) if pair % 2 else (False, True):
                run = play_run(place / f"{pair}-{viewed}", url, TALKS // share, viewed=viewed)
                played[viewed].append(run)
                say(f"{'with' if viewed else 'without'} a view: {run.seconds:.2f} s, {run.cpu:.2f} s of CPU")
    rows = []
    for what, field in (("time", "seconds"), ("CPU", "cpu")):
        ratios = sorted(
            getattr(one, field) / getattr(other, field)
            for one, other in zip(played[True], played[False], strict=True)
        )
        medians = [
            statistics.median(getattr(run, field) for run in played[viewed]) for viewed in (True, False)
        ]
        named = f"{what} of a run with an open view against one without"
        rows.append(at_most(f"{named}, ratio of medians", medians[0] / medians[1], MOST_SLOWER, "x"))
        rows.append(Row(f"{named}, of each pair", f"{ratios[0]:.3f} to {ratios[-1]:.3f}", "x"))
    shares = [100 * run.view_cpu / run.seconds for run in played[True]]
    rows.append(
        Row("CPU of the view while it is followed", round(statistics.median(shares), 1), "% of a core")
    )
    return [*rows, Row("load of the machine at the end", round(os.getloadavg()[0], 1))]


def play_run(place: Path, url: str, count: int, *, viewed: bool) -> PlayedRun:
    """Run `count` short talks below a directory, which a view shows or not."""
    place.mkdir()
    out = place / "run"
    words = [*("run", f"{HERE / 'work.py'}:suite", "--agent", f"{HERE / 'view_runs.py'}:talk_briefly")]
    words += ["--out", str(out), "--limit", str(count), "--concurrency", "30", "--workers", "1"]
    words += ["--model", "benchmark", "--base-url", url, "--json", "--quiet"]
    with follow_runs(place) if viewed else nullcontext() as view:
        before = read_cpu(view)
        launched = holdwater(words, place / "log")
        view_cpu = read_cpu(view) - before
    if launched.status != 0:
        raise SystemExit((place / "log").read_text()[-2000:])
    return PlayedRun(launched.seconds, launched.watch.cpu, view_cpu)


def read_cpu(pid: int | None) -> float:
    """Return the seconds of CPU that a process has used."""
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextmanager
def follow_runs(place: Path) -> Iterator[int]:
    """Serve a view of a directory, and do as an open page of its first run; yield the view's process."""
    over = threading.Event()
    with serve(place) as (served, pid):
        follower = threading.Thread(target=follow_run, args=(served, place / "run", over))
        follower.start()
        try:
            yield pid
        finally:
            over.set()
            follower.join()


def follow_run(served: dict[str, str], out: Path, over: threading.Event) -> None:
    """Wait for the run's events, and ask for page and chart after each, as the script of the page does."""
    while not (out / "run.json").exists():
        if over.wait(0.02):
            return
    run = find_runs(served)["run"]
    headers = {"Authorization": f"Bearer {served['token']}"}
    request = urllib.request.Request(f"{served['url']}/runs/{run}/live", headers=headers)
    with urllib.request.urlopen(request) as events:
        for line in events:
            if over.is_set() or line.startswith(b"event: over"):
                return
            if line.startswith(b"event: changed"):
                for path in ("", "/timeline"):
                    fetch(served, f"/runs/{run}{path}")
