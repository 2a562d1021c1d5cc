"""A model behind each session of its own, and a run's model that changes under sessions that go on."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest
from tests.gateway_harness import Log
from tests.held_call_harness import HELD, Trainer, worker

from holdwater.core.config import ServingConfig
from holdwater.core.errors import BadInput, ModelFailed
from holdwater.core.records import ModelUsage
from holdwater.core.serving_protocol import ModelChoice, ModelSource, SteerRequest
from holdwater.gateway.in_process_calls import ChatClient
from holdwater.gateway.upstreams.endpoints import MOST_IDLE
from holdwater.rollout.models import load_policy
from holdwater.rollout.worker_protocol import AttemptProgress, OrderTerms, SteerWorker
from holdwater.testing.scripted_model import ScriptedReply, serve_raw


class Server:
    """A model's server that says its name, and keeps what it was asked."""

    def __init__(self, name, version=None):
        self.name, self.keys, self.requests = name, [], []
        self._headers = {} if version is None else {"X-Policy-Version": version}
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()

    async def __call__(self, headers, body):
        self.keys.append(headers.get("Authorization", "").removeprefix("Bearer "))
        self.requests.append(msgspec.json.decode(body))
        self.asked.set()
        await self.gate.wait()
        return ScriptedReply(text=self.name, headers=self._headers)


def model_of(w, session):
    return ChatClient(w.gateway.ask, w.gateway.url, w.gateway.url, session.key, "asked")


async def said(w, session, *texts):
    reply = await model_of(w, session).chat([{"role": "user", "content": text} for text in texts or ("x",)])
    return reply["choices"][0]["message"]["content"]


async def test_each_session_has_its_own(tmp_path):
    run, one, two = Server("run"), Server("one"), Server("two", version="2b")
    async with serve_raw(run) as a, serve_raw(one) as b, serve_raw(two) as c, AsyncExitStack() as stack:
        w = await stack.enter_async_context(worker(tmp_path, a, model="ours", sampling={"top_p": 0.5}))
        offers = [
            OrderTerms(model=ModelChoice(name="theirs"), sampling={"seed": 4, "top_p": 0.9}),
            OrderTerms(
                model=ModelChoice(source=ModelSource.ENDPOINT, url=b, version="1"), key="sk-endpoint-one"
            ),
            OrderTerms(
                model=ModelChoice(source=ModelSource.ENDPOINT, url=c, name="c", version="2"), followed=True
            ),
            HELD,
        ]
        sessions = [await stack.enter_async_context(w.session(n, offer)) for n, offer in enumerate(offers)]
        Trainer(w, lambda dialect, request: {"text": request["model"], "version": "t"})
        assert [await said(w, session) for session in sessions] == ["run", "one", "two", "asked"]
        assert run.keys == ["sk-of-the-run"]
        assert one.keys == ["sk-endpoint-one"]
        sent = [{k: v for k, v in s.requests[0].items() if k != "messages"} for s in (run, one, two)]
        assert sent == [
            {"model": "theirs", "seed": 4, "top_p": 0.9},
            {"model": "asked", "top_p": 0.5},
            {"model": "c", "top_p": 0.5},
        ]
        assert [w.exchanges(n)[0].version for n in range(4)] == ["", "1", "2b", "t"]
        assert w.of(AttemptProgress) == [AttemptProgress(attempt=2, turns=1, usage=sessions[2].usage)]
        assert sessions[2].usage != ModelUsage()
        await stack.pop_all().aclose()


async def test_the_runs_model_is_changed_in_mid_session(tmp_path):
    old, new = Server("old"), Server("new")
    async with serve_raw(old) as a, serve_raw(new) as b, AsyncExitStack() as stack:
        w = await stack.enter_async_context(worker(tmp_path, a, model="m"))
        plain = await stack.enter_async_context(w.gateway.open_session(9, Log()))
        session = await stack.enter_async_context(w.session(1, OrderTerms()))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        w.gateway.steer(
            await w.models.steer(SteerWorker(to=SteerRequest(url=a, version="1"), key="sk-of-the-run"))
        )
        old.gate.clear()
        on_its_way = group.create_task(said(w, session, "a"))
        await old.asked.wait()
        for place in range(MOST_IDLE + 2):  # more than stay open
            await w.models.steer(SteerWorker(to=SteerRequest(url=f"http://127.0.0.1:9/{place}")))
        steered = SteerWorker(to=SteerRequest(url=b, name="m2", version="2"), key="sk-new")
        w.gateway.steer(await w.models.steer(steered))
        assert await said(w, session, "a", "b") == "new"
        assert await said(w, plain) == "new"
        old.gate.set()
        assert await on_its_way == "old"
        assert (new.keys[0], new.requests[0]["model"]) == ("sk-new", "m2")
        assert [e.version for e in w.exchanges(1)] == ["2", "1"]
        await stack.pop_all().aclose()


async def test_endpoints_are_open_while_used_and_a_few_longer(tmp_path):
    server = Server("x")
    async with serve_raw(server) as url, worker(tmp_path) as w:
        opened = w.models._endpoints._open
        for n in range(MOST_IDLE + 3):
            choice = ModelChoice(source=ModelSource.ENDPOINT, url=url)
            async with w.session(n, OrderTerms(model=choice, key=f"sk-number-{n}")) as session:
                assert await said(w, session) == "x"
        assert [key for _, key in opened] == [f"sk-number-{n}" for n in range(3, 3 + MOST_IDLE)]
        clients = [server._client for one in opened.values() for server in one.upstream._endpoints]
    assert all(client.closed for client in clients)
    assert opened == {}


@pytest.mark.parametrize("kind", ["key", "absent"])
async def test_what_ails_an_orders_model_ails_no_other(tmp_path, kind):
    async def refuse(headers, body):
        return ScriptedReply(status=401, body=b'{"error": {"message": "bad key"}}')

    async with serve_raw(refuse) as url, worker(tmp_path) as w:
        choice = ModelChoice(source=ModelSource.ENDPOINT, url=url) if kind == "key" else ModelChoice()
        async with w.session(1, OrderTerms(model=choice)) as session:
            with pytest.raises(ModelFailed):
                await said(w, session)
            assert (session.failure.where, session.failure.kind, session.failure.again) == (
                "model",
                kind,
                False,
            )


async def test_a_policy_of_the_server_answers_in_its_worker(tmp_path):
    (tmp_path / "policy.py").write_text(
        "def act(request):\n"
        "    said = {'role': 'assistant', 'content': request['messages'][-1]['content']}\n"
        "    return {'choices': [{'message': said}], 'policy_version': 11}\n"
        "number = 3\n"
    )
    choice = ModelChoice(source=ModelSource.FUNCTION)
    async with worker(tmp_path) as w:
        with pytest.raises(ModelFailed, match="no policy"):
            async with w.session(1, OrderTerms(model=choice)):
                pass
    serving = ServingConfig(policy=f"{tmp_path / 'policy.py'}:act")
    async with (
        worker(tmp_path / "with", serving=serving) as w,
        w.session(1, OrderTerms(model=choice)) as session,
    ):
        assert await said(w, session, "echo") == "echo"
        assert w.exchanges(1)[0].version == "11"
    with pytest.raises(BadInput, match="not a function"):
        load_policy(f"{tmp_path / 'policy.py'}:number")


async def test_recorded_turns_are_found_again_under_a_policys_next_name(tmp_path):
    server = Server("said once", version="1")
    async with serve_raw(server) as url, worker(tmp_path, url, model="step-1") as w:
        async with w.session(1, OrderTerms()) as session:
            assert await said(w, session) == "said once"
        w.gateway.steer(
            await w.models.steer(SteerWorker(to=SteerRequest(url=url, name="step-2", version="2")))
        )
        async with w.session(2, OrderTerms(), earlier=(1,)) as session:
            assert await said(w, session) == "said once"
            assert (session.usage.requests, session.replayed_usage.requests) == (0, 1)
        assert len(server.requests) == 1
        assert w.exchanges(2)[0].version == "1"
