"""`holdwater fork`: recorded turns are repeated at no cost, then the model goes on; drift, texts, limits."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.command_runner import Command
from tests.dialect_requests import DIALECTS, speak, text_of

import holdwater as hw
from holdwater.api.forking import prepare_fork
from holdwater.api.runs import start
from holdwater.core.errors import BadInput
from holdwater.core.exchange import Exchange
from holdwater.ledger.exchanges import read_exchanges
from holdwater.ledger.reader import LedgerReader
from holdwater.testing.scripted_model import ScriptedReply, serve_script

TURNS = 5


class CountingModel:
    """Says another number in each reply, and keeps the requests."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: dict[str, Any]) -> ScriptedReply:
        self.asked.append(request)
        return ScriptedReply(text=f"reply {len(self.asked)}")


@pytest.fixture
def model() -> CountingModel:
    return CountingModel()


@pytest.fixture
async def url(model: CountingModel) -> AsyncIterator[str]:
    async with serve_script(model) as served:
        yield served


class WritingAgent:
    """Writes each reply to a file, and shows the model all files; keeps the state of its sandbox."""

    def __init__(self, turns: int = TURNS, spoil: Callable[[int], str] = lambda turn: "") -> None:
        self.turns = turns
        self.spoil = spoil
        self.states: list[list[str]] = []  # for each attempt, the files after each turn

    async def __call__(self, instance: hw.Instance, sandbox: Any, model: Any) -> str:
        messages: list[dict[str, Any]] = [{"role": "user", "content": instance.instruction}]
        states: list[str] = []
        self.states.append(states)
        for turn in range(self.turns):
            reply = await model.chat(messages, seed=model.seed)
            text = reply["choices"][0]["message"]["content"]
            await sandbox.run(f"echo {shlex.quote(text)} > {turn}.txt; echo {turn} >> all.txt")
            seen = await sandbox.run("for f in $(ls); do echo $f: $(cat $f); done")
            states.append(seen.output)
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": seen.output + self.spoil(turn)})
        return text


def make_suite(names: tuple[str, ...] = ("one", "two"), **options: Any) -> hw.Suite:
    instances = [hw.Instance(id=name, instruction=f"do {name}", **options) for name in names]
    return hw.Suite(name="writing", instances=lambda: iter(instances), grade=grade)


def grade(instance: hw.Instance, sandbox: Any, answer: object) -> bool:
    return "odd" in str(answer)


async def run_origin(
    place: Path, url: str, agent: Any, suite: hw.Suite | None = None, **options: Any
) -> Path:
    out = place / "origin"
    given = {"model": "first", "base_url": url, "workers": 0, "retries": 0, **options}
    await hw.arun(suite or make_suite(), agent, out=out, **given)
    return out


def read_attempts(path: Path) -> list[list[Exchange]]:
    with LedgerReader(path) as reader:
        return [list(read_exchanges(reader.directory, row.attempt)) for row in reader.attempts()]


def read_failure(path: Path) -> Any:
    with LedgerReader(path) as reader:
        [row] = reader.attempts()
    assert row.verdict is not None
    return row.verdict.failure


def head_of(exchange: Exchange) -> dict[str, Any]:
    return msgspec.json.decode(exchange.head) if exchange.head is not None else {}


async def test_a_fork_has_k_equal_exchanges_and_then_new_ones(
    tmp_path: Path, model: CountingModel, url: str
) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(), sampling={"top_p": 0.5})
    before = len(model.asked)

    summary = await hw.afork(
        origin, "two", 3, out=tmp_path / "fork", suite=make_suite(), agent=WritingAgent(),
        model="second", sampling={"temperature": 0.25}, samples=2,
    )  # fmt: skip

    assert len(model.asked) - before == 2 * (TURNS - 3)
    assert summary.usage.requests == 4 and summary.saved.requests == 6
    recorded = read_attempts(origin)[1]
    for branch in read_attempts(tmp_path / "fork"):
        assert len(branch) == TURNS
        for then, now in zip(recorded[:3], branch[:3], strict=True):
            assert (now.identity, now.append, now.head, now.reply) == (
                then.identity, then.append, then.head, then.reply,
            )  # fmt: skip
        assert recorded[3].append == branch[3].append and recorded[3].reply != branch[3].reply
        assert [e.saved.requests for e in branch] == [1, 1, 1, 0, 0]
    live = [request for request in model.asked[before:] if len(request["messages"]) == 7]
    assert {request["model"] for request in live} == {"second"}
    assert {(request["temperature"], request["top_p"]) for request in live} == {(0.25, 0.5)}
    assert len({request["seed"] for request in (*live, model.asked[0])}) == 3  # branches differ
    assert hw.audit(tmp_path / "fork").ok


async def test_the_sandbox_of_a_fork_is_as_it_was(tmp_path: Path, url: str) -> None:
    first, again = WritingAgent(), WritingAgent()
    origin = await run_origin(tmp_path, url, first, make_suite(("one",)))

    await hw.afork(origin, "one", 3, out=tmp_path / "fork", suite=make_suite(), agent=again)

    assert again.states[0][:3] == first.states[0][:3] and "2.txt: reply 3" in again.states[0][2]
    assert again.states[0][3] != first.states[0][3]


async def test_a_fork_names_its_origin(tmp_path: Path, url: str) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent())

    summary = await hw.afork(
        origin, "two", 2, out=tmp_path / "fork", suite=make_suite(), agent=WritingAgent()
    )

    with LedgerReader(origin) as reader:
        run = reader.config.id
    config = json.loads((tmp_path / "fork/run.json").read_text())
    named = {"run": run, "instance": "two", "sample": 0, "number": 1, "attempt": 2, "turn": 2}
    assert config["fork"].items() >= named.items()
    assert summary.fork is not None and summary.fork.turn == 2
    shown = Command(tmp_path / "commands", "show", str(tmp_path / "fork"), "two")
    assert shown.wait() == 0
    assert f"attempt 1 of `two` in run `{run}`, after turn 2" in " ".join(shown.stdout.split())


async def test_a_fork_of_a_fork_repeats_both_parts(tmp_path: Path, model: CountingModel, url: str) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(), make_suite(("one",)))
    options: Any = {"suite": make_suite(), "agent": WritingAgent()}
    await hw.afork(origin, "one", 2, out=tmp_path / "a", model="second", **options)
    before = len(model.asked)

    summary = await hw.afork(tmp_path / "a", "one", 4, out=tmp_path / "b", model="third", **options)

    assert len(model.asked) - before == 1 and summary.saved.requests == 4
    [middle], [last] = read_attempts(tmp_path / "a"), read_attempts(tmp_path / "b")
    assert [e.identity for e in last[:4]] == [e.identity for e in middle[:4]]


async def talk(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    """Speak the dialect of the instance over HTTP, streamed or whole."""
    said = [instance.instruction]
    dialect, stream = instance.data["dialect"], instance.data["stream"]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.key}"}) as http:
        for _ in range(3):
            request = speak(dialect, *said, stream=stream)
            address = model.url.removesuffix("/v1") + request.path
            async with http.post(address, data=request.body, headers=request.headers) as response:
                body = await response.read()
                assert response.status == 200, body
            said.append(read_text(dialect, body, stream))
            said.append("go on")
    return " / ".join(said)


def read_text(dialect: str, body: bytes, stream: bool) -> str:
    if not stream:
        return text_of(dialect, json.loads(body))
    from holdwater.dialect import DIALECTS as TABLE
    from holdwater.dialect.interface import AdaptedRequest, RequestTarget

    events = TABLE[dialect].stream(AdaptedRequest(RequestTarget("x"), {}))
    assert b"".join(events.events(body))
    return text_of(dialect, json.loads(events.reply()))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_reply_is_replaced_or_continued_in_each_dialect(
    tmp_path: Path, model: CountingModel, url: str, dialect: str
) -> None:
    """Given a client that streams and one that does not."""
    instances = [
        hw.Instance(id=name, instruction="go", data={"dialect": dialect, "stream": name == "streamed"})
        for name in ("whole", "streamed")
    ]
    suite = hw.Suite(name="talking", instances=lambda: iter(instances), grade=grade)
    origin = await run_origin(tmp_path, url, talk, suite, concurrency=1)

    for name, option in (("streamed", {"say": "an odd idea"}), ("whole", {"then_say": "at odds"})):
        summary = await hw.afork(origin, name, 2, out=tmp_path / name, suite=suite, agent=talk, **option)
        assert summary.outcomes == {"passed": 1}, read_failure(tmp_path / name)

    assert len(model.asked) == 2 * 3 + 1 + 1
    replaced, continued = (json.dumps(request) for request in model.asked[6:])
    assert "an odd idea" in replaced and "reply 4" in replaced and "reply 5" not in replaced
    assert "reply 2" in continued and "at odds" in continued


async def test_a_drift_stops_the_attempt_and_is_no_zero(
    tmp_path: Path, model: CountingModel, url: str
) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(), make_suite(("one",)))
    spoiled = WritingAgent(spoil=lambda turn: "at noon" if turn == 1 else "")
    before = len(model.asked)

    summary = await hw.afork(origin, "one", 4, out=tmp_path / "fork", suite=make_suite(), agent=spoiled)

    assert len(model.asked) == before and summary.usage.requests == 0
    assert summary.outcomes == {"model": 1} and summary.score is None and summary.exit_status == 1
    failure = read_failure(tmp_path / "fork")
    assert failure.kind == "drift" and not failure.again and "--drift" in failure.hint
    assert failure.message.startswith("the fork drifts at turn 3, before turn 4 is repeated: request 3 at")
    assert "message 5 `content`" in failure.message and "now `at noon`" in failure.message


async def test_a_drift_that_is_allowed_goes_on(tmp_path: Path, model: CountingModel, url: str) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(), make_suite(("one",)))
    spoiled = WritingAgent(spoil=lambda turn: "at noon" if turn == 1 else "")
    before = len(model.asked)

    summary = await hw.afork(
        origin, "one", 4, out=tmp_path / "fork", suite=make_suite(), agent=spoiled, drift=True
    )

    assert len(model.asked) - before == 1 and summary.outcomes == {"failed": 1}
    assert summary.events["replay.drifted"] == 1


async def test_an_agent_that_ends_too_early_is_no_zero(tmp_path: Path, url: str) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(), make_suite(("one",)))

    summary = await hw.afork(
        origin, "one", 4, out=tmp_path / "fork", suite=make_suite(), agent=WritingAgent(turns=2)
    )

    assert summary.outcomes == {"model": 1}
    assert read_failure(tmp_path / "fork").message == "the agent ended before turn 4: it made 2 of 4 calls"


async def test_limits_count_live_calls_alone(tmp_path: Path, model: CountingModel, url: str) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(), make_suite(("one",)))

    enough = await hw.afork(
        origin, "one", 3, out=tmp_path / "a", suite=make_suite(), agent=WritingAgent(), max_requests=2
    )
    short = await hw.afork(
        origin, "one", 3, out=tmp_path / "b", suite=make_suite(), agent=WritingAgent(), max_requests=1
    )

    assert (enough.usage.requests, enough.outcomes) == (2, {"failed": 1})
    assert read_failure(tmp_path / "a") is None
    assert short.usage.requests == 1 and read_failure(tmp_path / "b").kind == "requests"


async def test_calls_beside_the_main_thread_are_repeated_too(
    tmp_path: Path, model: CountingModel, url: str
) -> None:
    """Side calls up to the turn come from the record; a later one is made anew."""

    async def act(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "start"}]
        for turn in range(3):
            reply = await model.chat(messages)
            await model.chat([{"role": "user", "content": f"a title for turn {turn}"}])
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
        return "done"

    origin = await run_origin(tmp_path, url, act, make_suite(("one",)))
    before = len(model.asked)

    await hw.afork(origin, "one", 3, out=tmp_path / "fork", suite=make_suite(), agent=act)

    [branch] = read_attempts(tmp_path / "fork")
    assert [e.saved.requests for e in branch] == [1, 1, 1, 0, 0, 0]
    assert len(model.asked) - before == 3
    with pytest.raises(BadInput, match="turn 2 is not on the main thread, but on side thread 1"):
        hw.fork(origin, "one", 2, suite=make_suite(), agent=act)


async def count_and_talk(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    """Count the tokens of each request first, as some clients do."""
    said = ["start"]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.key}"}) as http:
        for _ in range(3):
            request = speak("messages", *said)
            address = model.url.removesuffix("/v1") + "/v1/messages"
            for path in (f"{address}/count_tokens", address):
                async with http.post(path, data=request.body, headers=request.headers) as response:
                    body = await response.read()
                    assert response.status == 200, body
            said += [text_of("messages", json.loads(body)), "go on"]
    return "odd"


async def test_estimated_token_counts_are_no_drift(tmp_path: Path) -> None:
    asked: list[Any] = []

    def policy(request: dict[str, Any]) -> str:
        asked.append(request)
        return f"reply {len(asked)}"

    suite = make_suite(("one",))
    await hw.arun(suite, count_and_talk, out=tmp_path / "origin", policy=policy, workers=0)

    summary = await hw.afork(
        tmp_path / "origin", "one", 2, out=tmp_path / "fork", suite=suite, agent=count_and_talk, policy=policy
    )

    assert summary.outcomes == {"passed": 1}, read_failure(tmp_path / "fork")
    assert len(asked) == 4


async def test_calls_of_a_child_are_repeated_too(tmp_path: Path, model: CountingModel, url: str) -> None:
    async def child(instance: hw.Instance, sandbox: Any, model: Any) -> str:
        reply = await model.chat([{"role": "user", "content": instance.instruction}], seed=model.seed)
        return str(reply["choices"][0]["message"]["content"])

    async def parent(instance: hw.Instance, sandbox: Any, model: Any, attempt: Any) -> str:
        messages = [{"role": "user", "content": "start"}]
        for turn in range(3):
            reply = await model.chat(messages)
            helped = await attempt.spawn(child, instruction=f"help with {turn}", name=f"helper-{turn}")
            messages += [reply["choices"][0]["message"], {"role": "user", "content": str(helped.answer)}]
        return "odd"

    suite = make_suite(("one",))
    origin = await run_origin(tmp_path, url, parent, suite)
    before = len(model.asked)

    summary = await hw.afork(origin, "one", 3, out=tmp_path / "fork", suite=suite, agent=parent)

    assert summary.outcomes == {"passed": 1}, read_failure(tmp_path / "fork")
    [branch] = read_attempts(tmp_path / "fork")
    assert [e.saved.requests for e in branch] == [1, 1, 1, 0, 0, 0]
    assert len(model.asked) - before == 3


async def test_a_record_that_has_vanished_is_no_zero(tmp_path: Path, url: str) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(), make_suite(("one",)))
    options: Any = {"suite": make_suite(("one",)), "agent": WritingAgent()}
    setup = prepare_fork(origin, "one", 2, tmp_path / "fork", options)
    shutil.rmtree(origin / "exchanges")

    summary = await start(setup)

    assert summary.outcomes == {"model": 1} and summary.usage.requests == 0
    assert read_failure(tmp_path / "fork").kind == "unrecorded"


@pytest.mark.parametrize(
    ("turn", "options", "message"),
    [
        (9, {}, "the attempt has no turn 9"),
        (-1, {}, "`--turn` must be at least 0: -1"),
        (0, {"say": "x"}, "turn 0 has no reply"),
        (1, {"say": "x", "then_say": "y"}, "exclude each other"),
        (1, {"attempt": 7}, "no attempt 7 at sample 0"),
        (1, {"only": ["x"]}, "unknown option: `only`"),
    ],
)
async def test_a_place_that_does_not_exist_is_refused(
    tmp_path: Path, url: str, turn: int, options: Any, message: str
) -> None:
    origin = await run_origin(tmp_path, url, WritingAgent(turns=1), make_suite(("one",)))

    with pytest.raises(BadInput, match=message):
        await hw.afork(
            origin, "one", turn, out=tmp_path / "fork", suite=make_suite(), agent=WritingAgent(), **options
        )
    assert not (tmp_path / "fork").exists()


COMMAND_AGENT = """
import json, os, pathlib, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": "begin"}]
for turn in range(4):
    messages.append(ask(messages))
    pathlib.Path(f"{turn}.txt").write_text(messages[-1]["content"])
    files = sorted(path.read_text() for path in pathlib.Path(".").glob("*.txt"))
    messages.append({"role": "user", "content": " ".join(files)})
"""


async def test_a_command_agent_is_forked_from_the_command_line(
    tmp_path: Path, model: CountingModel, url: str
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "one", "instruction": "go", "grade": "grep -q 7 3.txt"}\n')
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/agent.py").write_text(COMMAND_AGENT)
    agent = f"command:{sys.executable} /opt/agent/agent.py"
    origin = await hw.arun(
        str(tmp_path / "tasks.jsonl"), agent, out=tmp_path / "origin", model="m", base_url=url, workers=1,
        mount=[f"{tmp_path}/tools:/opt/agent", f"{sys.prefix}:{sys.prefix}"],
    )  # fmt: skip
    assert origin.outcomes == {"failed": 1} and len(model.asked) == 4
    out = tmp_path / "fork"

    words = ("fork", str(tmp_path / "origin"), "one", "--turn", "2", "--samples", "2", "--out", str(out))
    command = Command(tmp_path / "commands", *words, "--json")
    status = await wait_for(command)

    assert status == 0, command
    assert command.document()["saved"]["requests"] == 4 and len(model.asked) == 8
    assert command.document()["fork"]["turn"] == 2
    assert hw.audit(out).ok
    rows = io.BytesIO()
    hw.export(out, rows, what="outcomes")
    assert len(rows.getvalue().splitlines()) == 2


async def wait_for(command: Command) -> int:
    return await asyncio.to_thread(command.wait)


def say_bad_once(request: dict[str, Any]) -> ScriptedReply:
    """The model `first` spoils the third turn; any other model says nothing bad."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    return ScriptedReply(text="bad" if request["model"] == "first" and turn == 2 else "good")


async def grade_files(instance: hw.Instance, sandbox: Any, answer: object) -> bool:
    return bool((await sandbox.run("! grep -q bad *.txt")).ok)


class PlantedRun:
    """A failed attempt of seven turns that was lost in its third, and a count of what the model was asked."""

    def __init__(self) -> None:
        self.asked = 0
        instance = hw.Instance(id="one", instruction="do one")
        self.suite = hw.Suite(name="planted", instances=lambda: iter([instance]), grade=grade_files)

    def reply(self, request: dict[str, Any]) -> ScriptedReply:
        self.asked += 1
        return say_bad_once(request)


async def test_a_search_finds_the_planted_turn(tmp_path: Path) -> None:
    planted = PlantedRun()
    async with serve_script(planted.reply) as url:
        agent = WritingAgent(turns=7)
        origin = await run_origin(tmp_path, url, agent, planted.suite)
        options: Any = {"suite": planted.suite, "agent": agent, "samples": 2}
        before = planted.asked

        found = await hw.abisect(origin, "one", out=tmp_path / "search", model="second", **options)

        assert (found.result, found.turn, found.lost) == ("lost", 2, 3), found.statement
        assert [(probe.turn, probe.passed) for probe in found.probes] == [
            (0, 2), (1, 2), (2, 2), (3, 0), (7, 0),
        ]  # fmt: skip
        live = sum(2 * (7 - probe.turn) for probe in found.probes)
        assert planted.asked - before == live == found.usage.requests
        assert found.most.usage.requests >= live and found.most.probes >= len(found.probes)

        # The forks are the state of the search: it goes on where it was, and pays for what is missing.
        shutil.rmtree(tmp_path / "search/turn-3")
        again = await hw.abisect(origin, "one", out=tmp_path / "search", model="second", **options)
        assert again.statement == found.statement and planted.asked - before == live + 2 * 4
        with pytest.raises(BadInput, match="the forks of another search"):
            await hw.abisect(origin, "one", out=tmp_path / "search", model="third", **options)


async def test_a_search_says_when_no_turn_lost_the_attempt(tmp_path: Path) -> None:
    planted = PlantedRun()
    async with serve_script(planted.reply) as url:
        agent = WritingAgent(turns=3)
        origin = await run_origin(tmp_path, url, agent, planted.suite)
        options: Any = {"suite": planted.suite, "agent": agent, "samples": 2}

        never_won = await hw.abisect(origin, "one", out=tmp_path / "a", **options)
        passing = await hw.afork(origin, "one", 1, out=tmp_path / "b", model="second", **options)
        never_lost = await hw.abisect(tmp_path / "b", "one", out=tmp_path / "c", **options)

    assert passing.outcomes == {"passed": 2}
    assert never_won.statement == "0 of 2 branches pass even from the start: no turn lost the attempt"
    assert (never_won.result, never_won.turn) == ("never-won", None)
    assert never_lost.statement == "2 of 2 branches pass even from the last turn, 3"
    assert len(never_lost.probes) == 1 and never_lost.usage.requests == 0


async def test_compare_and_show_draw_the_branches_as_a_tree(tmp_path: Path) -> None:
    planted = PlantedRun()
    async with serve_script(planted.reply) as url:
        agent = WritingAgent(turns=4)
        origin = await run_origin(tmp_path, url, agent, planted.suite)
        options: Any = {"suite": planted.suite, "agent": agent}
        await hw.afork(origin, "one", 1, out=tmp_path / "a", model="second", samples=2, **options)
        await hw.afork(origin, "one", 3, out=tmp_path / "b", model="second", **options)

    report = hw.compare(origin, tmp_path / "a", tmp_path / "b")

    [tree] = report.branches
    assert (tree.passed, tree.scored, tree.branches) == (2, 3, 3)
    assert (tree.root.first, tree.root.last, tree.root.ends) == (1, 2, ())
    lost, won = tree.root.ways
    assert (lost.first, lost.last, lost.passed, lost.scored) == (3, 4, 0, 1)
    assert [(end.recorded, end.kind) for end in lost.ends] == [(True, "failed"), (False, "failed")]
    assert (won.passed, won.scored, [end.sample for end in won.ends]) == (2, 2, [0, 1])
    shown = Command(tmp_path / "commands", "show", str(tmp_path / "a"))
    assert await wait_for(shown) == 0
    assert "one: 2 of 2 branches pass, 95 % interval" in shown.stdout and "turns 3 to 4" in shown.stdout
    shown = Command(tmp_path / "commands", "show", str(tmp_path / "a"), "--json")
    assert await wait_for(shown) == 0 and shown.document()["branches"]["passed"] == 2
