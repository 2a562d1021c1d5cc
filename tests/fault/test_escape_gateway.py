"""From inside a sandbox: an agent can neither misuse the provider's key nor hurt a neighbour's calls."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp.web
import pytest
from tests.command_runner import Scene

from holdwater.sandbox.probe import probe

KEY = "sk-upstream-4f1c9e77d2ab"
FEW_FILES = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")
CALLS = 24  # of the neighbour

# Runs in the sandbox. It prints what succeeded, and holds its connections until a file `over` is there.
ATTACK = r"""
import gzip, http.client, json, os, socket, time, urllib.parse

url = urllib.parse.urlsplit(os.environ["URL"])
key = os.environ["KEY"]

def post(path, body, **headers):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, body, {"Authorization": "Bearer " + key, **headers})
    response = connection.getresponse()
    return response.status, response.read().decode()

ask = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
succeeded = []
status, said = post("/v1/chat/completions", ask, X_HTTP_Method_Override="DELETE", X_Original_URL="/admin",
                    X_Rewrite_URL="/admin", OpenAI_Organization="other", X_Goog_User_Project="other",
                    X_Forwarded_Host="other", Cookie="a=b")
assert status == 200, said
if "4f1c9e77d2ab" in said:
    succeeded.append("the provider's key was told")
for name in ("..%2f..%2ffiles", "%2e%2e/files", "../../files"):
    post(f"/v1beta/models/{name}:generateContent", b'{"contents":[]}')  # the upstream knows where it led
if post("/v1/chat/completions", ask[:-1] + b',"model":"other"}')[0] < 400:
    succeeded.append("a key was repeated")
messages = b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 4_000_000) + b"]}"
status, said = post("/v1/chat/completions", gzip.compress(messages), Content_Encoding="gzip")
if status != 413:
    succeeded.append(f"a request of millions of messages: {status}")
del messages
counted = [post("/v1/messages/count_tokens", ask)[0] for _ in range(40)]
if counted.count(200) > 29:
    succeeded.append(f"{counted.count(200)} token counts with a budget of 30 requests")

if os.path.exists("/run/holdwater/gateway.sock"):
    succeeded.append("the socket of all sandboxes is there")

def connect():
    return socket.create_connection((url.hostname, url.port), 5)

held = []
for number in range(1500):
    try:
        held.append(connect())
        if number % 3 == 0:
            held[-1].send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        if number % 3 == 1:
            line = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n"
            held[-1].send(line.encode())
    except OSError:
        time.sleep(0.01)  # a socket of its own that the sandbox's limit on files refuses is no success
        if len(held) > 500:
            held = held[250:]
with open("holding", "w") as file:
    file.write(str(len(held)))
while not os.path.exists("over"):
    time.sleep(0.05)
print(json.dumps(succeeded))
"""

CALL = r"""
import http.client, json, os, time, urllib.parse

url = urllib.parse.urlsplit(os.environ["URL"])
statuses = []
for number in range(int(os.environ["CALLS"])):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=120)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": str(number)}]})
    headers = {"Authorization": "Bearer " + os.environ["KEY"]}
    try:
        connection.request("POST", "/v1/chat/completions", body, headers)
        statuses.append(connection.getresponse().status)
    except OSError as error:
        statuses.append(str(error))
print(json.dumps(statuses))
"""

SUITE = """
import asyncio, json
import holdwater as hw

boxes, met = {}, asyncio.Event()

async def solve(instance, sandbox, model):
    boxes[instance.id] = sandbox
    if len(boxes) == 2:
        met.set()
    await met.wait()
    env = {"URL": model.sandbox_url, "KEY": model.key, "CALLS": str(CALLS), "PYTHONPATH": ""}
    words = " ".join(f"{name}='{value}'" for name, value in env.items())
    if instance.id == "attacker":
        await sandbox.write("attack.py", ATTACK)
        return (await sandbox.run(f"{words} python3 attack.py")).output
    while True:
        try:
            held = await boxes["attacker"].read("holding")
            break
        except FileNotFoundError:
            await asyncio.sleep(0.1)
    await sandbox.write("call.py", CALL)
    result = await sandbox.run(f"{words} python3 call.py")
    await boxes["attacker"].write("over", "")
    return result.output

instances = [hw.Instance(id=name) for name in ("attacker", "neighbour")]

def grade(instance, sandbox, answer):
    return hw.Grade(passed=True, score=1.0, detail=answer)

suite = hw.Suite(name="escape", instances=lambda: instances, grade=grade)
"""


@asynccontextmanager
async def echoing(seen: list[Any]) -> AsyncIterator[str]:
    """An upstream that repeats the key that it got, in two pieces."""

    async def handle(request: aiohttp.web.BaseRequest) -> aiohttp.web.StreamResponse:
        seen.append((request.method, request.raw_path, request.headers, await request.read()))
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        message = {"role": "assistant", "content": f"secret is {request.headers.get('Authorization')}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        said = json.dumps({"choices": [choice], "input_tokens": 7}).encode()
        cut = said.find(b"upstream")
        for piece in (said[:cut], said[cut:]) if cut > 0 else (said,):
            await response.write(piece)
        return response

    runner = aiohttp.web.ServerRunner(aiohttp.web.Server(handle), shutdown_timeout=0.1)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true", reason="bubblewrap does not work here"
)
async def test_nothing_that_an_agent_tries_at_the_gateway_succeeds(tmp_path: Path) -> None:
    """Given a worker with few files, and two attempts in it: one attacks while the other one works."""
    seen: list[Any] = []
    play = Scene(tmp_path, before=FEW_FILES, env={"OPENAI_API_KEY": KEY})
    play.suite(SUITE, ATTACK=ATTACK, CALL=CALL, CALLS=CALLS)
    async with echoing(seen) as url:
        flags = ["--model", "m", "--base-url", url, "--workers", "1", "--concurrency", "2", "--retries", "0"]
        command = play.run(*play.agent(), *flags, "--max-requests", "30")
        status = await asyncio.to_thread(command.wait, 240)
    assert status == 0, command

    answers = {row["instance"]: row["detail"] for row in play.export("attempts")}
    assert json.loads(answers["attacker"]) == []
    assert json.loads(answers["neighbour"]) == [200] * CALLS
    for method, path, headers, body in seen:
        assert method == "POST" and ".." not in path and "files" not in path
        names = {name.lower() for name in headers}
        assert not names & {"x-http-method-override", "x-original-url", "x-rewrite-url", "cookie"}
        assert not names & {"openai-organization", "x-goog-user-project", "x-forwarded-host"}
        assert body.count(b'"model"') <= 1
    exchanges = play.export("exchanges")
    assert KEY not in json.dumps(exchanges)
    counts = [path for _, path, _, _ in seen if path.endswith("count_tokens")]
    assert sum(row["dialect"] == "messages_count" for row in exchanges) == len(counts) > 0

    shown = play.start("show", str(play.out), "attacker")
    assert shown.wait() == 0
    told = " ".join(shown.stdout.split())
    assert "the request has more than 500000 values" in told
    assert "connection closed: more than 128 are open" in told
