"""The lists of the view: tags, places, extremes, marks, models; and their filters in Chromium."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Page, expect
from tests.ledger_runs import failed, new_run, passed, planned
from tests.recorded_conversations import Recording, chat, recorded, says
from tests.viewed_runs import run_async

from holdwater.conversation.model_usage import FURTHER, MOST_MODELS, ModelUsageSums
from holdwater.core.errors import BadInput
from holdwater.core.records import Attempt, FailureOrigin, Instance, ModelUsage, Outcome, PhaseTimes
from holdwater.core.summary import RunGauge
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.instance_tags import MOST_TAGS
from holdwater.ledger.ledger import Ledger, PlannedInstance
from holdwater.ledger.listing import (
    SampleFilter,
    SampleList,
    list_extremes,
    list_marks,
    list_places,
    list_tags,
)
from holdwater.ledger.reader import LedgerReader

pytestmark = pytest.mark.xdist_group("view lists")

HOSTILE = "<script>document.title = 'owned'</script>"
COUNT = 6


def make_instance(number: int, tags: object) -> PlannedInstance:
    payload = msgspec.msgpack.encode(Instance(id=f"i{number}", data={"tags": tags}))
    return planned(f"i{number}", payload=payload)


async def make_run(path: Path) -> RunDirectory:
    """Six instances with tags; the later, the slower; the last but one lost memory, the last is open."""
    directory = new_run(path, model="big", suite=path.name)
    async with Ledger(directory) as ledger:
        for number in range(COUNT):
            [row] = await ledger.plan([make_instance(number, ["all", HOSTILE if number % 2 else "even"])])
            if number == COUNT - 1:
                break
            attempt = await ledger.next_attempt()
            await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
            recording = Recording(directory, attempt)
            recording.add(chat("question", model="big"), says("answer"))
            recording.add(chat("question", "answer", "further", model="big"), says("answer"))
            recording.add(chat("side", model="small"), says("answer"))
            recording.log.close()
            lost = number == COUNT - 2
            verdict = passed(attempt, ledger.token)
            if lost:
                verdict = failed(attempt, ledger.token, FailureOrigin.RESOURCE, "memory")
            usage = ModelUsage(requests=3, input_tokens=100 * number)
            times = PhaseTimes(acting=10.0 * number)
            await ledger.settle(msgspec.structs.replace(verdict, times=times, usage=usage))
            await ledger.close_sample(
                Outcome(
                    instance=row,
                    sample=0,
                    attempt=attempt,
                    kind="resource" if lost else "passed",
                    score=None if lost else 1.0,
                    where=FailureOrigin.RESOURCE if lost else None,
                )
            )
        await ledger.note("worker.retired", "worker 1: it has grown")
        await ledger.note("model.steered", HOSTILE)
        for at in range(3):
            gauge = RunGauge(
                at=float(at), running=at, binds=("memory", "slots", HOSTILE)[at], oom_kills=at // 2
            )
            await ledger.add_gauge(gauge)
    async with Ledger(directory):
        pass  # a second conductor
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run_async(make_run(tmp_path_factory.mktemp("lists") / "runs" / "tagged"))


@pytest.fixture
def reader(run: RunDirectory) -> Iterator[LedgerReader]:
    with LedgerReader(run) as opened:
        yield opened


def list_names(reader: LedgerReader, **wanted: str) -> list[str]:
    samples = SampleList(reader, SampleFilter(**wanted))
    rows = samples.read_page(10)
    assert samples.count() == len(rows)
    return [row.instance for row in rows]


def test_samples_are_filtered_by_tag_and_place(reader: LedgerReader) -> None:
    assert list_tags(reader) == [HOSTILE, "all", "even"]
    assert list_places(reader) == ["resource"]
    assert list_names(reader, tag="even") == ["i0", "i2", "i4"]
    assert list_names(reader, tag="even", kind="passed", sort="time") == ["i0", "i2"]
    assert list_names(reader, tag="nothing") == []
    assert list_names(reader, place="resource") == ["i4"]


def test_the_extremes_begin_as_the_list_in_that_order(reader: LedgerReader) -> None:
    for sort in ("time", "tokens", "tries"):
        whole = SampleList(reader, SampleFilter(sort=sort, descending=True)).read_page(3)
        assert list_extremes(reader, sort, 3) == whole
    assert list_extremes(reader, "cost", 3) == [], "nothing is known"


def test_marks_name_recycling_steering_kills_and_resumes(reader: LedgerReader) -> None:
    marks = list_marks(reader, {"worker.retired": "recycled", "model.steered": "steered"})

    assert [(label, message) for _, label, message in marks] == [
        ("recycled", "worker 1: it has grown"),
        ("steered", HOSTILE),
        ("resumed", ""),
        ("OOM", "i4"),
    ]


def test_usage_is_summed_by_model(reader: LedgerReader) -> None:
    sums = ModelUsageSums(reader)
    assert len(list(sums.sum_attempts())) == 4 * (COUNT - 1), "a step for each record and attempt"

    assert {name: usage.requests for name, usage in sums.models.items()} == {
        "big": 2 * (COUNT - 1),
        "small": COUNT - 1,
    }
    assert (sums.attempts, sums.skipped) == (COUNT - 1, 0)


def test_the_names_of_models_are_bounded(tmp_path: Path) -> None:
    directory = run_async(recorded(tmp_path / "run", chat=True))
    recording = Recording(directory, 1)
    recording.log.path.unlink()
    for number in range(MOST_MODELS + 9):
        recording.add({**chat(f"{number}"), "model": f"m{number}"}, says("x"))
    recording.log.close()

    with LedgerReader(directory) as reader:
        sums = ModelUsageSums(reader)
        list(sums.sum_attempts())
    assert len(sums.models) == MOST_MODELS + 1 and sums.models[FURTHER].requests == 9


def test_tags_are_bounded_and_follow_a_changed_instance(tmp_path: Path) -> None:
    async def make() -> RunDirectory:
        directory = new_run(tmp_path / "run")
        async with Ledger(directory) as ledger:
            await ledger.plan([make_instance(0, [f"t{n:02}" for n in range(MOST_TAGS + 5)]), planned("i1")])
            await ledger.plan([make_instance(2, "one value"), make_instance(3, [1, None, {"a": 2}])])
            await ledger.replace_instance(make_instance(2, ["other"]))
        return directory

    with LedgerReader(run_async(make())) as reader:
        tags = list_tags(reader)
        assert [tag for tag in tags if not tag.startswith("t")] == ["1", "None", "other", "{'a': 2}"]
        assert len(tags) == MOST_TAGS + 4
        assert list_names(reader, tag="other") == ["i2"]


def test_an_older_ledger_has_no_tags_until_it_is_migrated(tmp_path: Path) -> None:
    directory = run_async(make_run(tmp_path / "run"))
    with closing(sqlite3.connect(directory.database)) as connection:
        connection.execute("DROP TABLE tag")
        for column in ("answer", "version"):
            connection.execute(f"ALTER TABLE attempt DROP COLUMN {column}")
        connection.execute("PRAGMA user_version = 7")
        connection.commit()
    with LedgerReader(directory) as reader:
        assert list_tags(reader) == []
        with pytest.raises(BadInput, match="no table of tags"):
            list_names(reader, tag="even")

    async def open_ledger() -> None:
        async with Ledger(directory):
            pass

    run_async(open_ledger())
    with LedgerReader(directory) as reader:
        assert list_names(reader, tag="even") == ["i0", "i2", "i4"]
        assert list_tags(reader) == [HOSTILE, "all", "even"]


# In a browser


@pytest.fixture(scope="module")
def runs(run: RunDirectory) -> Path:
    run_async(recorded(run.path.parent / "talks", chat=False))
    return run.path.parent


def test_runs_are_filtered_and_sorted_by_the_address(page: Page) -> None:
    links = page.locator("table.rows tbody td:first-child a")
    expect(links).to_have_count(2)
    page.select_option("select[name=sort]", "score")
    expect(links.first).to_contain_text("tagged")
    page.select_option("select[name=order]", "up")
    expect(links.first).to_contain_text("talks")
    page.reload()
    expect(links.first).to_contain_text("talks")
    page.select_option("select[name=state]", "finished")
    expect(links).to_have_count(0)
    assert "state=finished" in page.url and "order=up" in page.url


def test_instances_are_filtered_by_tag(page: Page) -> None:
    page.get_by_role("link", name="tagged").click()
    page.get_by_role("link", name="all instances").click()
    rows = page.locator("#rows tbody tr")
    expect(rows).to_have_count(COUNT)
    page.select_option("select[name=tag]", HOSTILE)
    expect(rows).to_have_count(3)
    page.reload()
    expect(rows).to_have_count(3)
    page.select_option("select[name=tag]", "")
    page.select_option("select[name=place]", "resource")
    expect(rows).to_have_count(1)
    assert "owned" not in page.title()


def test_a_run_shows_its_limits_and_its_models(page: Page) -> None:
    page.get_by_role("link", name="tagged").click()
    expect(page.get_by_text("limited by:")).to_contain_text(HOSTILE)
    expect(page.locator("#charts")).to_contain_text("recycled")
    expect(page.locator("#charts")).to_contain_text("OOM")
    page.get_by_role("button", name="count").click()
    expect(page.locator("#part tbody tr")).to_have_count(2)
    expect(page.locator("#part tbody tr").first).to_contain_text("big")
    expect(page.locator("#work")).to_contain_text(f"{COUNT - 1} attempts")
    assert "owned" not in page.title()
