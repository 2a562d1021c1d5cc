"""Records with their long texts cut: nothing is lost, every cut is at a character, memory stays small."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ledger_runs import new_run
from tests.recorded_conversations import Recording, chat, says

from holdwater.conversation.exchange_tree import ExchangeTree
from holdwater.conversation.long_texts import (
    LONGEST_TEXT,
    ShortRecords,
    TextCutter,
    split_cuts,
)
from holdwater.conversation.trajectory import Turn, read_turns, render_raw_turn
from holdwater.ledger.blobs import BlobStore
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import segment_path

SPECIAL = 'quote " backslash \\ both \\" newline \n wide \N{PILE OF POO}\u00e9\u20ac end'
LONG = SPECIAL * 2000


def record_texts(path: Path, *exchanges: tuple[dict[str, Any], Any]) -> ExchangeTree:
    directory = new_run(path / "run")
    recording = Recording(directory, 1)
    for request, reply in exchanges:
        recording.add(request, reply)
    recording.log.close()
    return open_short(directory)


def open_short(directory: RunDirectory) -> ExchangeTree:
    return ExchangeTree(directory, 1, ShortRecords(segment_path(directory, 1), BlobStore(directory.blobs)))


def require_short(tree: ExchangeTree) -> ShortRecords:
    assert isinstance(tree.records, ShortRecords)
    return tree.records


def read_first(tree: ExchangeTree) -> Turn:
    return next(iter(read_turns(tree)))


@given(
    texts=st.lists(st.text(max_size=40) | st.sampled_from(["\\" * 9, '"' * 9, SPECIAL]), max_size=6),
    ascii_only=st.booleans(),
    most=st.integers(1, 60),
    size=st.integers(1, 50),
)
@settings(max_examples=300, deadline=None)
def test_cut_json_is_valid_and_keeps_short_strings(
    texts: list[str], ascii_only: bool, most: int, size: int
) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    content = json.dumps({"a": texts, "b": 1}, ensure_ascii=ascii_only).encode()
    cutter = TextCutter(0, most)

    short = b"".join(cutter.cut(content[at : at + size] for at in range(0, len(content), size)))

    values = next(iter(msgspec.json.decode(short).values()))
    for text, shown in zip(texts, values, strict=True):
        encoded = json.dumps(text, ensure_ascii=ascii_only).encode()[1:-1]
        [first, *_] = split_cuts(shown)
        if len(encoded) <= most:
            assert shown == text
        else:
            assert text.startswith(first.text) and first.size == len(encoded)
            place = cutter.places[first.name]
            assert content[place.start : place.end] == encoded


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_text_is_read_whole_in_pieces(tmp_path: Path, ascii_only: bool) -> None:
    raw = json.loads(json.dumps(chat(LONG), ensure_ascii=ascii_only))
    tree = record_texts(tmp_path, (raw, says("short")))

    [part] = read_first(tree).new[0].parts
    assert isinstance(part, str)
    [cut] = [piece for piece in split_cuts(part) if piece.name]

    assert LONG.startswith(cut.text) and LONGEST_TEXT // 8 < len(cut.text) <= LONGEST_TEXT
    assert "".join(require_short(tree).read_text(cut.name)) == LONG
    assert cut.text + "".join(require_short(tree).read_text(cut.name, rest=True)) == LONG


def test_a_raw_turn_has_every_byte(tmp_path: Path) -> None:
    tree = record_texts(
        tmp_path,
        (chat("short", tools=[{"type": "function", "function": {"name": LONG}}]), says(LONG)),
        (chat("short", LONG, "more"), says("end")),
    )
    whole = ExchangeTree(RunDirectory(tmp_path / "run"), 1)

    for number in (1, 2):
        pieces = render_raw_turn(tree, number)
        raw = b"".join(out for piece in pieces for out in require_short(tree).write_whole(piece))
        assert raw == b"".join(render_raw_turn(whole, number))


def test_a_long_reply_that_is_sent_back_is_recognized(tmp_path: Path) -> None:
    tree = record_texts(tmp_path, (chat("a"), says(LONG)), (chat("a", LONG, "b"), says("end")))

    *_, last = read_turns(tree)

    assert [message.text for message in last.new] == ["b"]


def test_a_tree_is_extended_by_new_exchanges_only(tmp_path: Path) -> None:
    directory = new_run(tmp_path / "run")
    recording = Recording(directory, 1)
    recording.add(chat("a"), says("b"))
    tree = open_short(directory)
    recording.add(chat("a", "b", "c"), says("d"))
    recording.log.close()

    longer = tree.extend()

    assert list(tree.numbers()) == [1] and list(longer.numbers()) == [1, 2]
    assert [thread.numbers for thread in tree.threads()] == [(1,)]
    assert [thread.numbers for thread in longer.threads()] == [(1, 2)]


@pytest.mark.parametrize("megabytes", [10, pytest.param(20, marks=pytest.mark.proof)])
def test_a_large_message_takes_little_memory(tmp_path: Path, megabytes: int) -> None:
    chance = random.Random(1)
    text = "".join(chance.choices("abcdefgh \n\"'\\", k=1 << 16)) * 16 * megabytes
    record_texts(tmp_path, (chat(text), says("end")))
    directory = RunDirectory(tmp_path / "run")
    tracemalloc.start()
    try:
        tree = open_short(directory)
        turn = read_first(tree)
        [cut] = [piece for part in turn.new[0].parts if isinstance(part, str) for piece in split_cuts(part)]
        count = sum(len(piece) for piece in require_short(tree).read_text(cut.name))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert count == len(text)
    assert peak < 6 << 20
