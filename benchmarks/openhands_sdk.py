"""Measures conversations of the OpenHands SDK at once: in one worker, and each in a process of its own.

    python benchmarks/openhands_sdk.py [--quick] [--json] [--rows worker] [--python PATH] [--keep DIRECTORY]

All conversations wait for each other after their first request, so that all are there at once. It measures
holdwater and everything that it starts, without the model; it asserts nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import table
from table import Row, at_most, say

from holdwater.testing.scripted_model import ScriptedReply, serve_script

COUNT, FEW = 30, 4
TURNS = 12  # of a conversation: commands, edits, and the end
PYTHON = Path(__file__).parents[1] / ".clients/readers/bin/python"  # has the SDK and what holdwater needs
SOURCE = Path(__file__).parents[1] / "src"
SAMPLE_SECONDS = 1.0
PROMISED = 1200.0  # MB of everything, in one worker
SCENES = {"worker": "in one worker", "processes": "in processes"}
MODEL_FLAG = "--be-the-model"


class PlayedScene(NamedTuple):
    """The figures of one run."""

    passed: int
    memory: float  # MB at most, shared pages counted once
    resident: float  # MB at most, shared pages counted for each process
    ready: float  # seconds until all have sent their first request
    start_cpu: float  # CPU seconds until then
    turns_cpu: float  # CPU seconds from then on
    seconds: float


def main() -> None:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--python", type=Path, default=PYTHON, help="an interpreter with the SDK")
    options = parser.parse_args()
    count = FEW if options.quick else COUNT
    made = nullcontext(str(options.keep)) if options.keep else tempfile.TemporaryDirectory()
    chosen = options.rows.split(",") if options.rows else SCENES
    rows: list[Row] = []
    with made as directory:
        for name in chosen:
            say(f"{count} conversations, {SCENES[name]}")
            words = ("--agent-option", f"python={options.python}") if name == "processes" else ()
            scene = play(Path(directory) / name, options.python, count, words)
            rows += list_rows(SCENES[name], scene, count)
    table.show(
        [*rows, Row("load of the machine at the end", round(os.getloadavg()[0], 1))], json=options.json
    )


def list_rows(name: str, scene: PlayedScene, count: int) -> Iterator[Row]:
    yield Row(f"{name}: passed of {count}", scene.passed)
    what = f"{name}: memory of everything at most"
    if name == SCENES["worker"]:
        yield at_most(what, scene.memory, PROMISED, "MB")
    else:
        yield Row(what, round(scene.memory), "MB")
    yield Row(f"{name}: resident sizes added up", round(scene.resident), "MB")
    yield Row(f"{name}: start of all", round(scene.ready, 1), "s")
    yield Row(f"{name}: CPU of a start", round(scene.start_cpu / count, 2), "s")
    yield Row(f"{name}: CPU of a turn", round(1000 * scene.turns_cpu / count / TURNS), "ms")
    yield Row(f"{name}: whole run", round(scene.seconds, 1), "s")


def play(place: Path, python: Path, count: int, words: tuple[str, ...]) -> PlayedScene:
    place.mkdir(parents=True)
    rows = (
        {"id": f"i{number}", "instruction": f"go {number}", "grade": "test -s b.py"}
        for number in range(count)
    )
    (place / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    used = count_children_cpu()
    with serve_model(place, count) as url:
        command = [str(python), "-m", "holdwater", "run", "tasks.jsonl", "--agent", "openhands-sdk", *words]
        command += ["--model", "test-model", "--base-url", url, "--concurrency", str(count), "--workers", "1"]
        command += ["--retries", "0", "--timeout", "3600", "--out", "run", "--json"]
        began = time.monotonic()
        env = {**os.environ, "PYTHONPATH": str(SOURCE), "OPENAI_API_KEY": "sk-none"}
        with subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.PIPE) as process:
            watch = TreeWatch(process.pid, place / "ready")
            output, _ = process.communicate()
            watch.stop()
        seconds = time.monotonic() - began
        total = count_children_cpu() - used
    passed = json.loads(output)["outcomes"].get("passed", 0)
    ready = watch.ready_at - began
    return PlayedScene(
        passed,
        watch.memory / 1e6,
        watch.resident / 1e6,
        ready,
        watch.start_cpu,
        total - watch.start_cpu,
        seconds,
    )


class TreeWatch:
    """Samples the memory of a process tree, and its CPU time when all conversations are there."""

    def __init__(self, pid: int, ready: Path) -> None:
        self.memory = self.resident = 0
        self.start_cpu = self.ready_at = 0.0
        self._root = psutil.Process(pid)
        self._ready = ready
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            memory = resident = 0
            cpu = 0.0
            for process in list_tree(self._root):
                try:
                    sizes, times = process.memory_full_info(), process.cpu_times()
                except psutil.Error:
                    continue
                memory, resident = memory + sizes.pss, resident + sizes.rss
                cpu += times.user + times.system + times.children_user + times.children_system
            self.memory, self.resident = max(self.memory, memory), max(self.resident, resident)
            if not self.ready_at and self._ready.exists():
                self.ready_at, self.start_cpu = time.monotonic(), cpu


def list_tree(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def count_children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def serve_model(place: Path, count: int) -> Iterator[str]:
    words = [sys.executable, __file__, MODEL_FLAG, str(place / "ready"), str(count)]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


async def be_the_model(ready: Path, count: int) -> None:
    begun, all_there = set[str](), asyncio.Event()

    async def reply(request: dict[str, Any]) -> ScriptedReply:
        number = sum(message["role"] == "tool" for message in request["messages"])
        begun.add(json.dumps(request["messages"][1]))
        if len(begun) == count and not ready.exists():
            ready.touch()
            await asyncio.sleep(3 * SAMPLE_SECONDS)  # for the figures of the start
            all_there.set()
        await all_there.wait()
        return ScriptedReply(tool_calls=[{**choose_call(number), "id": f"call_{number}"}])

    async with serve_script(reply) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def choose_call(number: int) -> dict[str, Any]:
    """Return the call of a turn: an edit, then commands with some output, then the end."""
    if number == TURNS - 1:
        return {"name": "finish", "arguments": {"message": "done"}}
    if number == 0:
        return {"name": "terminal", "arguments": {"command": "pwd; echo 'x = 1' >b.py"}}
    return {"name": "terminal", "arguments": {"command": f"seq 1 200; echo {number} >>b.py"}}


if __name__ == "__main__":
    if MODEL_FLAG in sys.argv:
        asyncio.run(be_the_model(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        main()
