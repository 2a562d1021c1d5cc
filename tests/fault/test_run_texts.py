"""Text that nothing can write down, or far too much of it, costs neither a worker nor a verdict."""

from __future__ import annotations

from tests.command_runner import Scene

from holdwater.core.masking import LONGEST_TEXT
from holdwater.ledger.reader import LedgerReader

SUITE = """
import logging

import holdwater as hw

HALF = "caf\\udce9"  # as the name of a file of odd bytes


def instances():
    for name in ("kind", "types", "log", "message", "detail", "plain"):
        yield hw.Instance(id=name)


async def solve(instance, sandbox, model):
    if instance.id == "kind":
        raise hw.AgentFailed("gave up", kind=HALF)
    if instance.id == "types":
        raise hw.AgentFailed(None, kind=5, again="no", after="soon")
    if instance.id == "message":
        raise hw.AgentFailed("m" * HUGE)
    if instance.id == "log":
        logging.getLogger("agent").warning("%s", HALF)


async def grade(instance, sandbox, answer):
    return hw.Grade(passed=True, score=1.0, detail="d" * HUGE if instance.id == "detail" else HALF)


suite = hw.Suite(name="texts", instances=instances, grade=grade)
"""
HUGE = 260 << 20  # characters: over what a message between processes may be


def test_texts_from_users_are_cleaned_and_cut(scene: Scene) -> None:
    scene.suite(SUITE, HUGE=HUGE)

    command = scene.run(*scene.agent(), "--workers", "1", "--concurrency", "2", "--ungoverned")

    assert command.wait(100) == 0, command
    assert command.document()["events"] == {}, "no worker is lost"
    assert scene.outcomes() == dict.fromkeys(("kind", "types", "log", "message", "detail", "plain"), "passed")
    with LedgerReader(scene.out) as reader:
        verdicts = {row.instance: row.verdict for row in reader.attempts()}
    kind, message, detail = (verdicts[name] for name in ("kind", "message", "detail"))
    assert kind and kind.failure and kind.failure.kind == "caf\\udce9"
    assert kind.grade and kind.grade.detail == "caf\\udce9"
    for text in (message and message.failure and message.failure.message, detail and detail.grade.detail):  # type: ignore[union-attr]
        assert text and len(text) < LONGEST_TEXT + 100
        assert f"[cut: {HUGE - LONGEST_TEXT} characters]" in text
    scene.assert_whole(6)
