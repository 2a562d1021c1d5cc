"""Bad input: exit 2 with a place and a sentence, or a verdict; never a traceback, nothing half-written.

`tests/live/test_error_texts.py` lists the texts.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.command_runner import Command, Scene
from tests.in_process_run import kinds, whole

GOOD = {"id": "good", "grade": "true"}
PYTHON = """
import holdwater as hw


def grade(instance, sandbox, answer):
    return True


def solve(instance, sandbox, model):
    return None


suite = hw.Suite(name="told", instances=instances, grade=grade)
"""


def refused(command: Command) -> str:
    """What a command says that ends with bad input: a sentence, no traceback, nothing on stdout."""
    assert command.wait(60) == 2, command
    assert "Traceback" not in command.stderr, command
    assert command.stdout == "", command
    [line] = [line for line in command.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def rows(scene: Scene, *lines: Any) -> Command:
    """`run` on a JSONL suite with these lines."""
    path = scene.place / "tasks.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text))
    return scene.start("run", str(path), "--agent", "nop", "--out", str(scene.out), "--json")


def test_a_bad_row_is_refused_before_anything_is_made(scene: Scene) -> None:
    message = refused(rows(scene, GOOD, {"id": "a" * 10_000, "grade": "true"}))

    assert "tasks.jsonl:2: `id` has 10000 characters, at most 512" in message
    assert not scene.out.exists()


def test_a_line_of_100_mb_is_refused(scene: Scene) -> None:
    path = scene.place / "tasks.jsonl"
    with path.open("wb") as file:
        file.write(b'{"id": "a", "grade": "true", "instruction": "')
        file.write(b"x" * 100_000_000)
        file.write(b'"}\n')

    message = refused(scene.start("run", str(path), "--agent", "nop", "--out", str(scene.out)))

    assert "tasks.jsonl:1: the line is longer than 64 MiB" in message
    assert not scene.out.exists()


def test_an_id_is_never_a_path_or_a_word(scene: Scene) -> None:
    names = ["a/b", "..", ".", "../../etc/passwd", "/abs", "a b;$(x)'\"", "-rf", "~", "*", "é漢", "x" * 512]
    path = scene.place / "tasks.jsonl"
    path.write_text("".join(json.dumps({"id": name, "grade": "test -s made"}) + "\n" for name in names))
    agent = "sh -c 'echo \"$HOLDWATER_ID\" > made; echo printed'"
    command = scene.start("run", str(path), "--command", agent, "--out", str(scene.out), "--json")

    assert command.wait(60) == 0, command
    assert kinds(scene.out) == dict.fromkeys(names, "passed")
    assert sorted(entry.name for entry in scene.place.iterdir()) == ["commands", "run", "tasks.jsonl"]
    assert len(list((scene.out / "logs").glob("*.out"))) == len(names)
    whole(scene.out)


# Suites in Python: what was yielded before still settles.


YIELDING = """
import holdwater as hw


def instances():
    for n in range(5):
        yield hw.Instance(id=f"i{n}")
    BAD
"""
SETTLED = {f"i{n}": "passed" for n in range(5)}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("raise RuntimeError('no more')", "raised while yielding instance 6: RuntimeError: no more"),
        ("yield 'i6'", "yielded str as instance 6: expected `Instance`"),
        (
            "yield hw.Instance(id='i2')",
            "first in instance 3 of suite `told`, again in instance 6 of suite `told`",
        ),
        ("yield hw.Instance(id='i2', data={'another': 1})", "`i2`"),
        ("yield hw.Instance(id='a/../b' * 1000)", "`id` has 6000 characters"),
        ("yield hw.Instance(id='object', data={'x': object()})", "`object`"),
        ("yield hw.Instance(id='large', data={'x': 2**70})", "`large`"),
        ("raise SystemExit(0)", "raised while yielding instance 6: SystemExit"),
        ("raise KeyboardInterrupt", "raised while yielding instance 6: KeyboardInterrupt"),
    ],
)
def test_what_a_suite_yielded_before_its_mistake_settles(scene: Scene, bad: str, told: str) -> None:
    scene.file.write_text(YIELDING.replace("BAD", bad) + PYTHON)
    command = scene.run(*scene.agent(), "--workers", "0" if "another" in bad else "1")

    assert command.wait(60) == 2, command
    assert "Traceback" not in command.stderr, command
    summary = command.document()
    assert told in summary["reason"], summary
    assert (summary["state"], summary["planned"], summary["settled"]) == ("stopped", 5, 5)
    assert kinds(scene.out) == SETTLED
    whole(scene.out)


# A suite that changed between run and resume.


CHANGING = """
import holdwater as hw

IDS = TOLD


def instances():
    for name, text in IDS.items():
        yield hw.Instance(id=name, instruction=text)
    assert not RAISES, "not yet"
"""


def changing(scene: Scene, ids: dict[str, str], raises: bool = False) -> None:
    scene.file.write_text(CHANGING.replace("TOLD", repr(ids)).replace("RAISES", repr(raises)) + PYTHON)


BEFORE = {"a": "one", "b": "two", "c": "three"}


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({**BEFORE, "b": "changed"}, "changed: `b`"),
        ({"a": "one", "c": "three"}, "missing: `b`"),
        ({"b": "changed", "c": "three"}, "changed: `b`; missing: `a`"),
    ],
)
def test_a_changed_suite_is_named_and_needs_to_be_accepted(
    scene: Scene, after: dict[str, str], told: str
) -> None:
    changing(scene, BEFORE, raises=True)
    assert scene.run(*scene.agent(), "--workers", "0").wait(60) == 2
    changing(scene, {**after, "new": "four"})

    command = scene.resume()
    assert command.wait(60) == 2, command
    assert "Traceback" not in command.stderr, command
    assert told in command.document()["reason"]
    assert kinds(scene.out) == dict.fromkeys(BEFORE, "passed"), "what is settled stays settled"

    accepted = scene.start("resume", str(scene.out), "--json", "--accept-changes")
    assert accepted.wait(60) == 0, accepted
    assert kinds(scene.out) == dict.fromkeys([*BEFORE, "new"], "passed")
    whole(scene.out)


def test_new_instances_are_added_without_asking(scene: Scene) -> None:
    changing(scene, BEFORE, raises=True)
    assert scene.run(*scene.agent(), "--workers", "0").wait(60) == 2
    changing(scene, {**BEFORE, "d": "four"})

    assert scene.resume().wait(60) == 0
    assert kinds(scene.out) == dict.fromkeys([*BEFORE, "d"], "passed")
