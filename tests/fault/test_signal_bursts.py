"""SIGINT and SIGTERM at every moment of a command: its status is 3, or the run is finished; it resumes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.command_runner import SOURCE, Command, Scene, hears, until
from tests.server_harness import Server, eventually, model
from tests.wait_bounds import stretch

import holdwater as hw

BOTH = (signal.SIGINT, signal.SIGTERM)
BURSTS = ((0.0,), (0.0, 0.0), (0.0, 0.05), tuple(0.002 for _ in range(20)))  # seconds before each signal
COUNT = 6
MOMENTS = [4, pytest.param(40, marks=pytest.mark.proof)]

SUITE = """
import holdwater as hw


def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}")


async def solve(instance, sandbox, model):
    await sandbox.run("sleep 0.05")
    return instance.id


async def grade(instance, sandbox, answer):
    return answer == instance.id


suite = hw.Suite(name="burst", instances=instances, grade=grade)
"""

# Its only command says which signals it ignores, and then takes its time.
DEAF = """
import holdwater as hw


def instances():
    yield hw.Instance(id="i0")


async def solve(instance, sandbox, model):
    found = await sandbox.run("grep SigIgn /proc/self/status")
    open(HERE + "/ignored.new", "w").write(found.stdout)
    __import__("os").rename(HERE + "/ignored.new", HERE + "/ignored")
    await sandbox.run("sleep 3600")


async def grade(instance, sandbox, answer):
    return True


suite = hw.Suite(name="deaf", instances=instances, grade=grade)
"""

# Plays the command once for each moment, and sends both signals in that moment. A moment is a call or a
# return of a function in the modules that deal with signals: between two of them a handler could be missing.
# Each moment is a fork, so that modules are imported once.
EVERY_MOMENT = """
import json, os, signal, sys
from pathlib import Path
from holdwater import cli
from holdwater.api import reading
from holdwater.api import runs as api
from holdwater.cli import foreground_run, runs, show
from holdwater.run.conductor import signals
from holdwater.view import live_display

WATCHED = {cli.__file__, foreground_run.__file__, signals.__file__, signal.__file__}
place, words = Path(sys.argv[1]), sys.argv[2:]


def play(moment):
    seen = 0

    def count(frame, event, argument):
        nonlocal seen
        if frame.f_code.co_filename in WATCHED and signals.CommandSignals.current is not None:
            seen += 1
            if not moment:
                (place / "moments").write_text(str(seen))
            if seen == moment:
                for number in signals.HANDLED:
                    os.kill(os.getpid(), number)

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.argv = ["holdwater", *words, "--out", str(place / str(moment))]
    sys.setprofile(count)
    sys.exit(cli.command())


assert play(0) == 0
moments = int((place / "moments").read_text())
print(json.dumps([play(moment + 1) for moment in range(moments)]), file=open(place / "statuses", "w"))
"""

# The last Python code that an interpreter runs when it exits: its handlers are reset by then.
LAST_MOMENT = """
import os, signal, sys
from holdwater.cli import command

class Last:
    def __del__(self, kill=os.kill, me=os.getpid(), numbers=(signal.SIGINT, signal.SIGTERM)):
        for number in numbers:
            kill(me, number)

last = Last()
sys.exit(command())
"""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    scene.suite(SUITE, COUNT=COUNT)
    yield scene
    scene.close()


def test_no_moment_leaves_a_signal_to_its_default_action(scene: Scene) -> None:
    words = ["run", f"{scene.file}:suite", "--limit", "1", *scene.agent(), "--workers", "0", "--quiet"]

    play(EVERY_MOMENT, str(scene.place), *words)

    statuses = json.loads((scene.place / "statuses").read_text())
    assert len(statuses) > 20
    assert set(statuses) == {0, 3}
    begun = [scene.place / str(n + 1) for n, status in enumerate(statuses) if status == 3]
    for run in [path for path in begun if (path / "run.json").exists()][::5]:
        assert hw.resume(run).outcomes == {"passed": 1}


def test_a_signal_while_the_interpreter_exits_changes_no_status() -> None:
    assert play(LAST_MOMENT, "--version").stdout == f"{hw.__version__}\n"


def play(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `script`, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        timeout=stretch(120),
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert done.returncode == 0, done
    return done


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("number", BOTH, ids=lambda number: number.name)
def test_a_burst_at_any_moment_of_a_run_costs_nothing(scene: Scene, number: int, moments: int) -> None:
    begin = lambda: scene.run(*scene.agent(), "--concurrency", "2", "--workers", "2")  # noqa: E731
    length = measured(scene, begin)
    for moment in range(moments):
        scene.out = scene.place / f"run-{moment}"
        command = begin()
        until("our handlers", lambda: hears(command.pid))  # noqa: B023
        command.live_on(length * moment / moments)

        burst(command.signal, number, BURSTS[moment % len(BURSTS)])

        status = command.wait()
        assert status in (0, 3), command
        created = (scene.out / "run.json").exists()
        again = scene.resume() if created else begin()
        assert again.wait() == 0, again
        audit = hw.audit(scene.out)
        assert (audit.planned, audit.settled, audit.problems) == (COUNT, COUNT, ())
        scene.assert_clean()


def measured(scene: Scene, begin: Callable[[], Command]) -> float:
    """Seconds that a run takes here from the moment when it hears signals."""
    scene.out = scene.place / "measured"
    command = begin()
    until("our handlers", lambda: hears(command.pid))
    began = time.monotonic()
    assert command.wait() == 0, command
    return time.monotonic() - began


def test_an_interrupt_in_code_from_a_string_is_exit_3_too(scene: Scene) -> None:
    scene.suite('exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")')

    command = scene.run(*scene.agent(), "--workers", "0")

    assert command.wait() == 3, command
    assert not scene.out.exists()


@pytest.mark.parametrize("number", BOTH, ids=lambda number: number.name)
def test_a_signal_before_the_first_line_leaves_nothing_half_written(scene: Scene, number: int) -> None:
    scene.interpreter = True  # a fork is past its first line before it hears the signal
    for _ in range(3):
        command = scene.run(*scene.agent(), "--workers", "0")
        command.signal(number)
        command.wait()
        assert not (scene.out / "run.json").exists()

    command = scene.run(*scene.agent(), "--workers", "0")

    assert command.wait() == 0, command
    scene.assert_whole(COUNT)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("number", BOTH, ids=lambda number: number.name)
async def test_a_burst_at_any_moment_of_a_server_costs_nothing(
    tmp_path: Path, number: int, moments: int
) -> None:
    async with model() as upstream:
        serve = Server(tmp_path, "--model", "m", "--base-url", upstream.url, "--workers", "1")
        async with serve.client(patience=stretch(300)) as client:
            began = time.monotonic()
            serve.start()
            try:
                await serve.ready(client)
                length = time.monotonic() - began
                upstream.gate.clear()
                runs = [asyncio.create_task(client.run(f"i{n}", key=f"k{n}")) for n in range(COUNT)]
                await eventually(lambda: upstream.waiting, 30.0)
                for moment in range(moments):
                    burst(serve.process.send_signal, number, BURSTS[moment % len(BURSTS)])
                    assert await asyncio.to_thread(serve.process.wait, stretch(60)) == 3, serve.said
                    serve.start()
                    await eventually(lambda: hears(serve.process.pid), 30.0)
                    await asyncio.sleep(length * moment / moments)
                upstream.gate.set()
                rollouts = [await run for run in runs]
            finally:
                serve.stop()
        audit = hw.audit(serve.out)

    assert {rollout.outcome for rollout in rollouts} == {"passed"}
    assert (audit.planned, audit.settled, audit.lost, audit.duplicated) == (COUNT, COUNT, 0, 0)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_sandboxes_of_a_background_job_ignore_no_signal(tmp_path: Path, workers: str) -> None:
    scene = Scene(tmp_path, before=("sh", "-c", 'trap "" INT QUIT HUP USR1; exec "$@"', "sh"))
    scene.suite(DEAF, HERE=str(tmp_path))
    command = scene.run(*scene.agent(), "--workers", workers, "--grace", "0")
    until("a command in a sandbox", (tmp_path / "ignored").exists)

    command.signal(signal.SIGINT)
    command.signal(signal.SIGTERM)

    assert command.wait() == 3, command
    assert "draining: 1 running attempts" in command.stderr
    ignored = int((tmp_path / "ignored").read_text().split()[1], 16)
    # Signals 32 and 33 belong to libc: no program can set them.
    assert not [number for number in signal.valid_signals() if ignored & 1 << number - 1], hex(ignored)
    scene.close()


def burst(send: Callable[[int], object], number: int, pauses: tuple[float, ...]) -> None:
    """Send a signal after each pause, as long as there is a process."""
    for pause in pauses:
        time.sleep(pause)
        try:
            send(number)
        except ProcessLookupError:
            return
