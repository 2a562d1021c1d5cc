"""Requests as providers accept them, and the events of those that the gateway refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.command_runner import Scene as SceneOfRun
from tests.gateway_harness import Log, Scene, scene

import holdwater as hw
from holdwater.cli import main
from holdwater.testing.scripted_model import ScriptedReply, serve_raw

BODY = b'{"model":"test-model","messages":[{"role":"user","content":"hello"}]}'
Told = list[tuple[str, int | None]]


@asynccontextmanager
async def gateway(seen: list[Any], **options: Any) -> AsyncIterator[tuple[Scene, Told]]:
    def script(headers: Any, body: bytes) -> ScriptedReply:
        seen.append(headers)
        return ScriptedReply(text="fine")

    told: Told = []
    async with serve_raw(script) as url, scene(url, **options) as s:
        s.gateway.on_refused = lambda what, attempt: told.append((what, attempt))
        yield s, told


async def raw(s: Scene, *pieces: bytes) -> tuple[int, Any]:
    """Send bytes as they are, each piece by itself; the status and the body of the answer."""
    reader, writer = await asyncio.open_unix_connection(s.gateway.socket)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        return await answered(reader)
    finally:
        writer.close()


async def answered(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    [length] = [line.partition(":")[2] for line in head.splitlines() if line.startswith("content-length")]
    return int(head.split()[1]), json.loads(await reader.readexactly(int(length)))


def request(s: Scene, *headers: str, body: bytes = BODY, path: str = "/v1/chat/completions") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {s.session.key}",
        *headers,
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


REPEATED = {
    "agent": ("User-Agent: first/1", "user-agent: second/2", "Content-Type: application/json"),
    "type": ("Content-Type: application/json", "content-type: application/json; charset=utf-8"),
    "length": (f"Content-Length: {len(BODY)}",),
    "host": ("host: y",),
    "many": ("User-Agent: a", "User-Agent: b", "Content-Type: application/json", "Content-Type: text/plain"),
}


@pytest.mark.parametrize("headers", REPEATED.values(), ids=REPEATED)
async def test_a_request_may_repeat_its_headers(headers: tuple[str, ...]) -> None:
    seen: list[Any] = []
    async with gateway(seen) as (s, told):
        status, reply = await raw(s, request(s, *headers))

        assert (status, reply["choices"][0]["message"]["content"]) == (200, "fine")
        assert (len(s.log.exchanges), told) == (1, [])
    [sent] = seen
    for name in ("User-Agent", "Content-Type"):
        assert len(sent.getall(name)) == 1


@pytest.mark.parametrize("size", [1, 7, 60, 200])
async def test_repeated_headers_may_come_in_pieces(size: int) -> None:
    async with gateway([]) as (s, told):
        whole = request(s, *REPEATED["agent"], body=BODY + b" " * 300)
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)] if size > 1 else []

        status, _ = await raw(s, *(pieces or [whole[:-1], whole[-1:]]))

        assert (status, told) == (200, [])


async def test_a_connection_with_repeated_headers_goes_on() -> None:
    async with gateway([]) as (s, told):
        reader, writer = await asyncio.open_unix_connection(s.gateway.socket)
        for _ in range(3):
            writer.write(request(s, *REPEATED["agent"]))
            assert (await answered(reader))[0] == 200
            writer.write(request(s, "User-Agent: one"))
            assert (await answered(reader))[0] == 200
        writer.close()

        assert (len(s.log.exchanges), told) == (6, [])


def bad_requests(s: Scene) -> dict[str, tuple[bytes, int, str]]:
    """What is sent, the status that it gets, and the beginning of its event."""
    call = "`POST chat/completions`"
    unread = "`POST /v1/chat/completions HTTP/1.1`"
    return {
        "json": (request(s, body=b"{not json"), 400, f"400 {call}: the request cannot be read"),
        "large": (request(s, body=b" " * 5000), 413, f"413 {call}: the body is larger than the 4096 bytes"),
        "path": (request(s, path="/v2/nothing"), 404, "404 `POST /v2/nothing`: unknown endpoint"),
        "header": (request(s, "A\x01B: c"), 400, f"400 {unread}: "),
        "lengths": (request(s, "Content-Length: 1"), 400, f"400 {unread}: "),
        "codings": (request(s, "Transfer-Encoding: a", "Transfer-Encoding: b"), 400, f"400 {unread}: "),
        "encoding": (request(s, "Content-Encoding: odd"), 415, f"415 {call}: unsupported `Content-Encoding`"),
    }


@pytest.mark.parametrize("kind", ["json", "large", "path", "header", "lengths", "codings", "encoding"])
async def test_a_refused_request_is_an_event_of_its_attempt(kind: str) -> None:
    async with gateway([], body_cap=4096) as (s, told), s.gateway.open_session(2, Log()):
        sent, status, event = bad_requests(s)[kind]

        found, reply = await raw(s, sent)

        assert (found, "error" in reply) == (status, True)
        [(what, attempt)] = told
        assert (what[: len(event)], attempt) == (event, 1)
        assert s.session.key not in what


async def test_a_request_without_a_key_counts_by_its_process() -> None:
    async with gateway([]) as (s, told), s.gateway.open_session(7, Log()) as other:
        s.gateway.attempt_of = lambda pid: 7
        keyless = request(s).replace(s.session.key.encode(), b"sk-wrong")

        assert (await raw(s, keyless))[0] == 401

        assert [attempt for _, attempt in told] == [7]
        assert told[0][0] == "401 `POST chat/completions`: no attempt is running with this key"
        assert other.exchanges == 0


async def test_refused_requests_are_reported_once_and_counted() -> None:
    async with gateway([]) as (s, told):
        async with s.gateway.open_session(2, Log()) as session:
            headers = {"Authorization": f"Bearer {session.key}"}
            for n in range(100):
                url = f"{s.gateway.url}/nothing/{n % 40}"
                async with s.http.post(url, json={}, headers=headers) as response:
                    assert response.status == 404
            assert len(told) == 32

        assert len(told) == 32 + 32 + 1
        assert told[32][0].startswith("3 times: 404 `POST /v1/nothing/0`")
        assert told[-1] == ("16 more requests were refused", 2)


CALLS = """
import http.client, json, os, urllib.parse

url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])

def post(path, key, body=b"{}"):
    connection = http.client.HTTPConnection(url.hostname, url.port)
    connection.request("POST", path, body, {"Authorization": "Bearer " + key})
    return connection.getresponse().status

key = os.environ["OPENAI_API_KEY"]
assert post("/v1/chat/completions", "sk-wrong") == 401
assert post("/v1/nothing", key) == 404
assert post("/v1/chat/completions", key, b"{") == 400
"""


def test_show_lists_what_the_gateway_refused(tmp_path: Path) -> None:
    play = SceneOfRun(tmp_path)
    source = """
        import holdwater as hw
        instances = [hw.Instance(id=f"i{n}", files={"call.py": CALLS}) for n in range(2)]
        suite = hw.Suite(name="calls", instances=lambda: instances, grade=lambda *given: True)
    """
    play.suite(source, CALLS=CALLS)
    command = play.run(
        "--command",
        "python3 call.py",
        "--model",
        "m",
        "--base-url",
        "http://127.0.0.1:9/v1",
        "--workers",
        "1",
    )
    assert command.wait(120) == 0, command

    for name in ("i0", "i1"):
        shown = play.start("show", str(play.out), name)
        assert shown.wait(60) == 0, shown
        told = " ".join(shown.stdout.split())
        assert "event gateway.refused: 404 `POST /v1/nothing`: unknown endpoint" in told
        assert "event gateway.refused: 400 `POST chat/completions`: the request cannot be read" in told
        assert (
            "event gateway.refused: 401 `POST chat/completions`: no attempt is running with this key" in told
        )


async def test_show_tells_of_refused_requests_that_belong_to_no_attempt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Given two attempts at once, and a request without a key by TCP: nobody knows whose it is."""
    both = asyncio.Barrier(2)

    async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
        await both.wait()
        async with aiohttp.ClientSession() as http:
            url = f"{model.url}/chat/completions"
            for _ in range(6):
                async with http.post(url, json={}, headers={"Authorization": "Bearer wrong"}) as response:
                    assert response.status == 401
        await both.wait()
        return ""

    instances = [hw.Instance(id=name) for name in ("one", "two")]
    suite = hw.Suite(name="keyless", instances=lambda: instances, grade=lambda *given: True)
    options = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "workers": 0, "concurrency": 2}
    await hw.arun(suite, solve, out=tmp_path / "run", **options)

    assert main(["show", str(tmp_path / "run")]) == 0
    told = " ".join(capfd.readouterr().out.split())
    call = "401 `POST chat/completions`: no attempt is running with this key"
    assert f"refused {call} (not part of an attempt)" in told
    assert f"refused 10 times: {call} (not part of an attempt)" in told
    assert main(["show", str(tmp_path / "run"), "--json"]) == 0
    refused = json.loads(capfd.readouterr().out)["refused"]
    assert refused["events"] == len(refused["last"]) >= 2
