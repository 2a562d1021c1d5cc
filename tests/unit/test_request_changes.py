"""The difference between a request and the one before: messages, tools, parameters, within bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ledger_runs import new_run
from tests.recorded_conversations import CHAT_HEAD, CONVERSATIONS, Recording, chat, says

from holdwater.conversation.exchange_tree import ExchangeTree
from holdwater.conversation.request_changes import MOST_SHOWN, RequestChanges, compare_request, compare_texts


def compare(path: Path, *exchanges: tuple[dict[str, Any], Any], dialect: str = "chat") -> RequestChanges:
    """Record the exchanges and compare the last one with the one before."""
    directory = new_run(path / "run")
    recording = Recording(directory, 1, dialect)
    for request, reply in exchanges:
        recording.add(request, reply)
    recording.log.close()
    return compare_request(ExchangeTree(directory, 1), len(exchanges))


def describe(changes: RequestChanges) -> list[tuple[str, str, str]]:
    return [(change.kind, change.message.role, change.message.text) for change in changes.messages]


def test_a_first_request_adds_all_its_messages(tmp_path: Path) -> None:
    changes = compare(tmp_path, (chat("one", "two", "three"), says("four")))

    assert changes.before is None and changes.kept == 0
    assert describe(changes) == [
        ("added", "user", "one"),
        ("added", "assistant", "two"),
        ("added", "user", "three"),
    ]


@pytest.mark.parametrize("dialect", sorted(CONVERSATIONS))
def test_a_reply_that_is_sent_back_is_no_addition(tmp_path: Path, dialect: str) -> None:
    changes = compare(tmp_path, *CONVERSATIONS[dialect], dialect=dialect)

    assert changes.before == 1 and changes.kept > 0 and not changes.fields
    assert [kind for kind, _, _ in describe(changes)] == ["returned", "added"]
    assert changes.messages[1].message.role == "tool"


def test_a_reply_that_the_client_changed_is_shown_with_its_lines(tmp_path: Path) -> None:
    changes = compare(
        tmp_path, (chat("one"), says("same\nold\nend")), (chat("one", "same\nnew\nend", "go on"), says("x"))
    )

    assert [kind for kind, _, _ in describe(changes)] == ["edited", "added"]
    lines = changes.messages[0].lines
    assert ("removed", "old") in lines and ("added", "new") in lines and ("same", "same") in lines


def test_messages_removed_and_edited_in_the_middle_are_found(tmp_path: Path) -> None:
    long = ["system text", "a1", "q2", "a2", "q3"]
    short = ["system text", "a1", "q2 edited", "a2", "q3", "a3", "q4"]
    changes = compare(tmp_path, (chat(*long), says("a3")), (chat(*short), says("x")))

    assert changes.kept == 2
    assert [(kind, text) for kind, _, text in describe(changes)] == [
        ("edited", "q2 edited"),
        ("added", "a3"),
        ("added", "q4"),
    ]
    assert changes.count("edited") == 1 and changes.count("removed") == 0


def test_messages_that_are_left_out_are_removed(tmp_path: Path) -> None:
    changes = compare(tmp_path, (chat("a", "b", "c", "d", "e"), says("x")), (chat("a", "b", "c"), says("y")))

    assert changes.kept == 3
    assert describe(changes) == [("removed", "assistant", "d"), ("removed", "user", "e")]
    assert [change.number for change in changes.messages] == [4, 5]


def test_tools_and_parameters_are_compared_by_name(tmp_path: Path) -> None:
    tool = CHAT_HEAD["tools"][0]
    other = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}
    louder = {"type": "function", "function": {**tool["function"], "description": "A louder shell"}}
    changes = compare(
        tmp_path,
        (chat("a", tools=[tool], temperature=0.5, seed=1), says("b")),
        (chat("a", "b", "c", tools=[louder, other], temperature=0.7, top_p=0.9), says("d")),
    )

    found = {(change.kind, change.name) for change in changes.fields}
    assert found == {
        ("edited", "tool bash"),
        ("added", "tool edit"),
        ("edited", "temperature"),
        ("removed", "seed"),
        ("added", "top_p"),
    }
    [bash] = [change for change in changes.fields if change.name == "tool bash"]
    assert any(kind == "added" and "A louder shell" in text for kind, text in bash.lines)


def test_a_system_prompt_outside_the_messages_is_compared(tmp_path: Path) -> None:
    (first, reply), (second, last) = CONVERSATIONS["messages"]
    changes = compare(
        tmp_path, (first, reply), ({**second, "system": "You are careless."}, last), dialect="messages"
    )

    assert [(change.kind, change.name) for change in changes.fields] == [("edited", "system")]
    assert any("careless" in text for kind, text in changes.fields[0].lines if kind == "added")


def test_differences_are_bounded() -> None:
    before = "\n".join(f"line {number}" for number in range(5000))
    after = "\n".join(f"other {number}" for number in range(5000))

    lines = list(compare_texts(before, after))

    assert len(lines) == MOST_SHOWN + 1
    assert lines[-1] == ("place", "…")


def test_one_long_line_is_compared_in_pieces() -> None:
    before = "x" * 50_000
    after = before[:20_000] + "HERE" + before[20_004:]

    lines = list(compare_texts(before, after))

    assert len(lines) < 10
    assert any(kind == "added" and "HERE" in text for kind, text in lines)
