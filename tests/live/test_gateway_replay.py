"""What an earlier attempt was answered is given again in whatever form is asked for, and by no upstream."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.dialect_requests import DIALECTS, send, speak, text_of
from tests.gateway_harness import Scene, connect

from holdwater.conversation.earlier_replies import EarlierReplies
from holdwater.core.records import Limits, ModelUsage
from holdwater.gateway.call_terms import CallTerms, RateLimiter
from holdwater.gateway.server import Gateway
from holdwater.gateway.upstreams.http import HttpUpstream
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog, read_exchanges, segment_path
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, serve_script

CALL = {"name": "bash", "arguments": {"command": "ls -l", "n": 1.5}, "id": "call_x"}
ANSWER = ScriptedReply(
    text="here you are, in many words", reasoning="let me see", tool_calls=[CALL], cached=20
)
SPOKEN = pytest.mark.parametrize("dialect", DIALECTS)


class Place:
    """A gateway over a run directory, whose attempts come one after another."""

    def __init__(self, directory: RunDirectory, gateway: Gateway, http: Any) -> None:
        self.directory = directory
        self.gateway = gateway
        self.http = http

    @asynccontextmanager
    async def attempt(self, number: int, *earlier: int, **options: Any) -> AsyncIterator[Scene]:
        log = AttemptLog(self.directory, number)
        recording = EarlierReplies(self.directory, earlier) if earlier else None
        async with self.gateway.open_session(number, log, recording=recording, **options) as session:
            yield Scene(self.gateway, session, log, self.http)  # type: ignore[arg-type]
        log.close()

    def exchanges(self, attempt: int) -> list[Any]:
        return list(read_exchanges(self.directory, attempt))


@asynccontextmanager
async def place(path: Path, upstream: str, **options: Any) -> AsyncIterator[Place]:
    directory = RunDirectory.create(path / "run")
    async with (
        HttpUpstream(upstream, "sk-upstream", retries=0) as up,
        Gateway(up, path / "s", **options) as gateway,
        connect(gateway.socket) as http,
    ):
        yield Place(directory, gateway, http)


def saying(*replies: ScriptedReply) -> Callable[[Any], ScriptedReply]:
    """A script that gives these replies one after another, and then refuses."""
    left = iter(replies)
    return lambda request: next(left, ScriptedReply(status=400))


async def said(scene: Scene, dialect: str, *texts: str) -> str:
    """The text of the answer to a plain request."""
    return text_of(dialect, json.loads(await answered(scene, speak(dialect, *texts))))


async def answered(scene: Scene, request: Any) -> bytes:
    async with send(scene, request) as response:
        assert response.status == 200, await response.read()
        body: bytes = await response.read()
        return body


@SPOKEN
@pytest.mark.parametrize("before", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("now", [False, True], ids=["plain-now", "streamed-now"])
async def test_the_same_reply_in_the_form_that_is_asked_for(
    tmp_path: Path, dialect: str, before: bool, now: bool
) -> None:
    async with serve_script(saying(ANSWER)) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            await answered(first, speak(dialect, "hi", stream=before))
        async with p.attempt(2, 1) as second:  # the upstream has nothing more to say
            body = await answered(second, speak(dialect, "hi", stream=now))
            assert second.session.usage == ModelUsage()
            assert second.session.replayed_usage == first.session.usage != ModelUsage()
    [old], [new] = p.exchanges(1), p.exchanges(2)
    assert json.loads(bytes(new.reply)) == json.loads(bytes(old.reply))
    assert (new.identity, new.streamed, new.status, new.error) == (old.identity, now, 200, "")
    assert b"data: {" in body if now else json.loads(body) == json.loads(bytes(old.reply))


@pytest.mark.parametrize("query", ["alt=sse", ""], ids=["events", "array"])
async def test_google_clients_get_each_chunk_of_a_stream_again(tmp_path: Path, query: str) -> None:
    """They keep each chunk as a message of its own, so that chunks in other places ask something new."""
    request = speak("gemini", "hi", stream=True)
    path = request.path.partition("?")[0] + ("?" + query if query else "")
    async with serve_script(saying(ANSWER)) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            before = chunks_of(await answered(first, request._replace(path=path)))
        async with p.attempt(2, 1) as second:
            assert chunks_of(await answered(second, request._replace(path=path))) == before
            assert second.session.replayed_usage == first.session.usage
    assert len(before) > 2


async def test_an_image_in_a_stream_is_kept_once_and_replayed_in_place(tmp_path: Path) -> None:
    image = base64.b64encode(os.urandom(200_000)).decode()
    parts: list[Any] = [{"text": "look"}, {"inlineData": {"mimeType": "image/png", "data": image}}]
    told = [{"candidates": [{"content": {"parts": [part], "role": "model"}}]} for part in parts]
    told[-1]["candidates"][0]["finishReason"] = "STOP"
    body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in told)
    reply = ScriptedReply(body=body, headers={"Content-Type": "text/event-stream"})
    request = speak("gemini", "draw", stream=True)
    async with serve_script(saying(reply)) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            assert chunks_of(await answered(first, request)) == told
        async with p.attempt(2, 1) as second:
            assert chunks_of(await answered(second, request)) == told
    [exchange] = p.exchanges(1)
    assert len(bytes(exchange.chunks)) < 1000
    assert len([file for file in p.directory.blobs.rglob("*") if file.is_file()]) == 1


def chunks_of(body: bytes) -> list[Any]:
    if body.startswith(b"["):
        return list(json.loads(body))
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: ")]


@SPOKEN
async def test_an_edited_conversation_goes_live(tmp_path: Path, dialect: str) -> None:
    script = saying(ScriptedReply(text="one"), ScriptedReply(text="two"), ScriptedReply(text="three"))
    async with serve_script(script) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            await answered(first, speak(dialect, "hi"))
            await answered(first, speak(dialect, "hi", "one", "go on"))
        async with p.attempt(2, 1) as second:
            assert await said(second, dialect, "hi") == "one"
            assert await said(second, dialect, "hi", "one", "go elsewhere") == "three"
            assert (second.session.replayed_usage.requests, second.session.usage.requests) == (1, 1)


async def test_a_repeated_question_is_answered_in_recorded_order_and_then_live(tmp_path: Path) -> None:
    script = saying(*(ScriptedReply(text=word) for word in ("one", "two", "three", "four")))
    async with serve_script(script) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            for _ in range(2):
                await said(first, "chat", "say something")
        async with p.attempt(2, 1) as second:  # is cut after its first call
            await said(second, "chat", "say something")
        async with p.attempt(3, 1, 2) as third:
            heard = [await said(third, "chat", "say something") for _ in range(3)]
    assert heard == ["one", "two", "three"]


async def test_neither_errors_nor_cut_replies_are_given_again(tmp_path: Path) -> None:
    cut = ScriptedReply(text="a text that is long enough to be cut", fault=ReplyFault.CUT)
    script = saying(ScriptedReply(status=400), cut, ScriptedReply(text="whole"))
    async with serve_script(script) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            for request in (speak("chat", "hi"), speak("chat", "hi", stream=True)):
                try:
                    async with send(first, request) as response:
                        await response.read()
                except aiohttp.ClientError:
                    pass  # cut
        async with p.attempt(2, 1) as second:
            assert await said(second, "chat", "hi") == "whole"
            assert second.session.replayed_usage == ModelUsage()


@pytest.mark.parametrize(
    "passing",
    [
        {"metadata": {"user_id": "session-2"}},
        {"user": "somebody else"},
        {"prompt_cache_key": "another"},
        {"stream_options": {"include_usage": True}, "stream": True},
    ],
)
async def test_what_changes_from_one_start_to_the_next_makes_no_other_request(
    tmp_path: Path, passing: dict[str, Any]
) -> None:
    def request(extra: dict[str, Any]) -> Any:
        asked = speak("chat", "hi")
        return asked._replace(body=json.dumps({**json.loads(asked.body), **extra}).encode())

    async with serve_script(saying(ANSWER)) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            await answered(first, request({"metadata": {"user_id": "session-1"}}))
        async with p.attempt(2, 1) as second:
            await answered(second, request(passing))
            assert second.session.replayed_usage.requests == 1
        async with p.attempt(3, 1) as third, send(third, request({"temperature": 0.1})) as response:
            assert response.status != 200  # another question, and the upstream has nothing more to say


async def test_googles_array_of_chunks_stays_one(tmp_path: Path) -> None:
    request = speak("gemini", "hi", stream=True)
    request = request._replace(path=request.path.replace("?alt=sse", ""))
    async with serve_script(saying(ANSWER)) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            await answered(first, speak("gemini", "hi"))
        async with p.attempt(2, 1) as second:
            [chunk] = json.loads(await answered(second, request))
    assert chunk == json.loads(bytes(p.exchanges(2)[0].reply)) == json.loads(bytes(p.exchanges(1)[0].reply))


async def test_media_in_a_reply_are_put_back(tmp_path: Path) -> None:
    picture = base64.b64encode(os.urandom(9000)).decode()
    message = {"role": "assistant", "content": f"data:image/png;base64,{picture}"}
    reply = {"choices": [{"index": 0, "message": message}]}
    body = json.dumps(reply).encode()
    script = saying(ScriptedReply(body=body, headers={"Content-Type": "application/json"}))
    async with serve_script(script) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            assert await answered(first, speak("chat", "draw")) == body
        async with p.attempt(2, 1) as second:
            assert json.loads(await answered(second, speak("chat", "draw"))) == reply
    assert p.directory.blobs.exists() and len(bytes(p.exchanges(2)[0].reply)) < 1000


async def test_answers_from_the_record_neither_wait_for_the_rate_nor_use_it(tmp_path: Path) -> None:
    async with serve_script(saying(ANSWER, ANSWER)) as upstream:
        terms = CallTerms(rate=RateLimiter(0.5, None))  # one in two minutes
        async with place(tmp_path, upstream, terms=terms) as p:
            async with p.attempt(1) as first:
                await answered(first, speak("chat", "hi"))
            for number in range(2, 8):
                async with p.attempt(number, 1) as later:
                    await answered(later, speak("chat", "hi"))
                    assert later.session.waited == 0.0


async def test_a_damaged_record_is_asked_for_again(tmp_path: Path) -> None:
    script = saying(ScriptedReply(text="one"), ScriptedReply(text="two"), ScriptedReply(text="again"))
    async with serve_script(script) as upstream, place(tmp_path, upstream) as p:
        async with p.attempt(1) as first:
            await answered(first, speak("chat", "hi"))
            await answered(first, speak("chat", "hi", "one", "go on"))
        recording = EarlierReplies(p.directory, [1])
        path = segment_path(p.directory, 1)
        content = bytearray(path.read_bytes())
        content[40] ^= 0xFF
        path.write_bytes(content)
        log = AttemptLog(p.directory, 2)
        async with p.gateway.open_session(2, log, Limits(), recording) as session:
            second = Scene(p.gateway, session, log, p.http)  # type: ignore[arg-type]
            assert await said(second, "chat", "hi") == "again"
            assert await said(second, "chat", "hi", "one", "go on") == "two"
        log.close()
