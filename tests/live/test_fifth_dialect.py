"""A dialect is one module and one line in the table: a fifth one works wherever the four do."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.held_call_harness import worker
from tests.letters_dialect import LettersDialect

import holdwater as hw
from holdwater import dialect
from holdwater.agent.command import _model_variables
from holdwater.cli import main
from holdwater.client.policy import CallHistory
from holdwater.core.serving_protocol import Called
from holdwater.ledger.exchanges import read_exchanges
from holdwater.ledger.reader import LedgerReader
from holdwater.run.setup.config import read_environment
from holdwater.testing.scripted_model import ScriptedReply, serve_script

SOURCE = Path(hw.__file__).parent
ROOM = SOURCE / "dialect"
# Other meanings of the same words, and the scripted model, whose replies are independent of `dialect/`.
OTHER_TABLES = {"testing/reply_formats.py", "export/openhands_events.py"}


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dialect.DIALECTS, "letters", LettersDialect())


def write(*bodies: str, stream: bool = False) -> dict[str, Any]:
    """A request after an exchange of letters, the first from the reader."""
    hands = ("reader", "writer")
    letters = [{"from": hands[n % 2], "body": body} for n, body in enumerate(bodies)]
    return {"model": "m", "brief": "Be kind.", "letters": letters, "stream": stream}


async def post(url: str, key: str, request: dict[str, Any]) -> str:
    headers = {"x-letters-key": key, "letters-stamp": "1"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{url.removesuffix('/v1')}/v1/letters/answer", json=request) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
        return text


def read_stream(text: str) -> str:
    reader = LettersDialect().stream(dialect.CHAT.adapt_request({}, None, None))  # type: ignore[arg-type]
    assert list(reader.events(text.encode())) and reader.done
    return str(json.loads(reader.reply())["letter"]["body"])


async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> list[str]:
    """Write twice: one answer comes whole, the other as a stream."""
    first = json.loads(await post(model.url, model.key, write("hello")))["letter"]["body"]
    second = read_stream(await post(model.url, model.key, write("hello", first, "more", stream=True)))
    return [first, second]


def answer(request: dict[str, Any]) -> ScriptedReply:
    return ScriptedReply(text=f"Dear reader,\n{len(request['letters'])} letters")


ANSWERS = ["Dear reader,\n1 letters", "Dear reader,\n3 letters"]
SUITE = hw.Suite(
    name="letters",
    instances=lambda: [hw.Instance(id="one")],
    grade=lambda instance, sandbox, answers: answers == ANSWERS,
)


async def test_a_fifth_dialect_is_called_recorded_read_and_replayed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"

    async with serve_script(answer) as url:
        summary = await hw.arun(SUITE, solve, out=run, model="m", base_url=url, workers=0, retries=0)
    again = await hw.areplay(run, out=tmp_path / "again", suite=SUITE, agent=solve)

    assert summary.outcomes == {"passed": 1} and summary.usage.requests == 2
    assert again.outcomes == {"passed": 1} and again.usage.requests == 0 and again.saved.requests == 2
    assert again.events == {}
    with LedgerReader(run) as reader:
        exchanges = list(read_exchanges(reader.directory, 1))
    assert [(e.dialect, e.streamed, e.parent) for e in exchanges] == [
        ("letters", False, None),
        ("letters", True, 1),
    ]
    assert all(e.usage.input_tokens and e.usage.output_tokens for e in exchanges)
    turns = list(hw.transcript(run, "one"))
    assert [turn.reply.text for turn in turns if turn.reply] == ANSWERS
    assert [[m.role for m in turn.new] for turn in turns] == [["system", "user"], ["user"]]
    [trajectory] = hw.read(run)
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [node.role for node in trajectory.nodes()] == roles
    assert [m["role"] for m in trajectory.messages()] == roles
    capfd.readouterr()
    assert main(["transcript", str(run), "one", "--turn", "2", "--raw"]) == 0
    raw = json.loads(capfd.readouterr().out)
    assert len(raw["request"]["letters"]) == 3 and raw["reply"]["letter"]["body"] == ANSWERS[1]
    assert hw.audit(run).ok


async def test_a_function_answers_calls_of_a_fifth_dialect(tmp_path: Path) -> None:
    requests: list[Any] = []

    def policy(request: dict[str, Any]) -> str:
        requests.append(request)
        return ANSWERS[len(requests) - 1]

    summary = await hw.arun(SUITE, solve, out=tmp_path / "run", policy=policy, workers=0, retries=0)

    assert summary.outcomes == {"passed": 1}
    assert [m["role"] for m in requests[1]["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trainer_answers_a_held_call_of_a_fifth_dialect(tmp_path: Path, stream: bool) -> None:
    async with worker(tmp_path) as held, held.session(7) as session:
        call = asyncio.ensure_future(post(held.gateway.url, session.key, write("hello", stream=stream)))
        await held.until(lambda heard: heard)
        content = await held.asked(7, 1)
        event = Called(
            member=0,
            call="1",
            dialect=content.dialect,
            append=tuple(message.decode() for message in content.append),
            head=content.head.decode() if content.head else None,
            streamed=content.streamed,
        )
        asked = CallHistory("order").rebuild_call(event)
        held.answer(7, 1, text=f"to {asked.chat['messages'][-1]['content']}")
        text = await call

    assert asked.request["letters"] == write("hello")["letters"]
    assert (read_stream(text) if stream else json.loads(text)["letter"]["body"]) == "to hello"
    assert [(e.dialect, e.streamed) for e in held.exchanges(7)] == [("letters", stream)]


async def test_the_gateway_refuses_in_a_fifth_dialect(tmp_path: Path) -> None:
    async with worker(tmp_path) as held:
        url = held.gateway.url.removesuffix("/v1") + "/v1/letters/answer"
        async with aiohttp.ClientSession() as http, http.post(url, json=write("hello")) as response:
            refused = json.loads(await response.text())

    assert response.status == 401 and "no attempt" in refused["returned"]["reason"]


def test_keys_and_urls_of_a_fifth_dialect_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LETTERS_KEY", "sk-letters")
    environment = read_environment()

    assert environment.providers["LETTERS_URL"].url == "https://letters.example"
    assert "LETTERS_KEY" not in environment.inherited
    assert _model_variables("http://gateway/v1", "k")["LETTERS_URL"] == "http://gateway"


def test_no_other_room_has_a_table_of_dialects() -> None:
    """A comparison with the name of a dialect, or names in a dict, a set or a list, are a table."""
    names = {"chat", "responses", "messages", "gemini", "completions", "embeddings"}
    tables = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.is_relative_to(ROOM) or path.relative_to(SOURCE).as_posix() in OTHER_TABLES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            parts: list[ast.expr | None] = []
            if isinstance(node, ast.Compare):
                parts = [node.left, *node.comparators]
            elif isinstance(node, ast.Dict):
                parts = list(node.keys)
            elif isinstance(node, ast.Set | ast.List | ast.Tuple):
                parts = list(node.elts)
            found = {part.value for part in parts if isinstance(part, ast.Constant)} & names
            if found & {"responses", "gemini"} or len(found) > 1:
                tables.append(f"{path.relative_to(SOURCE)}:{node.lineno}")

    assert tables == []
