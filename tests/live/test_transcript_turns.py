"""A conversation reads back from disk as it was: its turns, what is beside them, what was sent."""

from __future__ import annotations

import base64
import json
import os
import tracemalloc
from pathlib import Path

import pytest
from tests.ledger_runs import new_run, passed, planned
from tests.recorded_conversations import CONVERSATIONS, IMAGE, PIXELS, Recording, chat, recorded, says

import holdwater as hw
from holdwater.cli import main
from holdwater.cli.transcript import print_text
from holdwater.conversation.trajectory import ExchangeTree, read_turns, render_raw_turn
from holdwater.core.records import Attempt, Outcome
from holdwater.dialect.message import CommonMessage, MessageMedia
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.reader import LedgerReader


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
async def test_a_turn_is_what_was_new_and_the_reply(tmp_path: Path, name: str) -> None:
    directory = await recorded(tmp_path, **{name: True})

    first, second = hw.transcript(tmp_path, name)

    blob = directory.blobs
    system, user = first.new
    assert (system.text, user.text) == ("You are careful.", "What is here?")
    assert isinstance(user.parts[1], MessageMedia) and user.parts[1].type == "image/png"
    assert list(blob.rglob(f"{user.parts[1].blob}*"))
    assert first.reply is not None
    assert (first.reply.reasoning, first.reply.calls[0].arguments) == ("Look first.", {"command": "ls"})
    assert [(m.role, m.text, m.answers) for m in second.new] == [("tool", "a.txt", first.reply.calls[0].id)]
    assert second.reply == CommonMessage(role="assistant", parts=("a.txt.",))
    assert (first.thread, second.thread, second.parent, second.dialect) == (0, 0, 1, name)


def test_side_roots_branches_and_retries_are_distinguished_from_the_trajectory(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    recording = Recording(directory, 1)
    recording.add(chat("a"), says("b"))
    recording.add(chat("name this"), says("a title"))  # 2: a side root
    recording.add(chat("a", "b", "c"), None, "status 429", 429)
    recording.add(chat("a", "b", "c"), says("d"))  # 4: the same again
    recording.add(chat("a", "b", "other"), says("x"))  # 5: a branch
    recording.add(chat("a", "b", "c", "d", "e"), says("f"))
    recording.log.close()

    tree = ExchangeTree(directory, 1)
    told = list(read_turns(tree))

    assert [thread.numbers for thread in tree.threads()] == [(1, 3, 4, 6), (2,), (5,)]
    assert [(turn.number, turn.thread, turn.parent, turn.dropped) for turn in told] == [
        (1, 0, None, 0),
        (3, 0, 1, 0),
        (4, 0, 3, 0),
        (6, 0, 4, 0),
        (2, 1, None, 0),
        (5, 2, 4, 1),
    ]
    assert [[m.text for m in turn.new] for turn in told] == [
        ["a"],
        ["c"],
        [],
        ["e"],
        ["name this"],
        ["other"],
    ]
    assert (told[1].reply, told[1].error, told[1].status) == (None, "status 429", 429)


def test_a_reply_that_comes_back_changed_is_new(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    recording = Recording(directory, 1)
    recording.add(chat("a"), says("b"))
    recording.add(chat("a", "something else", "c"), says("d"))
    recording.log.close()

    _, second = read_turns(ExchangeTree(directory, 1))

    assert [message.text for message in second.new] == ["something else", "c"]


@pytest.mark.parametrize("name", sorted(CONVERSATIONS))
async def test_raw_is_what_was_sent(tmp_path: Path, name: str) -> None:
    directory = await recorded(tmp_path, **{name: True})
    tree = ExchangeTree(directory, 1)

    for number, (request, reply) in enumerate(CONVERSATIONS[name], 1):
        document = json.loads(b"".join(render_raw_turn(tree, number)))
        expected = {key: value for key, value in request.items() if (name, key) != ("gemini", "model")}
        assert document["request"] == expected
        assert document["reply"] == reply


def test_raw_of_a_branch_has_its_own_messages_and_head(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    recording = Recording(directory, 1)
    requests = [
        chat("a", IMAGE, "c"),
        chat("a", IMAGE, "c", "d", "e", tools=[{"big": "x" * 5000}]),
        chat("a", IMAGE, "other"),
        chat("a", IMAGE, "other", "y", "z"),
        chat(),
    ]
    for request in requests:
        recording.add(request, says("r"))
    recording.log.close()
    tree = ExchangeTree(directory, 1)

    sent = [json.loads(b"".join(render_raw_turn(tree, number)))["request"] for number in range(1, 6)]

    assert sent == requests


async def test_a_regrade_shows_the_conversation_that_it_grades(tmp_path: Path) -> None:
    directory = await recorded(tmp_path, chat=True)
    async with Ledger(directory) as ledger:
        await ledger.begin_attempt(Attempt(id=2, instance=1, sample=0, number=2, regrades=1))
        await ledger.settle(passed(2, ledger.token))
        await ledger.close_sample(Outcome(instance=1, sample=0, attempt=2, kind="passed", score=1.0))

    assert len(list(hw.transcript(tmp_path, "chat"))) == 2
    assert len(list(hw.transcript(tmp_path, "chat", attempt=1))) == 2
    with pytest.raises(hw.BadInput):
        list(hw.transcript(tmp_path, "chat", attempt=3))


async def test_a_long_history_is_not_held(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    size = 1 << 20
    async with Ledger(directory) as ledger:
        await ledger.plan([planned("long")])
        await ledger.begin_attempt(Attempt(id=1, instance=1, sample=0, number=1))
        recording = Recording(directory, 1)
        texts: list[str] = []
        for number in range(20):
            texts += [base64.b64encode(os.urandom(size * 3 // 4)).decode()]
            recording.add(chat(*texts), says(f"reply {number}"))
            texts += [f"reply {number}"]
        recording.log.close()
        await ledger.settle(passed(1, ledger.token, 20))

    with LedgerReader(directory) as reader, (tmp_path / "out").open("wb") as out:
        tracemalloc.start()
        print_text(next(reader.attempts()), ExchangeTree(directory, 1), None, out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert (tmp_path / "out").stat().st_size > 20 * size
    assert peak < 16 * size


# The command.


def command(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["transcript", *words]) == 0
    return capfd.readouterr().out


async def test_a_transcript_can_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    await recorded(tmp_path, messages=True)

    page = command(capfd, str(tmp_path), "messages")

    told = page.splitlines()
    assert told[0] == "messages  attempt 1: passed, 2 turns"
    assert told[2].startswith("--- turn 1  ")
    assert told[2].endswith("0.5s  100 in (10 cached), 20 out  claude-x-2026  tool_use")
    picture = told[7]
    assert picture.startswith("  [image/png 6 KB blob ")
    assert [*told[3:7], *told[8:13]] == [
        "system",
        "  You are careful.",
        "user",
        "  What is here?",
        "assistant",
        "  Look first.",
        "  I look.",
        "  > bash  call_1",
        "    command: ls",
    ]
    assert told[15:19] == ["tool  bash call_1", "  a.txt", "assistant", "  a.txt."]


async def test_one_turn_raw_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    await recorded(tmp_path, chat=True)
    place = str(tmp_path)

    one = command(capfd, place, "chat", "--turn", "2")
    every = json.loads(command(capfd, place, "chat", "--json"))
    [second] = json.loads(command(capfd, place, "chat", "--json", "--turn", "2"))
    raw = json.loads(command(capfd, place, "chat", "--raw", "--turn", "1"))

    assert "turn 1" not in one and "a.txt." in one
    assert [turn["number"] for turn in every] == [1, 2]
    assert (second["number"], second["reply"]["parts"]) == (2, ["a.txt."])
    assert raw["request"] == CONVERSATIONS["chat"][0][0]
    assert base64.b64decode(raw["request"]["messages"][1]["content"][1]["image_url"]["url"][22:]) == PIXELS


@pytest.mark.parametrize("words", [["chat", "--turn", "9"], ["chat", "--attempt", "2"], ["nobody"]])
async def test_a_missing_turn_attempt_or_instance_is_refused(
    tmp_path: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    await recorded(tmp_path, chat=True)

    assert main(["transcript", str(tmp_path), *words]) == 2

    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ")


async def test_an_attempt_that_never_called_its_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = new_run(tmp_path)
    async with Ledger(directory) as ledger:
        await ledger.plan([planned("mute")])
        await ledger.begin_attempt(Attempt(id=1, instance=1, sample=0, number=1))

    assert command(capfd, str(tmp_path), "mute", "--json") == "[]\n"
    assert "no model call was made" in command(capfd, str(tmp_path), "mute")
