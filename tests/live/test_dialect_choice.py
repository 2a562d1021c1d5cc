"""A server without the agent's dialect gets translated calls; a server with it gets them unchanged."""

import asyncio
import json

import pytest
from tests.dialect_requests import message_of, send, speak, text_of
from tests.gateway_harness import MODEL, scene
from tests.in_process_run import QUICK

import holdwater as hw
from holdwater.core.summary import TRANSLATED
from holdwater.gateway.upstreams.http_endpoint import ProviderAddress
from holdwater.ledger.reader import LedgerReader
from holdwater.testing.scripted_model import ScriptedReply, serve_raw, serve_script

WAYS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
AGENTS = pytest.mark.parametrize("agent", ["chat", "responses", "messages", "gemini"])
TARGETS = pytest.mark.parametrize("target", ["chat", "messages"])
KEYS = {"chat": "messages", "responses": "input", "messages": "messages", "gemini": "contents"}


class ModelServer:
    """Keeps what it was asked; answers as `reply` says."""

    def __init__(self, reply=None):
        self.requests = []  # bound: the calls of a test
        self.reply = reply or ScriptedReply(text="fine")

    def __call__(self, request):
        self.requests.append(request)
        return self.reply


async def ask(s, agent, *texts, stream=False):
    async with send(s, speak(agent, *(texts or ("hi",)), stream=stream)) as response:
        return response.status, await response.text()


@AGENTS
@TARGETS
@WAYS
async def test_a_dialect_that_the_server_lacks_is_translated(agent, target, stream):
    server, notes = ModelServer(), []
    async with serve_script(server, dialects=[target]) as url, scene(url, server="auto", notes=notes) as s:
        for _ in range(2):
            status, _ = await ask(s, agent, stream=stream)
            assert (status, text_of(agent, s.log.reply)) == (200, "fine")
        assert [(e.dialect, e.status, e.error) for e in s.log.exchanges] == [(agent, 200, "")] * 2
        assert len(server.requests) == 2  # the refused request is no call of the model
        assert s.session.failure is None
    own = agent == target
    assert all((exchange.original is None) == own for exchange in s.log.exchanges)
    assert [note.partition(":")[0] for _, note in notes] == (
        [] if own else [f"calls in `{agent}` go to the server as `{target}`"]
    )
    assert own or "it answered 404 to `" in notes[0][1]


@AGENTS
async def test_a_server_that_has_the_dialect_sees_no_difference(agent):
    seen, notes = [], []

    def answer(headers, body):
        seen.append(body)
        return ScriptedReply(text="fine")

    async with serve_raw(answer) as url, scene(url, server="auto", notes=notes) as s:
        request = speak(agent, "hi")
        async with send(s, request) as response:
            assert response.status == 200
        assert seen == [request.body]
        assert (notes, s.log.last.original) == ([], None)


async def test_calls_at_the_same_time_are_told_once():
    server, notes = ModelServer(), []
    async with serve_script(server, dialects=["chat"]) as url, scene(url, server="auto", notes=notes) as s:
        answers = await asyncio.gather(*(ask(s, "messages", f"hi {n}") for n in range(8)))
        assert {status for status, _ in answers} == {200}
    assert (len(server.requests), len(notes)) == (8, 1)


async def test_an_unknown_model_is_reported_by_the_first_answer():
    server, notes = ModelServer(ScriptedReply(status=404, text="no model `x`")), []
    async with serve_script(server) as url, scene(url, server="auto", notes=notes) as s:
        status, body = await ask(s, "responses")
        assert (status, message_of(json.loads(body))) == (404, "no model `x`")
        assert [set(KEYS.values()) & request.keys() for request in server.requests] == [
            {"input"},
            {"messages"},
            {"messages"},
        ]
        assert (len(s.log.exchanges), s.log.last.status, s.session.failure.kind) == (1, 404, "model")
        server.reply = ScriptedReply(text="fine")
        assert (await ask(s, "responses", "once more"))[0] == 200
        assert (s.log.last.original, notes) == (None, [])


async def test_other_errors_choose_nothing():
    server, notes = ModelServer(ScriptedReply(status=400, text="no such option")), []
    async with serve_script(server, dialects=["chat"]) as url, scene(url, server="auto", notes=notes) as s:
        status, body = await ask(s, "messages")
        assert (status, message_of(json.loads(body))) == (400, "no such option")
        assert notes == []
        server.reply = ScriptedReply(text="fine")
        assert (await ask(s, "messages"))[0] == 200
        assert len(notes) == 1


async def test_tokens_of_a_translated_dialect_are_estimated():
    async with serve_script(ModelServer(), dialects=["chat"]) as url, scene(url, server="auto") as s:
        await ask(s, "messages")
        request = speak("messages", "hi")._replace(path="/v1/messages/count_tokens")
        async with send(s, request) as response:
            assert (await response.json())["input_tokens"] > 0
        assert len(s.log.exchanges) == 1


async def test_a_request_that_was_not_kept_is_a_failure_that_may_pass():
    async with serve_script(ModelServer(), dialects=["chat"]) as url, scene(url, server="auto") as s:
        s.gateway.relay.retention.bound = 0
        status, _ = await ask(s, "messages")
        assert status == 502
        assert (s.session.failure.kind, s.session.failure.again) == ("dialect", True)


async def test_a_dialect_without_a_url_goes_to_the_one_that_has_one():
    server, notes = ModelServer(), []
    async with serve_script(server) as url:
        known = {"messages": ProviderAddress(url, "k")}
        async with scene(known, server="auto", notes=notes) as s:
            status, _ = await ask(s, "gemini")
            assert (status, text_of("gemini", s.log.reply)) == (200, "fine")
    sentence = "calls in `gemini` go to the server as `messages`: no URL is set for the dialect"
    assert notes == [(TRANSLATED, sentence)]


async def solve(instance, sandbox, model):
    await model.chat([{"role": "user", "content": "work"}])
    return "x"


async def grade(instance, sandbox, answer):
    return answer == "x"


async def test_a_run_says_once_what_it_translates(tmp_path):
    server = ModelServer()
    suite = hw.Suite(name="two", instances=lambda: [hw.Instance(id=n) for n in "ab"], grade=grade)
    async with serve_script(server, dialects=["messages"]) as url:
        options = {**QUICK, "concurrency": 1, "retries": 0}
        summary = await hw.arun(suite, solve, out=tmp_path / "run", model=MODEL, base_url=url, **options)
    why = "it answered 404 to `chat/completions`"
    assert summary.outcomes == {"passed": 2}
    assert summary.events == {"model.translated": 1}
    assert summary.translated == (f"calls in `chat` go to the server as `messages`: {why}",)
    assert len(server.requests) == 2
    with LedgerReader(tmp_path / "run") as reader:
        assert reader.summary().translated == summary.translated
    again = await hw.areplay(tmp_path / "run", out=tmp_path / "again", suite=suite, agent=solve)
    assert (again.outcomes, again.events, again.usage.requests) == ({"passed": 2}, {}, 0)


async def test_several_servers_without_the_dialect_have_not_failed(tmp_path):
    servers = [ModelServer(), ModelServer()]
    suite = hw.Suite(name="four", instances=lambda: [hw.Instance(id=n) for n in "abcd"], grade=grade)
    first, second = (serve_script(server, dialects=["messages"]) for server in servers)
    async with first as one, second as other:
        options = {**QUICK, "concurrency": 1, "retries": 0}
        summary = await hw.arun(
            suite, solve, out=tmp_path / "run", model=MODEL, base_url=[one, other], **options
        )
    assert (summary.outcomes, summary.events) == ({"passed": 4}, {"model.translated": 1})
    assert all(server.requests for server in servers)
