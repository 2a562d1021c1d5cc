"""An agent cannot steer the upstream with the provider's key: by headers, paths, repeated keys or counts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp.web
import pytest
from tests.dialect_requests import send, speak
from tests.gateway_harness import MODEL, Log, Scene, scene

from holdwater import dialect as dialects
from holdwater.core.records import Limits

REFUSED_HEADERS = {
    "X-HTTP-Method-Override": "DELETE",
    "X-HTTP-Method": "GET",
    "X-Method-Override": "PUT",
    "X-Original-URL": "/v1/files",
    "X-Rewrite-URL": "/v1/files",
    "OpenAI-Organization": "org-other",
    "OpenAI-Project": "proj-other",
    "X-Goog-User-Project": "other",
    "Forwarded": "for=1.2.3.4",
    "X-Forwarded-For": "1.2.3.4",
    "X-Forwarded-Prefix": "/admin",
    "X-Real-IP": "1.2.3.4",
    "Cookie": "session=1",
    "Proxy-Authorization": "Basic eA==",
    "api-key": "other",
    "X-Anything": "else",
}
PARAMETERS = ["$httpHeaders=x", "$httpMethod=DELETE", "fields=candidates", "quotaUser=a", "access_token=t"]
HOSTILE_NAMES = [
    "..%2f..%2ffiles",
    "%2e%2e/%2e%2e/files",
    "../../files",
    ".hidden",
    "a/../b",
    "a%252e",
    "a b",
]


class Upstream:
    """Answers every path, and knows what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any, bytes]] = []  # the path with the query, the headers, the body

    async def __call__(self, request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        self.requests.append((request.raw_path, request.headers, await request.read()))
        return aiohttp.web.json_response({"choices": [], "input_tokens": 7, "totalTokens": 7})


@asynccontextmanager
async def asked(**options: Any) -> AsyncIterator[tuple[Scene, Upstream]]:
    upstream = Upstream()
    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(upstream))
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", **options) as s:
            yield s, upstream
    finally:
        await runner.cleanup()


SPOKEN = pytest.mark.parametrize("dialect", ["chat", "responses", "messages", "gemini"])


@SPOKEN
async def test_unknown_headers_are_not_sent_upstream(dialect: str) -> None:
    async with asked() as (s, upstream), send(s, speak(dialect, "hi"), **REFUSED_HEADERS) as response:
        assert response.status == 200

    [(_, headers, _)] = upstream.requests
    assert [name for name in REFUSED_HEADERS if name in headers] == []


@SPOKEN
async def test_unknown_query_parameters_are_not_sent_upstream(dialect: str) -> None:
    request = speak(dialect, "hi")
    path = request.path.partition("?")[0]
    request = request._replace(path=f"{path}?{'&'.join(PARAMETERS)}&alt=json")
    async with asked() as (s, upstream), send(s, request) as response:
        assert response.status == 200

    [(target, _, _)] = upstream.requests
    assert target.partition("?")[2] == "alt=json"


@pytest.mark.parametrize("name", HOSTILE_NAMES)
async def test_a_model_name_that_leads_elsewhere_is_refused(name: str) -> None:
    request = speak("gemini", "hi")
    for method in ("generateContent", "countTokens"):
        async with asked() as (s, upstream):
            url = s.gateway.url.removesuffix("/v1") + f"/v1beta/models/{name}:{method}"
            headers = {"x-goog-api-key": s.session.key}
            sent = s.http.post(aiohttp.client.URL(url, encoded=True), data=request.body, headers=headers)
            async with sent as response:
                assert response.status in (400, 404)
                assert "error" in await response.json()
            assert upstream.requests == []


async def test_an_ordinary_model_name_goes_up() -> None:
    async with asked() as (s, upstream):
        path = "/v1beta/models/gemini-2.5-pro@001:generateContent"
        async with send(s, speak("gemini", "hi")._replace(path=path)) as response:
            assert response.status == 200

    assert upstream.requests[0][0] == path


@SPOKEN
async def test_a_request_that_repeats_a_key_is_refused(dialect: str) -> None:
    body = speak(dialect, "hi").body
    # Given a second value that the record would show and the upstream might not obey
    repeats = [body[:-1] + b',"temperature":1,"temperature":2}', body[:-1] + b"," + body[1:]]
    async with asked() as (s, upstream):
        for repeated in repeats:
            async with send(s, speak(dialect)._replace(body=repeated)) as response:
                assert response.status == 400
                assert "duplicate key" in await response.text()
        assert upstream.requests == []


async def test_a_repeat_inside_of_a_message_is_recorded_as_sent() -> None:
    message = b'{"role":"user","role":"system","content":"hi"}'
    async with asked() as (s, upstream):
        async with s.post(b'{"messages":[%s]}' % message) as response:
            assert response.status == 200
        assert bytes(s.log.last.append[0]) == message
    assert message in upstream.requests[0][2]


COUNTS = {"messages": "/v1/messages/count_tokens", "gemini": f"/v1beta/models/{MODEL}:countTokens"}


@pytest.mark.parametrize("dialect", COUNTS)
async def test_token_counts_use_up_the_budget_and_are_recorded(dialect: str) -> None:
    request = speak(dialect, "how many?")._replace(path=COUNTS[dialect])
    async with asked() as (s, upstream):
        log = Log()
        async with s.gateway.open_session(2, log, Limits(requests=5)) as session:
            statuses = []
            for _ in range(12):
                async with send(Scene(s.gateway, session, log, s.http), request) as response:
                    statuses.append(response.status)
        assert statuses == [200] * 5 + [400] * 7
        assert (len(upstream.requests), len(log.exchanges), session.usage.requests) == (5, 5, 5)
        assert (session.usage.tokens, session.usage.cost) == (0, 0.0)
        for exchange in log.exchanges:
            assert exchange.dialect == f"{dialect}_count"
            assert json.loads(bytes(exchange.reply or b""))["totalTokens"] == 7
            assert not dialects.has_conversations(exchange.dialect)
        said = dialects.find_dialect(exchange.dialect).parse_reply(json.loads(bytes(exchange.reply or b"")))
        assert said.message is not None and said.message.parts == ("[7 tokens]",)


async def test_a_failed_count_is_no_failure_of_the_conversation() -> None:
    async def unknown(request: Any) -> aiohttp.web.Response:
        return aiohttp.web.json_response({"error": "no such path"}, status=404)

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(unknown))
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as s:
            for _ in range(3):
                request = speak("messages", "hi")._replace(path=COUNTS["messages"])
                async with send(s, request) as response:
                    assert response.status == 200
            # An upstream that cannot count is asked once.
            assert (len(s.log.exchanges), s.session.failure, s.session.unanswered) == (1, None, None)
    finally:
        await runner.cleanup()


def test_every_dialect_of_the_record_can_be_read() -> None:
    for name in (*dialects.DIALECTS, "messages_count", "gemini_count"):
        assert dialects.find_dialect(name).key


async def test_an_item_reference_is_recorded_as_the_item_it_stands_for() -> None:
    """Given a client that sends back the ids of earlier items in the place of these."""
    call = {"type": "function_call", "id": "fc_1", "name": "ls", "arguments": "{}", "call_id": "c1"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "a b"}
    asked = {"role": "user", "content": "go"}

    async def handle(request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        await request.read()
        return aiohttp.web.json_response({"id": "resp_1", "output": [call]})

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(handle))
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with scene(f"http://127.0.0.1:{runner.addresses[0][1]}/v1") as s:
            known, unknown = (
                {"type": "item_reference", "id": "fc_1"},
                {"type": "item_reference", "id": "fc_9"},
            )
            for items in ([asked], [asked, known, output], [asked, unknown]):
                body = json.dumps({"model": MODEL, "input": items}).encode()
                async with send(s, speak("responses")._replace(body=body)) as response:
                    assert response.status == 200
            requests = [request["input"] for request in s.log.requests()]
            assert requests == [[asked], [asked, call, output], [asked, unknown]]
    finally:
        await runner.cleanup()
