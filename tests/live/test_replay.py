"""Replies of earlier attempts given again: in a retry while requests match, in a replay without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdwater as hw
from holdwater.cli import main
from holdwater.core.errors import BadInput, SandboxFailed
from holdwater.ledger.exchanges import read_exchanges
from holdwater.ledger.reader import LedgerReader

PRICES = '["*"]\ninput = 3.0\noutput = 15.0\n'


def suite(count: int = 3, **options: Any) -> hw.Suite:
    def instances() -> Iterator[hw.Instance]:
        return (hw.Instance(id=f"i{n}", instruction=f"count to {n}") for n in range(count))

    return hw.Suite(name="counting", instances=instances, grade=lambda i, s, answer: answer == "3", **options)


class Model:
    """A policy that counts what it is asked, and says how often it was."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request["messages"])
        said = sum(message["role"] == "assistant" for message in request["messages"]) + 1
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        choice = {"index": 0, "message": {"role": "assistant", "content": str(said)}, "finish_reason": "stop"}
        return {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


async def counting(instance: hw.Instance, sandbox: Any, model: Any, turns: int = 3, **extra: Any) -> str:
    messages = [{"role": "user", "content": instance.instruction}]
    answer = ""
    for _ in range(turns):
        reply = await model.chat(messages, **extra)
        answer = reply["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "next"}]
    return answer


def failing_once(at: int) -> Any:
    """An agent whose sandbox breaks after `at` turns of its first try at each instance."""
    tried: set[str] = set()

    async def solve(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        if instance.id not in tried:
            tried.add(instance.id)
            await counting(instance, sandbox, model, turns=at)
            raise SandboxFailed("the sandbox broke")
        return await counting(instance, sandbox, model)

    return solve


async def arun(place: Path, agent: Any, model: Model, **options: Any) -> hw.RunSummary:
    prices = place.with_suffix(".toml")
    prices.write_text(PRICES)
    return await hw.arun(suite(), agent, out=place, policy=model, prices=prices, backoff=0.01, **options)


async def test_a_retried_attempt_pays_only_for_what_was_not_recorded(tmp_path: Path) -> None:
    model = Model()

    summary = await arun(tmp_path / "run", failing_once(2), model)

    assert summary.outcomes == {"passed": 3} and summary.attempts == 6
    assert len(model.asked) == 9  # three turns for each of three instances, and none twice
    assert summary.usage.requests == 9 and summary.saved.requests == 6
    assert summary.saved.input_tokens == 60 and summary.saved.output_tokens == 12
    assert summary.cost == pytest.approx(9 * (10 * 3 + 2 * 15) / 1e6)
    assert summary.saved.nanodollars == 6 * 60_000


async def test_the_record_of_a_retry_is_whole_and_marks_replayed_replies(tmp_path: Path) -> None:
    await arun(tmp_path / "run", failing_once(2), Model())

    with LedgerReader(tmp_path / "run") as reader:
        second = next(row.attempt for row in reader.attempts() if row.number == 2)
        exchanges = list(read_exchanges(reader.directory, second))
    assert [e.saved.requests for e in exchanges] == [1, 1, 0]
    assert [e.usage.requests for e in exchanges] == [0, 0, 1]
    turns = list(hw.transcript(tmp_path / "run", "i0"))
    assert [turn.recorded for turn in turns] == [True, True, False]
    assert [turn.usage.input_tokens for turn in turns] == [10, 10, 10]


async def test_a_new_round_and_a_new_sample_are_asked_afresh(tmp_path: Path) -> None:
    model = Model()

    async def wrong(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        return await counting(instance, sandbox, model, turns=2)

    summary = await arun(tmp_path / "run", wrong, model, attempts=2, samples=2)

    assert summary.outcomes == {"failed": 6} and summary.attempts == 12
    assert len(model.asked) == 24 and summary.saved.requests == 0


async def test_calls_that_the_record_answers_count_against_the_attempts_budget(tmp_path: Path) -> None:
    model = Model()

    summary = await arun(tmp_path / "run", failing_once(2), model, max_requests=2)

    assert summary.usage.requests == 6 and summary.saved.requests == 6
    assert summary.outcomes == {"failed": 3}  # the third turn is one too many, as it was the first time


async def test_a_replay_gives_the_same_verdicts_without_a_model(tmp_path: Path) -> None:
    agent = failing_once(2)
    first = await arun(tmp_path / "run", agent, Model())

    again = await hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=suite(), agent=counting)

    assert again.outcomes == first.outcomes and again.exit_status == 0
    assert again.usage.requests == 0 and again.saved.requests == 9
    assert again.events == {} and again.replays == str(tmp_path / "run")
    assert hw.audit(tmp_path / "again").ok


async def test_a_replay_says_which_requests_are_not_in_the_record(tmp_path: Path) -> None:
    await arun(tmp_path / "run", counting, Model())

    async def longer(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        return await counting(instance, sandbox, model, turns=4 if instance.id == "i1" else 3)

    again = await hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=suite(), agent=longer)

    assert again.outcomes == {"passed": 2, "model": 1} and again.exit_status == 1
    assert again.attempts == 3  # the same would come again
    with LedgerReader(tmp_path / "again") as reader:
        failure = next(r.verdict.failure for r in reader.attempts() if r.verdict and r.verdict.failure)
    assert failure.kind == "unrecorded" and "not in the record" in failure.message


async def test_a_replayed_turn_that_differs_gets_its_recorded_reply_and_is_counted(
    tmp_path: Path,
) -> None:
    took = iter(range(100))

    async def timed(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        messages = [{"role": "user", "content": instance.instruction}]
        for _ in range(3):
            reply = await model.chat(messages)
            answer: str = reply["choices"][0]["message"]["content"]
            messages += [reply["choices"][0]["message"], {"role": "user", "content": f"took {next(took)}"}]
        return answer

    await arun(tmp_path / "run", timed, Model())

    again = await hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=suite(), agent=timed)

    assert again.outcomes == {"passed": 3} and again.usage.requests == 0
    assert again.events == {"replay.drifted": 3}


async def test_show_says_which_request_of_a_replay_differs_and_where(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Given a replay whose agent says another time from its second turn on."""
    run = iter(["first", "second"])
    told: dict[str, str] = {}

    async def timed(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        told.setdefault("run", next(run))
        messages = [{"role": "user", "content": instance.instruction}]
        for turn in range(3):
            options = {"temperature": 0.5} if turn == 2 and told["run"] == "second" else {}
            reply = await model.chat(messages, **options)
            said = reply["choices"][0]["message"]
            steady = {"role": "user", "content": "go on"}
            messages += [said, steady if turn else {"role": "user", "content": f"took {told['run']} s"}]
        answer: str = said["content"]
        return answer

    await arun(tmp_path / "run", timed, Model(), only=["i0"])
    told.clear()
    await hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=suite(), agent=timed)

    assert main(["show", str(tmp_path / "again"), "i0"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    place = "message 3 `content` character 6: recorded `first s`, now `second s`"
    assert f"replay.drifted: 2 requests differ from the recorded ones: requests 2, 3 at {place}" in shown


async def test_a_replay_names_the_parameter_that_differs(tmp_path: Path) -> None:
    warmth: dict[str, float] = {}

    async def warm(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        return await counting(instance, sandbox, model, **warmth)

    await arun(tmp_path / "run", warm, Model(), only=["i0"])
    warmth["temperature"] = 0.5
    await hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=suite(), agent=warm)

    with LedgerReader(tmp_path / "again") as reader:
        [event] = [event for event in reader.events() if event.kind == "replay.drifted"]
    assert event.message.endswith("requests 1, 2, 3 at `temperature`: recorded `nothing`, now `0.5`")


async def test_a_replay_takes_the_tried_instances_or_a_selection_of_them(tmp_path: Path) -> None:
    await arun(tmp_path / "run", counting, Model(), only=["i0", "i2"])

    whole = await hw.areplay(tmp_path / "run", out=tmp_path / "a", suite=suite(), agent=counting)
    part = await hw.areplay(tmp_path / "run", out=tmp_path / "b", only=["i2"], suite=suite(), agent=counting)

    assert (whole.settled, whole.total) == (2, 2) and part.settled == 1


async def test_a_replay_that_was_interrupted_is_resumed(tmp_path: Path) -> None:
    await arun(tmp_path / "run", counting, Model())
    reached = asyncio.Event()

    async def slow(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        if instance.id == "i2" and not reached.is_set():
            reached.set()
            await asyncio.sleep(3600)
        return await counting(instance, sandbox, model)

    running = asyncio.ensure_future(
        hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=suite(), agent=slow)
    )
    await reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    summary = await hw.aresume(tmp_path / "again", suite=suite(), agent=slow)

    assert summary.outcomes == {"passed": 3} and summary.usage.requests == 0


async def test_a_run_in_which_nothing_was_tried_cannot_be_replayed(tmp_path: Path) -> None:
    nothing = hw.Suite(name="empty", instances=lambda: [], grade=lambda i, s, a: True)
    await hw.arun(nothing, counting, out=tmp_path / "run", policy=Model())

    with pytest.raises(BadInput, match="nothing has been tried"):
        await hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=nothing, agent=counting)
    assert not (tmp_path / "again").exists()
