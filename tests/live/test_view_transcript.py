"""Transcripts and attempts in Chromium: changes, long texts, search, threads, tokens, logs, growth."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from playwright.sync_api import Browser, Page, expect
from tests.browser_pages import ServedView, open_page, serve_view
from tests.ledger_runs import failed, new_run, passed, planned
from tests.recorded_conversations import IMAGE, Recording, chat, says
from tests.wait_bounds import stretch

from holdwater.core.records import (
    Attempt,
    ChildAttempt,
    FailureOrigin,
    Grade,
    MemorySeries,
    ModelUsage,
    Outcome,
    PhaseTimes,
)
from holdwater.ledger.attempt_files import (
    compress_log,
    log_path,
    output_path,
    patch_path,
    salvage_path,
    taken_out_path,
)
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger

pytestmark = pytest.mark.xdist_group("view transcript")

SCRIPT = "document.title = 'owned'"
HOSTILE = f'<img src=x onerror="{SCRIPT}"><script>{SCRIPT}</script>\u202eabc\x1b[31m'
LONG = "".join(f'line {number} of a long message with "quotes" and \\ and \u20ac\n' for number in range(4000))
TURNS = 260
MOST_PEAK = 80 << 20
MESSAGE = 50 << 20


async def make_run(path: Path) -> None:
    directory = new_run(path, model="gpt-5")
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("task")])
        for number in (1, 2):
            attempt = await ledger.next_attempt()
            await ledger.begin_attempt(
                Attempt(id=attempt, instance=row, sample=0, number=number, scale=number)
            )
            if number == 1:
                verdict = failed(attempt, ledger.token, FailureOrigin.RESOURCE, "memory")
            else:
                write_conversation(directory, attempt)
                write_files(directory, attempt)
                verdict = msgspec.structs.replace(
                    passed(attempt, ledger.token, 9),
                    grade=Grade(passed=True, score=1.0, detail=f"3 passed {HOSTILE}"),
                    times=PhaseTimes(setup=3.0, acting=120.0, grading=12.0),
                    memory=MemorySeries(step=2.0, kib=tuple(1024 * (20 + at % 30) for at in range(68))),
                    peak_memory=70 << 20,
                    children=(
                        ChildAttempt(name="helper", usage=ModelUsage(requests=1), exchanges=1, seconds=4.0),
                    ),
                )
            await ledger.settle(verdict)
        await ledger.close_sample(Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0))
        await make_long_attempt(ledger, directory)


async def make_long_attempt(ledger: Ledger, directory: RunDirectory) -> None:
    [row] = await ledger.plan([planned("long")])
    attempt = await ledger.next_attempt()
    await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
    recording, said = Recording(directory, attempt), list[str]()
    for number in range(1, TURNS + 1):
        said.append(f"question {number}" + (" needle" if number in (7, 155) else ""))
        recording.add(chat(*said), says(f"answer {number}"))
        said.append(f"answer {number}")
    recording.log.close()
    await ledger.settle(passed(attempt, ledger.token, TURNS))
    await ledger.close_sample(Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0))


def write_conversation(directory: RunDirectory, attempt: int) -> None:
    """Nine exchanges: a long message, an image, a child, a side thread, tokens, and a changed history."""
    recording = Recording(directory, attempt)
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"command": "ls -la"}'},
    }
    picture = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are careful."},
        {"role": "user", "content": picture},
    ]

    def ask(reply: dict[str, Any], *more: dict[str, Any], **about: Any) -> None:
        messages.extend(more)
        recording.add({"model": "gpt-5", "tools": [tool], "messages": messages}, reply, **about)
        messages.append(reply["choices"][0]["message"])

    ask(says("I look.", tool_calls=[call], reasoning_content="First I look."))
    ask(says("A listing."), {"role": "tool", "tool_call_id": "c1", "content": LONG})
    recording.add(chat("Summarize this for your parent."), says("A summary."), by="helper")
    ask(add_tokens(says("Then."), [1, 2, 3], [4, 5]), {"role": "user", "content": "Go on."})
    ask(add_tokens(says("More."), [1, 2, 3, 4, 5, 6], [7, 8]), {"role": "user", "content": "More?"})
    ask(add_tokens(says("Again."), [1, 2, 9, 9, 9, 9, 9, 9], [10]), {"role": "user", "content": "Again?"})
    messages[5]["content"] = "Go on, but faster."
    ask(says("Faster."), {"role": "user", "content": HOSTILE})
    tool["function"]["description"] = "A louder shell"
    ask(says("The end."), {"role": "user", "content": "And now?"})
    recording.add(chat("A title for this conversation?"), says("Ships"))
    recording.log.close()


def add_tokens(reply: dict[str, Any], prompt: list[int], sampled: list[int]) -> dict[str, Any]:
    words = [
        {"token": f"w{token}", "logprob": -0.01 if at == 0 else -3.0} for at, token in enumerate(sampled)
    ]
    choice = {**reply["choices"][0], "token_ids": sampled, "logprobs": {"content": words}}
    return {**reply, "prompt_token_ids": prompt, "choices": [choice]}


def write_files(directory: RunDirectory, attempt: int) -> None:
    for path in (directory.logs, directory.artifacts):
        path.mkdir(exist_ok=True)
    log_path(directory, attempt, "task").write_text(
        "".join(f"{number} step\n" for number in range(30_000))
        + f"FAILED here {HOSTILE}\n"
        + "rest\n" * 20_000
    )
    output = output_path(directory, attempt, "task")
    output.write_text("".join(f"output {number}\n" for number in range(9000)))
    assert compress_log(output)
    patch_path(directory, attempt).write_text(
        "diff --git a/src/one.py b/src/one.py\n--- a/src/one.py\n+++ b/src/one.py\n"
        "@@ -1,2 +1,2 @@\n-old\n+new\n same\n"
        "diff --git a/two.txt b/two.txt\n--- a/two.txt\n+++ b/two.txt\n"
        f"@@ -1,2 +0,0 @@\n-{HOSTILE}\n--- dashes\n"
    )
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, text in (
            ("work/src/one.py", b"print(1)\n"),
            (f"work/{HOSTILE}.txt", b"x"),
            ("deleted", b"gone.txt\0"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, BytesIO(text))
    salvage_path(directory, attempt).write_bytes(zstandard.compress(content.getvalue()))
    beside = taken_out_path(directory, attempt)
    (beside / "reports").mkdir(parents=True)
    (beside / "reports/junit.xml").write_text("<testsuite/>")
    (beside / "link").symlink_to("/etc/passwd")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("transcripts")
    run_async(make_run(place / "runs/talk"))
    return place / "runs"


def open_attempt(page: Page, view: ServedView, attempt: int, rest: str = "/transcript") -> str:
    """Open a page of an attempt; return the address of the attempt's pages."""
    address = f"{view.url}/runs/{find_run(view)}/attempts/{attempt}"
    page.goto(address + rest)
    return address


def find_run(view: ServedView) -> str:
    found = re.search(r'href="/runs/(\w+)"', fetch(view, "/"))
    assert found is not None
    return found[1]


def run_async(work: Coroutine[Any, Any, None]) -> None:
    """Run it in a thread: the browser's driver keeps a loop in this one."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(asyncio.run, work).result()


def fetch(view: ServedView, path: str) -> str:
    return fetch_bytes(view, path).decode()


def fetch_bytes(view: ServedView, path: str) -> bytes:
    request = urllib.request.Request(view.url + path, headers={"Authorization": f"Bearer {view.token}"})
    with urllib.request.urlopen(request, timeout=stretch(60.0)) as reply:
        content: bytes = reply.read()
        return content


def test_changes_of_a_request_open_at_its_turn(page: Page, view: ServedView) -> None:
    open_attempt(page, view, 2, "/transcript?turn=7")
    page.locator("#turn-7 summary", has_text="request: keeps 5, drops").click()
    changes = page.locator("#turn-7 .changes")
    expect(changes.locator(".change.edited .removed")).to_contain_text("Go on.")
    expect(changes.locator(".change.edited .added")).to_contain_text("Go on, but faster.")
    expect(changes).to_contain_text("Against turn 6: 5 kept")
    page.locator("#turn-8 summary", has_text="request").click()
    field = page.locator("#turn-8 .change", has_text="tool bash")
    expect(field.locator(".added", has_text="A louder shell")).to_be_visible()


def test_a_long_message_is_folded_shown_and_downloaded(page: Page, view: ServedView) -> None:
    open_attempt(page, view, 2)
    long = page.locator("#turn-2 .message.tool .long")
    expect(long).to_contain_text("line 0 of a long message")
    assert "line 3999" not in long.inner_text()
    address = long.get_by_role("link", name="download").get_attribute("href")
    assert address is not None
    assert fetch(view, address) == LONG
    long.get_by_role("link", name="show all").click()
    expect(page.locator("#turn-2 .message.tool")).to_contain_text("line 3999")
    assert long.get_by_role("link").count() == 0


def test_a_search_finds_hits_of_other_windows_and_of_folded_texts(page: Page, view: ServedView) -> None:
    open_attempt(page, view, 3)
    page.keyboard.press("/")
    page.keyboard.type("NEEDLE")
    hits = page.locator("#hits .hit")
    expect(hits).to_have_count(2)
    hits.last.click()
    expect(page.locator("#turn-155-1:target")).to_be_in_viewport()
    open_attempt(page, view, 2)
    page.fill("[name=q]", "line 3998 of")
    expect(page.locator("#hits .hit")).to_contain_text("in the folded part")
    page.fill("[name=q]", "nowhere at all")
    expect(page.locator("#hits")).to_contain_text("nothing found in 9 turns")


def test_the_outline_loads_by_windows_and_leads_to_turns(page: Page, view: ServedView) -> None:
    open_attempt(page, view, 3)
    rail = page.locator(".rail a[data-turn]")
    expect(rail).to_have_count(200)
    rail.nth(180).click()
    expect(page.locator("#turn-181")).to_be_in_viewport()
    expect(page.locator('.rail a[aria-current][data-turn="181"]')).to_be_visible()
    expect(rail).to_have_count(100)  # from a window before the turn to the end
    page.keyboard.press("[")
    expect(page.locator(".turn").first).to_have_id("turn-161")
    page.keyboard.press("]")
    expect(page.locator(".turn").first).to_have_id("turn-181")
    assert page.locator("#turn-181 .anchor").count() == 2


def test_threads_and_children_are_lanes_and_marked_where_they_began(page: Page, view: ServedView) -> None:
    address = open_attempt(page, view, 2)
    names = page.locator(".lanes .name").all_inner_texts()
    assert names == ["trajectory", "child helper", "side 2", "side 3"]
    expect(page.locator("#turn-2 .branch")).to_contain_text("child helper")
    expect(page.locator("#turn-6 .branch").first).to_contain_text("branches off here, 2 turns")
    page.locator("#turn-2 .branch a").click()
    expect(page.get_by_text("Summarize this for your parent.")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(1)
    page.goto(address + "/transcript?turn=9")
    expect(page.get_by_text("A title for this conversation?")).to_be_visible()


def test_tokens_are_coloured_and_a_break_is_flagged(page: Page, view: ServedView) -> None:
    open_attempt(page, view, 2, "/transcript?turn=4")
    expect(page.locator("#turn-5 > .problem")).to_have_count(0)
    expect(page.locator("#turn-6 > .problem")).to_contain_text("does not continue the tokens before it")
    page.locator("#turn-5 summary", has_text="tokens").click()
    expect(page.locator("#turn-5 .tokens .sure")).to_have_text("w7")
    expect(page.locator("#turn-5 .tokens .unlikely")).to_have_attribute("title", "-3.000")
    expect(page.locator("#turn-5 .tokens.masked")).to_have_text("6")
    expect(page.locator("#turn-5")).to_contain_text("5 tokens of the prompt continue the sequence")


def test_toggles_survive_a_reload_and_hide_loaded_turns(page: Page, view: ServedView) -> None:
    open_attempt(page, view, 2)
    page.get_by_label("tools").uncheck()
    expect(page.locator(".message.tool")).to_be_hidden()
    page.reload()
    expect(page.locator(".message.tool")).to_be_hidden()
    page.get_by_label("tools").check()
    expect(page.locator(".message.tool")).to_be_visible()


def test_an_attempt_shows_its_files_memory_and_reason(page: Page, view: ServedView) -> None:
    run = find_run(view)
    page.goto(f"{view.url}/runs/{run}/instances/task")
    attempt = page.locator("#attempt-2")
    expect(attempt).to_contain_text(
        "attempt 1 ended with resource: memory; tried again, allowed by `--retries`"
    )
    expect(attempt.locator(".memory canvas")).to_be_visible()
    expect(attempt.locator("details", has_text="src/one.py").first).to_contain_text("+1 -1")
    attempt.locator("summary", has_text="salvaged files").click()
    with page.expect_download() as download:
        attempt.get_by_role("link", name="src/one.py", exact=True).click()
    assert Path(download.value.path()).read_bytes() == b"print(1)\n"
    expect(attempt.get_by_role("link", name="000002.files/reports/junit.xml")).to_be_visible()
    assert attempt.get_by_text("passwd").count() == 0


def test_a_log_is_searched_and_shown_at_the_hit(page: Page, view: ServedView) -> None:
    open_attempt(page, view, 2, "/log?name=000002-task.log")
    expect(page.locator(".log")).to_contain_text("rest")
    page.fill("[name=q]", "failed HERE")
    page.locator("#hits .hit").click()
    expect(page.locator(".log")).to_contain_text("29999 step\nFAILED here <img")
    open_attempt(page, view, 2, "/log?name=000002-task.out.zst&from=0")
    expect(page.locator(".log")).to_contain_text("output 1")
    page.fill("[name=q]", "output 8999")
    page.locator("#hits .hit").click()
    expect(page.locator(".log")).to_contain_text("output 8999")


def test_hostile_text_stays_text_on_every_page(page: Page, view: ServedView) -> None:
    address = open_attempt(page, view, 2, "/transcript?turn=7").removeprefix(view.url)
    run = find_run(view)
    for path in (
        f"{address}/transcript?turn=7",
        f"{address}/turns?turn=7",
        f"{address}/find?q=owned",
        f"{address}/log/find?name=000002-task.log&q=FAILED",
        f"{address}/salvage",
        f"/runs/{run}/instances/task",
    ):
        text = fetch(view, path)
        assert "owned" in text, path
        assert not re.search(r"<img src=x|<script>|\u202e|\x1b", text), path
    changes = fetch(view, f"{address}/changes?turn=7")  # new messages stand below, in the turn itself
    assert "Go on, but faster." in changes
    assert "owned" not in page.title()
    page.goto(f"{view.url}/runs/{run}/instances/task")
    assert "owned" not in page.title()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/transcript?turn=99", "the attempt has no turn 99"),
        ("/transcript?thread=9", "the attempt has no thread 9"),
        ("/text?turn=2&of=0123", "the attempt has no such text"),
        ("/changes?turn=0", "the attempt has no turn 0"),
        ("/salvage/file?path=../../../etc/passwd", "the salvage has no such file"),
        ("/salvage/file?path=000002.files/link", "the salvage has no such file"),
        ("/log/find?name=../run.json&q=x", "no such file"),
    ],
)
def test_addresses_without_an_answer_say_so(view: ServedView, path: str, message: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        fetch(view, f"/runs/{find_run(view)}/attempts/2{path}")

    assert refused.value.code == 404
    assert message in refused.value.read().decode()


def test_a_running_transcript_grows_and_stays_where_it_was(browser: Browser, tmp_path: Path) -> None:
    """The attempt is written as a gateway writes it, while this process holds the lock of the run."""
    directory = new_run(tmp_path / "runs/live")
    recording, said = Recording(directory, 1), list[str]()

    def talk(last: int) -> None:
        for number in range(recording.log.count + 1, last + 1):
            said.append(f"question {number}")
            recording.add(chat(*said), says(f"answer {number}"))
            said.append(f"answer {number}")

    with directory.lock():
        run_async(begin_attempt(directory))
        talk(30)
        with serve_view(tmp_path / "view", tmp_path / "runs") as view, open_page(browser, view.url) as page:
            page.set_default_timeout(1000 * stretch(20.0))
            page.goto(view.door)
            open_attempt(page, view, 1)
            page.locator(".turns .tail").scroll_into_view_if_needed()
            expect(page.locator(".turn")).to_have_count(30)
            page.evaluate("window.scrollTo(0, document.querySelector('#turn-12').offsetTop)")
            place = page.evaluate("window.scrollY")
            page.evaluate("window.untouched = true")
            for last in (31, 33):
                talk(last)
                expect(page.locator(f"#turn-{last}")).to_be_attached()
                expect(page.locator(f'.rail [data-turn="{last}"]')).to_be_attached()
            assert page.locator(".turn").count() == 33
            assert page.evaluate("window.scrollY") == place
            assert page.evaluate("window.untouched")
    recording.log.close()


async def begin_attempt(directory: RunDirectory) -> None:
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("one")])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))


@pytest.mark.proof
def test_a_message_of_50_megabytes_keeps_the_view_small(tmp_path: Path) -> None:
    run_async(make_large_run(tmp_path / "runs/large"))
    with serve_view(tmp_path / "view", tmp_path / "runs") as view:
        attempt = f"/runs/{find_run(view)}/attempts/1"
        page = fetch(view, f"{attempt}/transcript")
        name = re.findall(r"of=(\w+)&amp;as=file", page)[0]
        text = fetch_bytes(view, f"{attempt}/text?turn=1&of={name}&as=file")
        assert len(text) == MESSAGE
        assert "in the folded part" in fetch(view, f"{attempt}/find?q=the+very+end")
        raw = json.loads(fetch_bytes(view, f"{attempt}/raw?turn=1"))
        assert len(raw["request"]["messages"][0]["content"]) == MESSAGE
        assert read_peak(view.command.pid) < MOST_PEAK


async def make_large_run(path: Path) -> None:
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("large")])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
        words = random.Random(1).randbytes(1 << 19).hex()
        recording = Recording(directory, attempt)
        recording.add(chat((words * 50)[:-12] + "the very end"), says("Too long."))
        recording.log.close()
        await ledger.settle(passed(attempt, ledger.token, 1))
        await ledger.close_sample(Outcome(instance=row, sample=0, attempt=attempt, kind="passed", score=1.0))


def read_peak(pid: int) -> int:
    """Return the most memory that a process ever had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
