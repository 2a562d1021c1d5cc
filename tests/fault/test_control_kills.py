"""Kills around the control of a run: of its conductor, workers or a display; requests during its start."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from tests.command_runner import Command, Scene, lines, until

import holdwater as hw
from holdwater.core.control import CONTROL_SOCKET
from holdwater.ledger.reader import LedgerReader

COUNT = 4
REPLY = (
    b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "on"}, "finish_reason": "stop"}]}'
)
SUITE = """
import asyncio
import os
import time
from pathlib import Path

import holdwater as hw

HERE = Path(HERE)


def instances():
    while (HERE / "block").exists():
        time.sleep(0.02)
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}")


def write(name, word):
    fd = os.open(HERE / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{word}\\n".encode())
    os.close(fd)


async def solve(instance, sandbox, model):
    write("trace", instance.id)
    while not (HERE / "finish").exists():
        await asyncio.sleep(0.02)
    return instance.id


async def talk(instance, sandbox, model):
    while not (HERE / "finish").exists():
        write("asked", os.getpid())
        await model.chat([{"role": "user", "content": instance.id}])
        write("got", os.getpid())
        await asyncio.sleep(0.02)
    return instance.id


async def grade(instance, sandbox, answer):
    return answer == instance.id


suite = hw.Suite(name="controlled", instances=instances, grade=grade)
"""


def begin(scene: Scene) -> Command:
    scene.suite(SUITE, HERE=str(scene.place), COUNT=COUNT)
    command = scene.run(*scene.agent(), "--workers", "2", "--concurrency", "2")
    until("two attempts act", lambda: len(lines(scene.place / "trace")) == 2, 90)
    return command


def end(scene: Scene, command: Command) -> None:
    (scene.place / "finish").touch()
    assert command.wait(120) == 0, command
    assert command.document()["outcomes"] == {"passed": COUNT}
    scene.assert_clean()
    scene.assert_whole(COUNT)


def events(scene: Scene, kind: str) -> list[str]:
    with LedgerReader(scene.out) as reader:
        return [event.message for event in reader.events(1000) if event.kind == kind]


def test_a_run_that_is_killed_in_a_pause_resumes_unpaused(scene: Scene) -> None:
    command = begin(scene)
    hw.pause(scene.out)
    command.kill()
    assert (scene.out / CONTROL_SOCKET).is_socket(), "a killed conductor leaves its socket"
    with pytest.raises(hw.BadInput, match="no process conducts the run, it is unfinished"):
        hw.unpause(scene.out)

    resumed = scene.resume()
    until("attempts act again", lambda: len(lines(scene.place / "trace")) == 4, 90)

    assert hw.note(scene.out, "the new conductor answers").changed
    assert hw.show(scene.out).paused is None
    assert "the run was paused when its last conductor ended: it continues unpaused" in resumed.stderr
    assert events(scene, "control.unpause") == [
        "the run was paused when its last conductor ended: it continues unpaused"
    ]
    end(scene, resumed)
    assert not (scene.out / CONTROL_SOCKET).exists()


class CountingModel(BaseHTTPRequestHandler):
    """A model that says one word and counts its calls."""

    calls: ClassVar[list[float]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.calls.append(time.monotonic())
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(REPLY)))
        self.end_headers()
        self.wfile.write(REPLY)

    def log_message(self, *words: object) -> None:
        return


@pytest.fixture
def model() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), CountingModel) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_pause_holds_the_calls_of_all_workers(scene: Scene, model: str) -> None:
    scene.suite(SUITE, HERE=str(scene.place), COUNT=COUNT)
    scene.env = {"OPENAI_API_KEY": "none"}
    words = ("--workers", "2", "--concurrency", "2", "--model", "m", "--base-url", model)
    command = scene.run(*scene.agent("talk"), *words)
    until("both workers call the model", lambda: len(set(lines(scene.place / "asked"))) == 2, 90)

    hw.pause(scene.out)
    asked, got = scene.place / "asked", scene.place / "got"
    until(
        "both calls are held",
        lambda: len(lines(asked)) == len(lines(got)) + 2 == len(CountingModel.calls) + 2,
    )
    calls = len(CountingModel.calls)
    hw.note(scene.out, "they stay held")
    assert len(CountingModel.calls) == calls
    hw.unpause(scene.out)
    until("they go on", lambda: len(CountingModel.calls) > calls + 2)

    end(scene, command)


def test_a_pause_outlives_its_workers_and_displays(scene: Scene) -> None:
    command = begin(scene)
    display = scene.start("top", str(scene.out))
    until("the display is attached", lambda: events(scene, "control.top"))
    hw.pause(scene.out)

    display.kill()
    for worker in scene.workers():
        os.kill(worker.pid, signal.SIGKILL)
    until("the workers are replaced", lambda: len(events(scene, "worker.lost")) == 2, 60)
    until("both attempts wait again", lambda: hw.show(scene.out).verdicts.get("worker") == 2, 60)
    assert len(lines(scene.place / "trace")) == 2, "an attempt started in the pause"
    hw.unpause(scene.out)

    until("they act again", lambda: len(lines(scene.place / "trace")) == 4, 90)
    end(scene, command)


def test_requests_during_the_start_count_from_then_on(scene: Scene) -> None:
    command = begin(scene)
    command.signal(signal.SIGINT)
    command.signal(signal.SIGINT)
    command.wait(60)
    (scene.place / "block").touch()  # the resume compares the suite before it schedules

    resumed = scene.resume()
    until("the conductor listens", lambda: (scene.out / CONTROL_SOCKET).is_socket(), 60)
    assert hw.pause(scene.out).changed
    with pytest.raises(hw.BadInput, match="it is starting or ending"):
        hw.change(scene.out, concurrency=1)
    (scene.place / "block").unlink()
    until("the run is scheduled", lambda: "pause" in scheduled(scene), 60)
    assert len(lines(scene.place / "trace")) == 2, "an attempt started in the pause"
    hw.unpause(scene.out)

    end(scene, resumed)


def scheduled(scene: Scene) -> str:
    gauge = hw.show(scene.out).gauge
    return gauge.binds if gauge is not None else ""


def test_a_stop_during_the_start_is_an_interruption(scene: Scene) -> None:
    command = begin(scene)
    command.signal(signal.SIGINT)
    command.signal(signal.SIGINT)
    command.wait(60)
    (scene.place / "block").touch()
    resumed = scene.resume()
    until("the conductor listens", lambda: (scene.out / CONTROL_SOCKET).is_socket(), 60)

    hw.stop(scene.out)

    assert resumed.wait(60) == 3, resumed
