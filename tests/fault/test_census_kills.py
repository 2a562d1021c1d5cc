"""Random signals to conductor and workers, and an independent census of what happened.

The agent and the grader keep a side file, the model server counts its own replies; both must agree with the
ledger.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.command_runner import Command, Scene, hears, lines, serving
from tests.wait_bounds import stretch

SAMPLES, TURNS, AT_ONCE = 2, 5, 6
WIDTH = 6  # digits of the allowance

MODEL = """
import json, random, secrets, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

chance, lock, log = random.Random(1), threading.Lock(), open(sys.argv[1], "a")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with lock:
            failing = chance.random() < 0.03
            usage = {"prompt_tokens": chance.randint(10, 5000), "completion_tokens": chance.randint(1, 900)}
        usage["total_tokens"] = sum(usage.values())
        if failing:
            return self.answer(503, "application/json", b'{"error": {"message": "busy"}}')
        text = secrets.token_hex(12)
        with lock:
            print(json.dumps([request["messages"][0]["content"], text, usage]), file=log, flush=True)
        reply = {"id": text, "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
        message = {"role": "assistant", "content": text}
        if not request.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return self.answer(200, "application/json", json.dumps({**reply, "choices": [choice]}).encode())
        chunks = [{"index": 0, "delta": message, "finish_reason": None}]
        chunks += [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        reply["object"] = "chat.completion.chunk"
        events = [json.dumps({**reply, "usage": None, "choices": [chunk]}) for chunk in chunks]
        events += [json.dumps({**reply, "choices": []}), "[DONE]"]
        self.answer(200, "text/event-stream", "".join(f"data: {event}\\n\\n" for event in events).encode())

    def answer(self, status, kind, body):
        try:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass  # the caller was killed

    def log_message(self, *words):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""

SUITE = """
import asyncio, json, os
import aiohttp
import holdwater as hw


def instances():
    return (hw.Instance(id=f"i{n:03d}") for n in range(COUNT))


def note(*words):
    fd = os.open(SIDE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, (" ".join(words) + "\\n").encode())
    os.close(fd)


def replies():
    return len({line for line in open(SIDE) if line.startswith("turn ")})


async def solve(instance, sandbox, model):
    streams = int(instance.id[1:]) % 2 == 1
    messages = [{"role": "user", "content": instance.id}]
    note("start", instance.id)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {model.key}"}) as http:
        for turn in range(TURNS):
            while replies() >= int(open(ALLOWANCE).read()):
                await asyncio.sleep(0.05)
            request = {"model": model.name, "messages": messages, "stream": streams}
            async with http.post(f"{model.url}/chat/completions", json=request) as response:
                body = await response.read()
                response.raise_for_status()
            text = reply_in(body, streams)
            note("turn", instance.id, text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]
    note("end", instance.id, text)
    return text


def reply_in(body, streams):
    if not streams:
        return json.loads(body)["choices"][0]["message"]["content"]
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def grade(instance, sandbox, answer):
    note("grade", instance.id, answer)
    return len(answer) == 24


suite = hw.Suite(name="census", instances=instances, grade=grade)
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    with serving("-c", MODEL, str(tmp_path / "replies")) as url:
        yield url


@pytest.mark.parametrize(
    ("count", "signals", "seed"),
    [
        pytest.param(8, 10, 3, marks=pytest.mark.timeout(600)),
        pytest.param(100, 300, 5, marks=[pytest.mark.proof, pytest.mark.timeout(7200)]),
    ],
)
def test_an_independent_census_agrees_after_random_signals(
    scene: Scene, model: str, count: int, signals: int, seed: int
) -> None:
    torture = Torture(scene, model, random.Random(seed), count, signals)

    torture.play()

    census = Census(scene)
    planned = {(f"i{number:03d}", sample) for number in range(count) for sample in range(SAMPLES)}
    assert Counter(census.outcomes) == Counter(dict.fromkeys(planned, 1)), "lost or settled twice"
    assert {row["kind"] for row in scene.export("outcomes")} == {"passed"}
    scene.assert_whole(count * SAMPLES)
    scene.assert_clean()
    assert torture.sent == signals
    assert {name: census.starts[name] for name in torture.settled} == torture.settled, "ran after its outcome"
    census.check_graded(planned)
    census.check_replies(most_in_flight=torture.cuts * AT_ONCE)


class Torture:
    """A run that is signalled again and again, and resumed each time that its conductor ends."""

    def __init__(self, scene: Scene, model: str, chance: random.Random, count: int, signals: int) -> None:
        self.sent = 0
        self.cuts = 0  # signals that can cut model calls in flight
        self.settled: dict[str, int] = {}  # instance -> its starts when all its samples had an outcome
        self._scene = scene
        self._chance = chance
        self._signals = signals
        self._allowance = scene.place / "allowance"
        self._allow(0)
        files = {"SIDE": str(scene.place / "side"), "ALLOWANCE": str(self._allowance)}
        scene.suite(SUITE, COUNT=count, TURNS=TURNS, **files)
        turns = count * SAMPLES * TURNS
        self._most = turns * 3 // 4 // signals  # turns a signal
        self._enough = turns - 2 * AT_ONCE  # all agents may pass it at once, and the run goes on
        self._options = (
            *("--model", "m", "--base-url", model, "--samples", str(SAMPLES), "--workers", "2"),
            *("--concurrency", str(AT_ONCE), "--retries", "1000", "--grace", "0.2"),
        )

    def play(self) -> None:
        command = self._go_on()
        while self.sent < self._signals:
            turns = self._turns() + self._chance.randint(0, 2 * self._most)
            self._allow(min(turns, self._enough))
            command.live_on(self._chance.uniform(0.0, 2.5))
            assert command.running, f"over after {self.sent} signals: {command}"
            command = self._strike(command)
            self._look()
        self._allow(10**WIDTH - 1)
        assert command.wait(600) == 0, command

    def _strike(self, command: Command) -> Command:
        """One signal; the command that runs after it."""
        kind = self._chance.choices(("kill", "worker", "term", "twice"), (50, 20, 15, 15))[0]
        if kind == "worker":
            return self._kill_worker(command)
        self.sent += 1
        self.cuts += 1
        if kind == "kill":
            command.kill()
            return self._go_on()
        heard = hears(command.pid)  # an interpreter that starts has no handlers of ours yet
        os.kill(command.pid, signal.SIGTERM if kind == "term" else signal.SIGINT)
        if kind == "twice":
            time.sleep(self._chance.uniform(0.0, 0.1))
            os.kill(command.pid, signal.SIGINT)
        status = command.wait(120)
        assert status == 3 or not heard, command
        return self._go_on()

    def _kill_worker(self, command: Command) -> Command:
        if not (self._scene.out / "run.json").exists() or not (workers := self._scene.workers()):
            return command
        try:
            self._chance.choice(workers).kill()
        except psutil.NoSuchProcess:
            return command
        self.sent += 1
        self.cuts += 1
        return command

    def _go_on(self) -> Command:
        if (self._scene.out / "run.json").exists():
            return self._scene.resume()
        return self._scene.run(*self._scene.agent(), *self._options)

    def _look(self) -> None:
        """Note which instances are settled as a whole, and how often each had been started by then."""
        census = Census(self._scene)
        counts = Counter(name for name, _ in census.outcomes)
        for name, number in counts.items():
            if number == SAMPLES:
                self.settled.setdefault(name, census.starts[name])

    def _turns(self) -> int:
        return len({line for line in lines(self._scene.place / "side") if line.startswith("turn ")})

    def _allow(self, turns: int) -> None:
        """Agents go on until they have so many replies. One write: no reader sees half a number."""
        fd = os.open(self._allowance, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, f"{turns:0{WIDTH}d}".encode())
        os.close(fd)


class Census:
    """What the side file, the model server and the tables say."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._side = [line.split() for line in lines(scene.place / "side")]
        self.starts = Counter(words[1] for words in self._side if words[0] == "start")
        self.outcomes = outcome_keys(scene.out / "ledger.db")

    def check_graded(self, planned: set[tuple[str, int]]) -> None:
        """Each outcome is one of work that was finished and graded, by the side file."""
        ended = {(words[1], words[2]) for words in self._side if words[0] == "end"}
        graded = {(words[1], words[2]) for words in self._side if words[0] == "grade"}
        answers = {
            (row["instance"], row["sample"]): json.loads(row["answer"])
            for row in self._scene.export("attempts")
            if row["kind"] == "passed"
        }
        assert set(answers) == planned
        for (name, _), answer in answers.items():
            assert (name, answer) in ended and (name, answer) in graded
        assert len(set(answers.values())) == len(answers), "two samples have the same last reply"

    def check_replies(self, most_in_flight: int) -> None:
        """Each reply that an agent had is recorded and paid for once, with the server's count of tokens."""
        replies = map(json.loads, lines(self._scene.place / "replies"))
        served = {text: (name, usage) for name, text, usage in replies}
        received = {words[2] for words in self._side if words[0] == "turn"}
        exchanges = self._scene.export("exchanges")
        bought = [row for row in exchanges if row["usage"]["requests"] and text_of(row)]
        texts = Counter(text_of(row) for row in bought)
        assert set(texts.values()) == {1}, "a reply was paid for twice"
        assert received <= set(texts) <= set(served)
        assert len(served) - len(texts) <= most_in_flight, "replies that no record has"
        for row in bought:
            name, usage = served[text_of(row)]
            assert row["instance"] == name
            used = (row["usage"]["input_tokens"], row["usage"]["output_tokens"])
            assert used == (usage["prompt_tokens"], usage["completion_tokens"])


def outcome_keys(database: Path) -> list[tuple[str, int]]:
    if not database.exists():
        return []
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=stretch(30))
    try:
        return connection.execute(
            "SELECT i.name, o.sample FROM outcome o JOIN instance i ON i.id = o.instance"
        ).fetchall()
    except sqlite3.OperationalError as error:
        assert "no such table" in str(error), error  # killed while it was made
        return []
    finally:
        connection.close()


def text_of(row: dict[str, Any]) -> str:
    choices = (row["reply"] or {}).get("choices")
    return str(choices[0]["message"]["content"]) if choices else ""
