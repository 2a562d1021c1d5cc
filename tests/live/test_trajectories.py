"""`holdwater.read` on real runs: rewards, messages, token sequences, orders, what is not kept; its cost."""

from __future__ import annotations

import base64
import io
import os
import random
import re
import shutil
import sqlite3
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.ledger_runs import failed, new_run, passed, planned
from tests.recorded_conversations import CONVERSATIONS, IMAGE, PIXELS, Recording, chat, recorded, says

import holdwater as hw
from holdwater.conversation import order_results
from holdwater.conversation.order_results import build_result, read_rollout
from holdwater.core.records import Attempt, ChildAttempt, FailureOrigin, Outcome
from holdwater.core.serving_protocol import Order, OrderResult, TrajectoryForm
from holdwater.core.token_sequences import SequenceStart
from holdwater.ledger.attempt_files import measure_tree
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import segment_path
from holdwater.ledger.ledger import Ledger
from holdwater.ledger.orders import OrderRow
from holdwater.ledger.reader import LedgerReader

ROOT = Path(__file__).parents[2]
END = 0  # the token that ends what the model says


# A policy that is its own tokenizer: a token for each character, one more behind each thing that was said.


def ids_of(messages: list[dict[str, Any]]) -> list[int]:
    ids: list[int] = []
    for message in messages:
        ids += [ord(letter) for letter in f"{message['role'][0]}:{message['content']}"]
        ids += [END] * (message["role"] == "assistant")
    return [*ids, ord("a"), ord(":")]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    text = str(len(request["messages"]))
    message = {"role": "assistant", "content": text}
    ids = [*map(ord, text), END]
    return {
        "prompt_token_ids": ids_of(request["messages"]),
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "stop",
                "token_ids": ids,
                "logprobs": {"content": [{"token": chr(one), "logprob": -one / 8} for one in ids]},
            }
        ],
    }


async def solve(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    """Three turns, the second as a stream; before the last, some change or forget what was said."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for turn in range(3):
        reply = await (streamed(model, messages) if turn == 1 else whole(model, messages))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "on"}]
        if instance.id == "rewritten" and turn == 1:
            messages[-2]["content"] = "three"
        if instance.id == "forgetful" and turn == 1:
            messages = [messages[0], *messages[-2:]]
    return f"{instance.id}!"


async def whole(model: Any, messages: list[dict[str, Any]]) -> str:
    reply = await model.chat(messages)
    return str(reply["choices"][0]["message"]["content"])


async def streamed(model: Any, messages: list[dict[str, Any]]) -> str:
    body = msgspec.json.encode({"model": "m", "messages": messages, "stream": True})
    where, key = f"{model.url}/chat/completions", {"Authorization": f"Bearer {model.key}"}
    async with aiohttp.ClientSession() as http, http.post(where, data=body, headers=key) as reply:
        lines = (await reply.text()).splitlines()
    events = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def grade(instance: hw.Instance, sandbox: Any, answer: str) -> hw.Grade:
    good = not answer.startswith("bad")
    return hw.Grade(passed=good, score=float(good), metrics={"length": float(len(answer))})


SUITE = hw.Suite(
    name="counting",
    instances=lambda: [hw.Instance(id=name) for name in ("good", "rewritten", "forgetful", "bad")],
    grade=grade,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("read") / "runs" / "mine"
    summary = hw.run(SUITE, solve, out=path, policy=answer, samples=2, workers=0)
    assert summary.outcomes == {"passed": 6, "failed": 2}
    return path


def test_trajectories_come_with_how_they_ended_and_what_was_said(run: Path) -> None:
    first, *_ = found = list(hw.read(run))

    assert [(t.instance, t.sample, t.outcome, t.reward) for t in found] == [
        *(("good", sample, "passed", 1.0) for sample in (0, 1)),
        *(("rewritten", sample, "passed", 1.0) for sample in (0, 1)),
        *(("forgetful", sample, "passed", 1.0) for sample in (0, 1)),
        *(("bad", sample, "failed", 0.0) for sample in (0, 1)),
    ]
    assert (first.answer, first.metrics, first.failure, first.order) == ("good!", {"length": 5.0}, None, None)
    assert (first.usage.requests, first.verdict.exchanges) == (3, 3)
    assert [(m["role"], m["content"]) for m in first.messages()] == [
        ("user", "go"),
        ("assistant", "1"),
        ("user", "on"),
        ("assistant", "3"),
        ("user", "on"),
        ("assistant", "5"),
    ]
    assert [turn.streamed for turn in first.turns()] == [False, True, False]


def test_tokens_are_one_sequence_with_a_mask_whether_streamed_or_not(run: Path) -> None:
    [tokens] = next(iter(hw.read(run, only=["good"]))).sequences()

    assert "".join(map(chr, tokens.ids)) == "u:goa:1\0u:ona:3\0u:ona:5\0"
    assert "".join(map(str, tokens.mask)) == "000000110000001100000011"
    assert list(tokens.logprobs) == [-one / 8 * on for one, on in zip(tokens.ids, tokens.mask, strict=True)]


@pytest.mark.parametrize(
    ("instance", "text"),
    [("rewritten", "u:goa:1\0u:ona:three\0u:ona:5\0"), ("forgetful", "u:goa:3\0u:ona:3\0")],
)
def test_a_rewritten_history_begins_another_sequence(run: Path, instance: str, text: str) -> None:
    first, second = next(iter(hw.read(run, only=[instance]))).sequences()

    assert "".join(map(chr, first.ids)) == "u:goa:1\0u:ona:3\0"
    assert ("".join(map(chr, second.ids)), second.reason) == (text, SequenceStart.REWRITTEN)
    assert (sum(first.mask), sum(second.mask)) == (4, 2)


def test_sampled_nodes_have_their_tokens(run: Path) -> None:
    nodes = list(next(iter(hw.read(run))).nodes())

    assert [node.parent for node in nodes] == [None, 0, 1, 2, 3, 4]
    assert [(node.tokens, node.finish) for node in nodes[1::2]] == [
        ((ord(letter), END), "stop") for letter in "135"
    ]
    assert all(node.tokens is None for node in nodes[0::2])


def test_without_ids_there_are_no_sequences(tmp_path: Path) -> None:
    hw.run(SUITE, solve, out=tmp_path / "run", policy=lambda request: "ok", workers=0)

    assert [trajectory.sequences() for trajectory in hw.read(tmp_path / "run")] == [[], [], [], []]


def test_some_of_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])

    assert len(hw.read("latest")) == 8
    assert len(hw.read(run, outcome="failed")) == 2 == len(list(hw.read(run, outcome="failed")))
    assert len(hw.read(run, only=["good", "bad"], outcome="passed")) == 2
    assert len(hw.read(run, attempts="all")) == 8 == len(list(hw.read(run, attempts="all")))
    assert [[t.sample for t in group] for group in hw.read(run).groups()] == [[0, 1]] * 4
    with pytest.raises(hw.BadInput, match="no such outcome: `won`"):
        hw.read(run, outcome="won")


async def test_conversations_that_are_not_kept_are_named(tmp_path: Path) -> None:
    await hw.arun(SUITE, solve, out=tmp_path / "run", policy=answer, keep="failures", workers=0)
    good, *_, bad = hw.read(tmp_path / "run")

    assert good.reward == 1.0
    with pytest.raises(hw.BadInput, match=r"not kept \(`--keep failures`\)"):
        list(good.nodes())
    assert len(list(bad.nodes())) == 6


async def test_what_goes_while_it_is_read_is_named_too(tmp_path: Path) -> None:
    directory = await recorded(tmp_path / "run", chat=True)
    [trajectory] = hw.read(directory.path)
    reading = trajectory.nodes()
    next(reading)
    with closing(sqlite3.connect(directory.database)) as connection, connection:
        connection.execute("INSERT INTO dropped VALUES (1, 0, 'none', NULL)")
    segment_path(directory, 1).unlink()

    with pytest.raises(hw.BadInput, match=r"not kept \(`--keep none`\)"):
        list(reading)


async def test_media_are_found_by_their_reference(tmp_path: Path) -> None:
    directory = await recorded(tmp_path / "run", chat=True, messages=True)
    openai, anthropic = hw.read(directory.path)

    reference = list(openai.nodes())[1].message["content"][1]["image_url"]["url"]
    bare = list(anthropic.nodes())[1].message["content"][1]["source"]["data"]
    assert openai.blob(reference) == openai.blob(bare) == PIXELS
    assert list(anthropic.messages())[1]["content"][1]["image_url"]["url"] == IMAGE
    assert [tool["function"]["name"] for tool in anthropic.tools()] == ["bash"]


async def test_a_ledger_from_before_there_were_orders_is_read(tmp_path: Path) -> None:
    directory = await recorded(tmp_path / "run", chat=True)
    with closing(sqlite3.connect(directory.database)) as connection:
        connection.executescript("DROP TABLE rollout; DROP TABLE orders; PRAGMA user_version = 2")

    [[trajectory]] = hw.read(directory.path).groups()

    assert (trajectory.order, trajectory.key, trajectory.member) == (None, None, 0)


# What clients ordered.


class Shop:
    """Orders of one instance, and rollouts that talked in some dialect."""

    def __init__(self, ledger: Ledger, directory: RunDirectory) -> None:
        self._ledger = ledger
        self._directory = directory

    async def order(self, key: str, size: int) -> OrderRow:
        [row] = await self._ledger.plan([planned(key)])
        asked = msgspec.msgpack.encode(Order(key=key, instance=key, size=size))
        return await self._ledger.place_order(OrderRow(0, key, asked, 1.0, row, ()), size)

    async def close(self, order: OrderRow, sample: int, dialect: str = "chat", **about: Any) -> None:
        attempt = await self._ledger.next_attempt()
        await self._ledger.begin_attempt(
            Attempt(id=attempt, instance=order.instance, sample=sample, number=1)
        )
        recording = Recording(self._directory, attempt, dialect)
        for request, reply in CONVERSATIONS[dialect]:
            recording.add(request, reply)
        recording.log.close()
        verdict = passed(attempt, self._ledger.token, 2)
        verdict = msgspec.structs.replace(verdict, answer='{"n": 1}', **about)
        await self._ledger.settle(verdict)
        outcome = Outcome(instance=order.instance, sample=sample, attempt=attempt, kind="passed", score=0.5)
        await self._ledger.close_sample(outcome)


async def test_groups_are_orders_that_are_over(tmp_path: Path) -> None:
    directory = new_run(tmp_path / "run")
    async with Ledger(directory) as ledger:
        shop = Shop(ledger, directory)
        one, two, three = [await shop.order(key, 2) for key in ("a", "b", "c")]
        for order, sample in ((two, 1), (one, 0), (three, 0), (three, 1), (one, 1)):
            await shop.close(order, order.samples[sample])
        reader = hw.read(directory.path)

        found = [[(t.order, t.key, t.member) for t in group] for group in reader.groups()]
        assert found == [
            [(one.id, "a", 0), (one.id, "a", 1)],
            [(three.id, "c", 0), (three.id, "c", 1)],
        ]
        await shop.close(two, two.samples[0])  # it is there at once
        assert [group[0].key for group in reader.groups()] == ["a", "b", "c"]
        assert len(reader) == 6


async def test_a_result_has_what_became_of_each_rollout(tmp_path: Path) -> None:
    directory = new_run(tmp_path / "run")
    child = ChildAttempt(name="judge", exchanges=1)
    async with Ledger(directory) as ledger:
        shop = Shop(ledger, directory)
        order = await shop.order("k", 2)
        await shop.close(order, order.samples[0], group_scored=True)
        await shop.close(order, order.samples[1], "gemini", children=(child,), group_scored=True)
        mixed = await shop.order("m", 2)
        await shop.close(mixed, mixed.samples[0], group_scored=True)
        await shop.close(mixed, mixed.samples[1])

    with LedgerReader(directory) as reader:
        apart = build_result(reader, mixed, TrajectoryForm.NONE)
        made = build_result(reader, order, TrajectoryForm.NODES)
        alone = read_rollout(reader, order.instance, order.samples[1], 1, TrajectoryForm.NODES)
        bare = read_rollout(reader, order.instance, order.samples[1], 1, TrajectoryForm.NONE)

    assert (made.key, made.order, made.together, made.new) == ("k", order.id, True, True)
    assert apart.together is False
    assert [(r.instance, r.member, r.outcome, r.reward) for r in made.rollouts] == [
        ("k", member, "passed", 0.5) for member in (0, 1)
    ]
    assert made.rollouts[1] == alone
    assert (alone.answer, alone.exchanges, alone.children, alone.usage.input_tokens) == (
        {"n": 1},
        2,
        (child,),
        10,
    )
    assert [node.role for node in alone.trajectory or ()] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (bare.trajectory, bare.reference) == (None, None)
    for encode, decode in ((msgspec.json.encode, msgspec.json.decode), (msgspec.msgpack.encode, unpacked)):
        assert decode(encode(made), type=OrderResult) == made


def unpacked(content: bytes, type: Any) -> Any:
    return msgspec.msgpack.decode(content, type=type)


async def test_a_trajectory_too_large_for_a_result_is_given_by_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = new_run(tmp_path / "run")
    async with Ledger(directory) as ledger:
        shop = Shop(ledger, directory)
        order = await shop.order("k", 3)
        for sample in order.samples:
            await shop.close(order, sample)
    with LedgerReader(directory) as reader:
        size = order_results._read_with_verdict(
            reader, (order.instance, 0, 0), TrajectoryForm.NODES, 1 << 20
        )[2]
        monkeypatch.setattr(order_results, "LARGEST_RESULT", 2 * size)
        whole_, second, third = build_result(reader, order, TrajectoryForm.NODES).rollouts
        asked = read_rollout(reader, order.instance, 0, 0, TrajectoryForm.REFERENCE)

    assert len(whole_.trajectory or ()) == len(second.trajectory or ()) == 5
    assert third.trajectory is None
    assert third.reference is not None and asked.reference is not None
    found = hw.read(third.reference.directory).attempt(third.reference.attempt)
    assert (found.sample, [node.id for node in found.nodes()]) == (2, [0, 1, 2, 3, 4])
    assert asked.reference.attempt == whole_.attempt


async def test_a_rollout_whose_conversation_is_not_kept_has_its_reward(tmp_path: Path) -> None:
    directory = new_run(tmp_path / "run")
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("x")])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
        verdict = failed(attempt, ledger.token, FailureOrigin.LIMIT, "timeout")
        await ledger.settle(msgspec.structs.replace(verdict, exchanges=2))
        await ledger.close_sample(
            Outcome(
                instance=row, sample=0, attempt=attempt, kind="failed", score=0.0, where=FailureOrigin.LIMIT
            )
        )
    with closing(sqlite3.connect(directory.database)) as connection, connection:
        connection.execute("INSERT INTO dropped VALUES (1, 0, 'none', 1)")

    with LedgerReader(directory) as reader:
        made = read_rollout(reader, row, 0, 0, TrajectoryForm.NODES)

    assert (made.outcome, made.reward, made.trajectory, made.reference) == ("failed", 0.0, None, None)
    assert made.failure is not None and made.failure.kind == "timeout"


# What it costs.


async def test_reading_two_thousand_trajectories_is_flat(tmp_path: Path) -> None:
    directory = await many(tmp_path / "run", 2000)
    reader = hw.read(directory.path)
    marks = []

    tracemalloc.start()
    for place, trajectory in enumerate(reader):
        if place % 25 == 0:
            assert sum(1 for _ in trajectory.nodes()) == 41
        if place in (500, 1999):
            marks.append(tracemalloc.get_traced_memory())
    tracemalloc.stop()

    assert len(reader) == 2000
    (early, _), (late, peak) = marks
    assert late - early < 100_000
    assert peak < 2_000_000


async def many(path: Path, count: int) -> RunDirectory:
    """A run of as many samples, each with the same twenty turns of 2 KB."""
    directory = new_run(path)
    async with Ledger(directory) as ledger:
        [row] = await ledger.plan([planned("x")])
        attempt = await ledger.next_attempt()
        await ledger.begin_attempt(Attempt(id=attempt, instance=row, sample=0, number=1))
        texts = [f"{number} {'x' * 2000}" for number in range(41)]
        recording = Recording(directory, attempt)
        for turn in range(20):
            recording.add(chat(*texts[: 2 * turn + 1]), says(texts[2 * turn + 1]))
        recording.add(chat(*texts), None, error="gone", status=499)
        recording.log.close()
        await ledger.settle(passed(attempt, ledger.token, 21))
        await ledger.close_sample(Outcome(instance=row, sample=0, attempt=1, kind="passed", score=1.0))
    with closing(sqlite3.connect(directory.database)) as connection, connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(attempt)")]
        own = {"id": "n.id", "sample": "n.id - 1"}
        values = ", ".join(own.get(column, f"a.{column}") for column in columns)
        numbers = f"WITH RECURSIVE n (id) AS (SELECT 2 UNION ALL SELECT id + 1 FROM n WHERE id < {count})"
        connection.execute(f"INSERT INTO attempt {numbers} SELECT {values} FROM n, attempt a WHERE a.id = 1")
        connection.execute(
            "INSERT INTO outcome SELECT instance, id - 1, id, kind, score, place, settled"
            " FROM attempt WHERE id > 1"
        )
    for attempt in range(2, count + 1):
        path = segment_path(directory, attempt)
        path.parent.mkdir(exist_ok=True)
        os.link(segment_path(directory, 1), path)
    return directory


def test_twenty_four_turns_with_images_take_their_unique_bytes_on_disk(tmp_path: Path) -> None:
    pictures = [random.Random(turn).randbytes(150_000) for turn in range(24)]
    sent = 0

    async def look(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        messages: list[dict[str, Any]] = []
        for picture in pictures:
            url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
            part = {"type": "image_url", "image_url": {"url": url}}
            messages.append({"role": "user", "content": [part]})
            messages.append({"role": "assistant", "content": await whole(model, messages)})
        return "seen"

    def count(request: dict[str, Any]) -> str:
        nonlocal sent
        sent += sum(200_000 for message in request["messages"] if message["role"] == "user")
        return "I see"

    suite = hw.Suite(name="looking", instances=lambda: [hw.Instance(id="x")], grade=lambda *_: True)
    hw.run(suite, look, out=tmp_path / "run", policy=count, workers=0)

    taken = sum(measure_tree(tmp_path / "run" / name) for name in ("exchanges", "blobs"))
    unique = sum(map(len, pictures))
    assert sent == 300 * 200_000
    assert taken < 1.15 * unique  # whole blocks and folders
    [trajectory] = hw.read(tmp_path / "run")
    seen = [trajectory.blob(n.message["content"][0]["image_url"]["url"]) for n in users(trajectory)]
    assert seen == pictures


def users(trajectory: hw.Trajectory) -> Iterator[Any]:
    return (node for node in trajectory.nodes() if node.role == "user")


def test_the_page_about_reading_does_what_it_says(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "reading.md").read_text(), re.DOTALL)
    printed = []
    for block in blocks:
        with redirect_stdout(io.StringIO()) as out:
            exec(compile(block, "docs/reading.md", "exec"), {})
        printed.append(out.getvalue().splitlines())

    messages, nodes, tokens = printed
    assert messages[:2] == ["good 0 1.0 0", "  user go"]
    assert nodes[:3] == ["1 messages -> stop ", "3 messages -> stop ", "5 messages -> stop "]
    assert tokens[0] == "None 24 6 first 0.0"
