"""The upstream that is a Python function: plain and async, whole and streamed, through a whole run."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.dialect_requests import DIALECTS, send, speak
from tests.gateway_harness import MODEL, Log, Scene, ask, connect

import holdwater as hw
from holdwater.dialect import find_dialect as spoken
from holdwater.gateway.server import Gateway
from holdwater.gateway.upstreams.policy import PolicyUpstream

WHOLE = {
    "id": "x",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "I look",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"a": 1}'}}
                ],
            },
            "logprobs": {"content": [{"token": "I", "logprob": -0.5}]},
            "token_ids": [1, 2],
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}


class Open:
    def __init__(self, policy, directory):
        self._policy, self._directory = policy, directory

    async def __aenter__(self):
        self._gateway = Gateway(PolicyUpstream(self._policy), Path(self._directory) / "s")
        await self._gateway.__aenter__()
        self._http = connect(self._gateway.socket)
        self._session = self._gateway.open_session(1, log := Log())
        return Scene(self._gateway, await self._session.__aenter__(), log, self._http)

    async def __aexit__(self, *error):
        await self._session.__aexit__(None, None, None)
        await self._http.close()
        await self._gateway.__aexit__(None, None, None)


async def asynchronous(request):
    await asyncio.sleep(0)
    return f"you said {request['messages'][-1]['content']}"


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda request: "hello", "hello"),
        (lambda request: {"content": "as a message"}, "as a message"),
        (asynchronous, "you said hi"),
    ],
    ids=["text", "message", "async"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_answers(policy, said, stream, tmp_path):
    async with Open(policy, tmp_path) as s:
        async with s.post(ask("hi", stream=stream)) as response:
            text = await response.text()
        assert response.status == 200
        assert s.log.reply["choices"][0]["message"]["content"] == said
        assert text.endswith("data: [DONE]\n\n") == stream
        assert s.log.requests()[0]["messages"] == ask("hi")["messages"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_whole_completion_is_passed_on_and_kept_as_it_is(stream, tmp_path):
    async with Open(lambda request: WHOLE, tmp_path) as s:
        async with s.post(ask("hi", stream=stream)) as response:
            body = await response.text()
        if not stream:
            assert json.loads(body) == WHOLE == s.log.reply
        choice = s.log.reply["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
        assert (choice["finish_reason"], choice["logprobs"]) == (
            "tool_calls",
            WHOLE["choices"][0]["logprobs"],
        )
        assert (s.session.usage.input_tokens, s.session.usage.output_tokens) == (7, 3)


async def test_a_policy_that_raises_or_returns_nonsense_is_the_models_failure(tmp_path):
    def policy(request):
        if request["messages"][0]["content"] == "raise":
            raise LookupError("no weights")
        return 7

    async with Open(policy, tmp_path) as s:
        for text, words in (("raise", "the policy raised LookupError: no weights"), ("x", "returned int")):
            async with s.post(ask(text)) as response:
                assert (response.status, words in await response.text()) == (502, True)
            assert (s.session.failure.where, s.session.failure.kind) == ("model", "policy")


async def test_a_run_with_a_policy_needs_no_upstream_and_resumes_with_it(tmp_path):
    async def solve(instance, sandbox, model):
        return (await model.chat([{"role": "user", "content": instance.id}]))["choices"][0]["message"][
            "content"
        ]

    suite = hw.Suite(
        name="said",
        instances=lambda: [hw.Instance(id=name) for name in "ab"],
        grade=lambda instance, sandbox, answer: answer == f"you said {instance.id}",
    )
    summary = await hw.arun(suite, solve, out=tmp_path / "run", policy=asynchronous)
    assert (summary.outcomes, summary.model, summary.cost) == ({"passed": 2}, "policy", None)
    with pytest.raises(hw.BadInput, match="Python function"):
        await hw.aresume(tmp_path / "run", suite=suite, agent=solve)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_it_answers_in_every_dialect(dialect, stream, tmp_path):
    async def policy(request):
        assert request["model"] == MODEL
        return {**WHOLE, "policy_version": 3, "prompt_token_ids": [len(request["messages"])]}

    async with Open(policy, tmp_path) as s:
        async with send(s, speak(dialect, "a", "b", "c", stream=stream)) as response:
            assert response.status == 200, await response.text()
            await response.read()
        reply = spoken(dialect).parse_reply(s.log.reply)
        assert (reply.message.text, reply.message.calls[0].arguments) == ("I look", {"a": 1})
        assert (reply.tokens.prompt, reply.tokens.completion, s.log.last.version) == ((3,), (1, 2), "3")
