"""Searching recorded exchanges: matches, large and foreign records, and an index that changes no result."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ledger_runs import exchange, failed, new_run, passed, planned
from tests.recorded_conversations import CONVERSATIONS, Recording, chat, recorded, says

from holdwater.conversation.text_search import LARGEST, TranscriptSearch, build_index, open_search
from holdwater.core.errors import BadInput
from holdwater.core.records import Attempt, FailureOrigin
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import segment_path
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.search import GRAM, SearchHit, SearchPattern, find_rows
from holdwater.ledger.search_index import NAME, find_index
from holdwater.ledger.segment import Segment


async def make_run(path: Path, *conversations: list[tuple[dict[str, Any], Any]]) -> RunDirectory:
    """Record an attempt for each conversation."""
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        for number, conversation in enumerate(conversations):
            [row] = await ledger.plan([planned(f"i{number}")])
            attempt = await ledger.next_attempt()
            await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
            record(directory, attempt, conversation)
            await ledger.settle(passed(attempt, ledger.token, len(conversation)))
    return directory


def record(directory: RunDirectory, attempt: int, conversation: list[tuple[dict[str, Any], Any]]) -> None:
    recording = Recording(directory, attempt)
    for request, reply in conversation:
        recording.add(request, reply)
    recording.log.close()


def search(directory: RunDirectory, text: str, *, after: tuple[int, int] = (0, 0)) -> list[SearchHit]:
    """Return all hits, with the index if there is one."""
    with (
        LedgerReader(directory) as reader,
        open_search(reader, SearchPattern(text), directory.path / "no cache", after) as found,
    ):
        hits = [hit for hit in found.find_hits() if hit is not None]
        assert found.problems == []
    return hits


def places(hits: list[SearchHit]) -> list[tuple[str, int | None, str]]:
    return [(hit.instance, hit.turn, hit.role) for hit in hits]


def build(directory: RunDirectory, cache: Path | None = None) -> list[str]:
    """Build the index; return its notes."""
    with LedgerReader(directory) as reader:
        steps = list(build_index(reader, cache or directory.path / "no cache"))
    return [step.note for step in steps if step.note]


TALK = [
    (chat("Find the Needle"), says("I look.", reasoning_content="a pin, perhaps")),
    (chat("Find the Needle", "I look.", "go on"), says("no needle")),
    (chat("Find the Needle", "I look.", "go on", "no needle", "and now?"), says("none")),
]


def test_a_turn_is_found_by_what_was_new_in_it(tmp_path: Path) -> None:
    directory = asyncio.run(make_run(tmp_path / "run", TALK, TALK[:1]))

    assert places(search(directory, "needle")) == [
        ("i0", 1, "user"),
        ("i0", 2, "assistant"),
        ("i1", 1, "user"),
    ]
    assert places(search(directory, "i LOOK")) == [("i0", 1, "assistant"), ("i1", 1, "assistant")]
    [hit, _] = search(directory, "pin,")
    assert (hit.before, hit.match, hit.after) == ("a ", "pin,", " perhaps")
    assert search(directory, "nowhere") == []
    assert places(search(directory, "needle", after=(1, 1))) == [("i0", 2, "assistant"), ("i1", 1, "user")]


@pytest.mark.parametrize("dialect", sorted(CONVERSATIONS))
def test_every_dialect_is_searched_with_its_calls_and_thoughts(dialect: str, tmp_path: Path) -> None:
    directory = asyncio.run(recorded(tmp_path / "run", **{dialect: True}))

    for text, turn, role in (
        ("What is here?", 1, "user"),
        ("Look first", 1, "assistant"),
        ("ls", 1, "assistant"),
        ("a.txt.", 2, "assistant"),
    ):
        assert places(search(directory, text)) == [(dialect, turn, role)], text


def test_rows_are_found_by_name_failure_and_answer(tmp_path: Path) -> None:
    async def make() -> RunDirectory:
        directory = new_run(tmp_path / "run")
        async with Ledger(directory) as ledger:
            for name, answer in (("Broken-1", None), ("whole", '"it BROKE the bank"')):
                [row] = await ledger.plan([planned(name)])
                attempt = await ledger.next_attempt()
                await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
                verdict = passed(attempt, ledger.token)
                if answer is None:
                    verdict = failed(attempt, ledger.token, FailureOrigin.AGENT)
                await ledger.settle(msgspec.structs.replace(verdict, answer=answer))
        return directory

    with LedgerReader(asyncio.run(make())) as reader:
        hits = list(find_rows(reader, SearchPattern("brok")))

    assert [(hit.kind, hit.instance, hit.match) for hit in hits] == [
        ("name", "Broken-1", "Brok"),
        ("failure", "Broken-1", "brok"),
        ("answer", "whole", "BROK"),
    ]


@given(st.text(min_size=1, max_size=12).filter(str.strip), st.booleans(), st.text(max_size=20))
def test_a_record_with_the_text_is_never_passed_over(text: str, ascii: bool, around: str) -> None:
    """However its client escapes it: as ASCII, not at all, or also markup."""
    pattern = SearchPattern(text)
    value = around + text.swapcase() if text.isascii() else around + text
    raw = json.dumps({"content": value}, ensure_ascii=ascii).encode(errors="surrogatepass")
    markup = raw.replace(b"<", b"\\u003c").replace(b">", b"\\u003E").replace(b"/", b"\\/")

    assert pattern.find(value) is not None
    assert pattern.may_match(raw) and pattern.may_match(markup)
    assert all(gram in value.lower() for gram in pattern.list_grams())


@pytest.mark.parametrize("text", ["", "  ", "x" * 201])
def test_a_text_that_cannot_be_searched_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="the text to search for"):
        SearchPattern(text)


def test_a_large_record_is_searched_in_pieces(tmp_path: Path) -> None:
    """It is not parsed; the match may lie on the border of two pieces."""
    directory = asyncio.run(make_run(tmp_path / "run", TALK[:1]))
    for number, text in ((2, "x" * (256 * 1024 - 40)), (3, "y" * 4 * LARGEST)):
        message = json.dumps({"role": "user", "content": f'{text} a "quoted" Thing {text}'}).encode()
        _append(directory, number, message)
    _append(directory, 4, b'{"role":"user","content":"a \\"quoted\\" thing"}')

    hits = search(directory, 'A "quoted" thing')

    assert places(hits) == [("i0", 2, "user"), ("i0", 3, ""), ("i0", 4, "user")]
    assert hits[1].match == 'a \\"quoted\\" Thing'


def _append(directory: RunDirectory, number: int, message: bytes) -> None:
    segment = Segment.open(segment_path(directory, 1))
    segment.append(msgspec.json.encode(exchange(number, [message])))
    segment.close()


# The index


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    talks = [[(chat(f"question {n} of {n % 3}"), says("ok"))] for n in range(12)]
    yield asyncio.run(make_run(tmp_path / "run", TALK, *talks))


def compare(directory: RunDirectory) -> None:
    """An index gives the hits that a scan gives."""
    index = directory.path / NAME
    for text in ("needle", "question 7", "of 2", "ok", "no", "nowhere", "question 1", "Thing", "é"):
        found = search(directory, text)
        index.rename(index.with_suffix(".away"))
        assert search(directory, text) == found
        index.with_suffix(".away").rename(index)


def test_an_index_changes_no_hit_and_spares_reading(run: RunDirectory) -> None:
    assert build(run) == []

    compare(run)
    with LedgerReader(run) as reader, open_search(reader, SearchPattern("question 7"), run.path) as found:
        assert [hit.instance for hit in found.find_hits() if hit] == ["i8"]
        sizes = [segment_path(run, attempt).stat().st_size for attempt in (9,)]
        assert found.bytes == sum(sizes)


def test_a_growing_run_is_searched_whole_and_indexed_further(run: RunDirectory) -> None:
    build(run)
    _append(run, 4, b'{"role":"user","content":"a late Thing"}')
    assert places(search(run, "late thing")) == [("i0", 4, "user")]
    compare(run)

    assert build(run) == []

    compare(run)
    with LedgerReader(run) as reader, open_search(reader, SearchPattern("needle"), run.path) as found:
        list(found.find_hits())
        assert 0 < found.bytes < segment_path(run, 1).stat().st_size, "the chunk without the text was read"


def test_large_records_are_read_by_every_search(run: RunDirectory) -> None:
    _append(run, 4, json.dumps({"role": "user", "content": "z" * 2 * LARGEST + "Thing"}).encode())
    build(run)

    assert places(search(run, "Thing")) == [("i0", 4, "")]
    compare(run)


def damage_header(path: Path) -> None:
    path.write_bytes(b"no database" * 1000)


def cut_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def set_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")
        connection.commit()


def spoil_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)


def change_run(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE about SET run = 'another'")
        connection.commit()


@pytest.mark.parametrize("spoil", [damage_header, cut_end, set_version, spoil_middle, change_run])
def test_an_unusable_index_is_noticed_and_built_anew(spoil: Any, run: RunDirectory) -> None:
    build(run)
    spoil(run.path / NAME)

    with LedgerReader(run) as reader, open_search(reader, SearchPattern("question 7"), run.path) as found:
        assert [hit.instance for hit in found.find_hits() if hit] == ["i8"]
        assert "the index is not used" in found.problems[0]
    assert "built anew" in build(run)[0]
    compare(run)


def test_a_segment_that_was_replaced_is_noticed(run: RunDirectory) -> None:
    build(run)
    segment_path(run, 1).unlink()
    record(run, 1, [(chat("other words"), says("yes"))])

    with LedgerReader(run) as reader, open_search(reader, SearchPattern("other words"), run.path) as found:
        assert [hit.turn for hit in found.find_hits() if hit] == [1]
    assert "have changed since" in build(run)[0]


def test_a_read_only_directory_has_its_index_in_the_cache(run: RunDirectory, tmp_path: Path) -> None:
    def list_names() -> list[str]:
        return sorted(path.name for path in run.path.iterdir() if not path.name.startswith("ledger.db"))

    before = list_names()
    run.path.chmod(0o500)
    try:
        build(run, tmp_path / "cache")

        assert list_names() == before
        found = find_index(run, tmp_path / "cache")
        assert found is not None and found.is_relative_to(tmp_path / "cache")
        assert found.stat().st_mode & 0o077 == 0
    finally:
        run.path.chmod(0o700)


def test_the_index_has_no_text(run: RunDirectory) -> None:
    build(run)

    assert b"needle" not in (run.path / NAME).read_bytes().lower()


def test_a_short_text_is_found_without_the_index(run: RunDirectory) -> None:
    assert SearchPattern("n" * (GRAM - 1)).list_grams() == []
    build(run)
    assert len(search(run, "ok")) == 13


def test_a_damaged_segment_is_named_and_the_others_are_searched(run: RunDirectory) -> None:
    path = segment_path(run, 1)
    content = bytearray(path.read_bytes())
    content[30] ^= 0xFF
    path.write_bytes(content)

    with LedgerReader(run) as reader:
        found = TranscriptSearch(reader, SearchPattern("question 7"))
        assert [hit.instance for hit in found.find_hits() if hit] == ["i8"]
        assert "is damaged at byte 0" in found.problems[0]
