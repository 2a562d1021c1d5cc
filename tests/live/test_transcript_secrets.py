"""No key is in anything that a run writes: neither in its records and logs nor in what is exported."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.secret_search import export_all, found
from zstandard import ZstdDecompressor

import holdwater as hw
from holdwater.testing.scripted_model import ScriptedReply, serve_raw

UPSTREAM = "sk-upstream-4f1c9e77d2ab"
WORD = "a-word-of-the-conversation"
HEADERS = ("Authorization", "x-api-key", "x-goog-api-key", "api-key", "Proxy-Authorization", "Cookie")


@pytest.mark.parametrize("escape", ["", "\\u002d"], ids=["plain", "escaped"])
async def test_no_key_is_in_what_a_run_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], escape: str
) -> None:
    """Given an upstream that repeats its key in an error, and a client that sends all headers it can."""
    keys: list[str] = []
    heard: list[str] = []

    def answer(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        heard.append(headers.get("Authorization", ""))
        if b"refuse this" in body:
            told = json.dumps({"error": {"message": f"Incorrect request with key {heard[-1]}"}})
            body = told.replace("-", escape or "-").encode()
            return ScriptedReply(status=400, body=body, headers={"x-key": UPSTREAM})
        return ScriptedReply(text=WORD)

    async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> str:
        keys.append(model.key)
        reply = await model.chat([{"role": "user", "content": "go on"}])
        headers = dict.fromkeys(HEADERS, f"Bearer {model.key}")
        request: dict[str, Any] = {"messages": [{"role": "user", "content": "refuse this"}]}
        async with aiohttp.ClientSession() as http:
            url = f"{model.url}/chat/completions"
            async with http.post(url, json=request, headers=headers) as response:
                assert response.status == 400
                assert UPSTREAM not in await response.text()
        text: str = reply["choices"][0]["message"]["content"]
        await sandbox.write("answer", text)
        return text

    def grade(instance: hw.Instance, sandbox: hw.Sandbox, answer: str) -> bool:
        return answer == WORD

    suite = hw.Suite(name="secrets", instances=lambda: [hw.Instance(id="one")], grade=grade)
    monkeypatch.setenv("OPENAI_API_KEY", UPSTREAM)
    async with serve_raw(answer) as url:
        summary = await hw.arun(
            suite, solve, out=tmp_path / "run", model="scripted-upstream", base_url=url, workers=0, retries=0
        )
    export_all(tmp_path / "run", tmp_path / "exports", capfd)

    assert summary.attempts == 1 and heard[0] == f"Bearer {UPSTREAM}"
    assert found(WORD, tmp_path / "run") and found(
        WORD, tmp_path / "exports"
    )  # the search finds what is there
    for secret in (UPSTREAM, *keys):
        assert found(secret, tmp_path / "run") == []
        assert found(secret, tmp_path / "exports") == []


@pytest.mark.parametrize("url", ["https://user:sk-secret@host/v1", "https://host/v1?key=sk-secret"])
def test_a_key_in_a_base_url_is_refused_before_any_write(tmp_path: Path, url: str) -> None:
    with pytest.raises(hw.BadInput, match="`--base-url` must not contain") as refused:
        hw.run("demo", "bash", out=tmp_path / "run", model="m", base_url=url)
    assert "sk-secret" not in str(refused.value)
    assert not (tmp_path / "run").exists()


LEAK = """
import os, sys, time
key = os.environ["OPENAI_API_KEY"]
print("whole", key)
for stream in (sys.stdout, sys.stderr):
    for piece in (key[:3], key[3:20], key[20:], "\\n"):
        stream.write(piece)
        stream.flush()
        time.sleep(0.05)
open("leak.txt", "w").write("x" * 16380 + key + "\\n" + key * 3)
open("leak.bin", "wb").write(b"\\0" + b"work")
sys.exit("ended with " + key)
"""


async def test_an_agent_that_prints_its_key_leaves_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Given an agent that puts its key wherever it can."""
    keys: list[str] = []

    def answer(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        key = body.partition(b"my key is ")[2][:49].decode()
        return ScriptedReply(text=f"{WORD}: {key}")

    async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> dict[str, str]:
        keys.append(model.key)
        print("printed", model.key)
        logging.getLogger("agent").warning("logged %s", model.key)
        await sandbox.write("leak.py", LEAK)
        result = await sandbox.run(["python3", "leak.py"], env={"OPENAI_API_KEY": model.key})
        assert model.key in result.stdout  # the agent itself sees what there is
        tools = [{"type": "function", "function": {"name": "t", "description": model.key + "y" * 5000}}]
        for n in range(2):
            content = f"{n}: my key is {model.key}, " + "z" * 5000
            await model.chat([{"role": "user", "content": content}], tools=tools, user=model.key)
        return {"leak": model.key, "word": WORD}

    def grade(instance: hw.Instance, sandbox: hw.Sandbox, answer: dict[str, str]) -> hw.Grade:
        raise hw.GradeFailed(f"the answer was {answer['leak']}")

    suite = hw.Suite(name="leaks", instances=lambda: [hw.Instance(id="one")], grade=grade)
    async with serve_raw(answer) as url:
        await hw.arun(
            suite, solve, out=tmp_path / "run", model="m", base_url=url, workers=0, retries=0, timeout=60
        )
    export_all(tmp_path / "run", tmp_path / "exports", capfd)

    assert found(WORD, tmp_path / "run") and found("sk-hw-" + "x" * 43, tmp_path / "run")
    for key in keys:
        assert found(key, tmp_path / "run") == []
        assert found(key, tmp_path / "exports") == []
    [salvage] = (tmp_path / "run" / "artifacts").glob("*.tar.zst")
    assert b"x" * 16380 + b"sk-hw-" in ZstdDecompressor().stream_reader(salvage.read_bytes()).read()


async def test_a_request_with_the_attempts_key_is_paid_once(tmp_path: Path) -> None:
    """Given a first attempt whose grading fails after its calls."""
    asked: list[bytes] = []
    said: list[str] = []

    def answer(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        asked.append(body)
        return ScriptedReply(text="you said " + body.partition(b"my key is ")[2][:49].decode())

    async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        reply = await model.chat([{"role": "user", "content": f"my key is {model.key}"}])
        assert reply["choices"][0]["message"]["content"] == f"you said {model.key}"
        said.append(model.key)
        if len(said) == 1:
            raise hw.ModelFailed("try again")

    suite = hw.Suite(name="again", instances=lambda: [hw.Instance(id="one")], grade=lambda *given: True)
    async with serve_raw(answer) as url:
        summary = await hw.arun(
            suite, solve, out=tmp_path / "run", model="m", base_url=url, workers=0, backoff=0.01, timeout=60
        )

    assert (summary.outcomes, len(asked), len(set(said))) == ({"passed": 1}, 1, 2)
