"""The control of a running run, as its users see it: verbs, states, single instances, settings, displays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, until
from tests.controlled_run import ControlledRun
from tests.forked_command import ForkedCommand, run_forked
from tests.terminal_screen import ESCAPES
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api.control import ControlConnection
from holdwater.api.pruning import PruneOptions, try_prune
from holdwater.client import AsyncClient
from holdwater.core.control import CONTROL_SOCKET

NOBODY = 65534
LISTEN = ("--listen", "127.0.0.1:0", "--out")
VERBS: dict[str, Callable[[Path], Any]] = {
    "top": lambda run: watch(run),
    "pause": hw.pause,
    "unpause": hw.unpause,
    "stop": hw.stop,
    "set": lambda run: hw.change(run, concurrency=3),
    "cancel": lambda run: hw.cancel(run, "i0"),
    "retry": lambda run: hw.retry(run, "i0"),
    "note": lambda run: hw.note(run, "hello"),
}


def watch(run: Path) -> None:
    with ControlConnection(run) as connection:
        connection.summary()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ControlledRun]:
    with ControlledRun(tmp_path / "run") as run:
        run.wait_started(2)
        yield run


# The whole run.


def test_a_pause_holds_calls_and_starts_no_attempt(run: ControlledRun) -> None:
    run.wait_called()
    run.replies.clear()  # two calls are in flight during the pause, and finish
    until("both attempts wait for the model", lambda: len(run.calls) == run.answered + 2)
    in_flight = len(run.calls)

    reply = hw.pause(run.out)
    run.replies.set()
    until("both attempts call again", lambda: run.asked == in_flight + 2)
    run.finish("i0", "i1")
    summary = hw.show(run.out)
    again = hw.pause(run.out)
    assert len(run.calls) == in_flight, "a call reached the model during the pause"
    hw.unpause(run.out)
    run.wait_called(in_flight)
    run.wait_started(4)

    assert (reply.changed, again.changed) == (True, False)
    assert summary.paused is not None
    assert summary.paused.by == f"by user `root` (uid {os.getuid()}, pid {os.getpid()})"
    assert run.join().outcomes == {"passed": 4}
    assert run.verbs() == {"pause": 1, "unpause": 1}
    assert hw.show(run.out).paused is None
    assert hw.audit(run.out).ok


def test_nothing_starts_during_a_pause(tmp_path: Path) -> None:
    with ControlledRun(tmp_path / "run", concurrency=1) as run:
        run.wait_started(1)
        run.finish("i0")
        hw.pause(run.out)
        until("the display says so", lambda: hw.show(run.out).gauge.binds == "pause")  # type: ignore[union-attr]
        held = run.asked - len(run.calls)
        started = list(run.started)
        hw.note(run.out, "a request later")
        assert run.started == started

        hw.unpause(run.out)
        run.wait_started(2)

        assert held in (0, 1)
        assert run.join().outcomes == {"passed": 4}


def test_the_clocks_of_attempts_and_of_the_run_stop_in_a_pause(tmp_path: Path) -> None:
    limit = stretch(0.5)
    with ControlledRun(tmp_path / "run", count=1, timeout=limit, run_time=4 * limit) as run:
        run.wait_started(1)
        hw.pause(run.out)
        paused = time.monotonic()
        until("the limit has passed", lambda: time.monotonic() > paused + 1.2 * limit, 2 * limit)
        hw.unpause(run.out)
        summary = run.join()

        outcome = run.outcome("i0")
        assert summary.outcomes == {"passed": 1}
        assert outcome is not None
        assert outcome.times.acting < limit
        assert summary.seconds < time.time() - summary.started - limit


def test_a_stopped_pause_lets_running_attempts_finish(run: ControlledRun) -> None:
    hw.pause(run.out)
    reply = hw.stop(run.out)
    summary = run.join()

    assert "2 running attempts get 20 s" in reply.done
    assert (summary.state, summary.outcomes) == ("interrupted", {"passed": 2})
    assert run.verbs() == {"pause": 1, "stop": 1, "unpause": 1}


def test_the_second_stop_ends_the_run_at_once(run: ControlledRun) -> None:
    hw.stop(run.out)
    reply = hw.stop(run.out)
    until("it ends", lambda: run.summary is not None)

    assert reply.done == "the run ends at once"
    assert run.summary is not None
    assert run.summary.state == "interrupted"


def test_settings_change_for_the_run_and_its_record(run: ControlledRun) -> None:
    reply = hw.change(run.out, concurrency=3, retries=5)
    run.wait_started(3)
    hw.change(run.out, concurrency=1)
    run.finish("i0", "i1")
    run.wait_outcome("i0")
    run.wait_outcome("i1")

    assert reply.done == "`--concurrency`: 3, before: 2; `--retries`: 5, before: 2"
    assert len(run.started) == 3, "one attempt is running, and no more may"
    record = json.loads((run.out / "run.json").read_text())
    assert (record["concurrency"], record["retries"]) == (1, 5)
    assert not hw.change(run.out, concurrency=1).changed
    assert run.join().outcomes == {"passed": 4}
    changes = [event.message.partition(": ")[2] for event in run.events("control.set")]
    assert changes == [
        "`--concurrency`: 3, before: 2",
        "`--retries`: 5, before: 2",
        "`--concurrency`: 1, before: 3",
    ]


def test_a_smaller_budget_stops_the_run(run: ControlledRun) -> None:
    run.wait_called()
    hw.change(run.out, **{"run-requests": 1})
    until("it stops", lambda: run.summary is not None)

    assert run.summary is not None
    assert run.summary.reason.startswith("the run's budget is used up")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurency": 3}, "unknown setting: `concurency`"),
        ({"concurrency": "many"}, "`--concurrency` must be a number or `auto`: `many`"),
        ({"concurrency": 0}, "`--concurrency` must be at least 1: 0"),
        ({"retries": "nan"}, "`--retries` must be a number: `nan`"),
        ({"run-cost": "inf"}, "`--run-cost` must be a number: `inf`"),
        ({"memory": "lots"}, "invalid size for `--memory`: `lots`"),
        ({"workers": 4}, "a running run cannot change `workers`"),
        ({}, "no setting was given"),
    ],
)
def test_wrong_settings_change_nothing(
    wrong_settings_run: ControlledRun, settings: dict[str, Any], message: str
) -> None:
    before = (wrong_settings_run.out / "run.json").read_bytes()

    with pytest.raises(hw.BadInput) as raised:
        hw.change(wrong_settings_run.out, **({"attempts": 2} if settings else {}), **settings)

    assert raised.value.message == message
    assert (wrong_settings_run.out / "run.json").read_bytes() == before


@pytest.fixture(scope="module")
def wrong_settings_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledRun]:
    with ControlledRun(tmp_path_factory.mktemp("settings") / "run", count=1) as run:
        run.wait_started(1)
        yield run


# Single instances.


def test_a_cancelled_instance_has_no_score_and_keeps_its_work(run: ControlledRun) -> None:
    hw.cancel(run.out, "i0")
    running = run.wait_outcome("i0")
    hw.pause(run.out)  # `i3` waits for a slot
    hw.cancel(run.out, "i3")
    queued = run.wait_outcome("i3")
    hw.unpause(run.out)
    summary = run.join()

    assert (running.kind, running.score, running.attempts) == ("cancelled", None, 1)
    assert (queued.kind, queued.score, queued.attempts) == ("cancelled", None, 1)
    [attempt] = run.attempts("i0")
    assert attempt.verdict is not None
    assert attempt.verdict.salvage is not None
    assert "i3" not in run.started
    assert (summary.outcomes, summary.score, summary.exit_status) == ({"cancelled": 2, "passed": 2}, 1.0, 0)
    assert hw.audit(run.out).ok
    with pytest.raises(hw.BadInput, match="the run has finished"):
        hw.cancel(run.out, "i1")


def test_a_settled_instance_gets_another_round(run: ControlledRun) -> None:
    hw.change(run.out, concurrency=4)  # a slot is free for it
    run.fails.add("i0")
    run.finish("i0")
    assert run.wait_outcome("i0").kind == "failed"
    run.fails.clear()

    reply = hw.retry(run.out, "i0")
    until("it passes", lambda: (found := run.outcome("i0")) and found.kind == "passed")
    hw.retry(run.out, "i0")
    until("it is tried once more", lambda: run.started.count("i0") == 3)
    summary = run.join()

    assert reply.done == "tried again in another round: `i0`"
    assert [(row.number, row.round) for row in run.attempts("i0")] == [(1, 1), (2, 2), (3, 3)]
    assert summary.outcomes == {"passed": 4}
    assert hw.audit(run.out).ok


def test_a_running_instance_is_tried_again(run: ControlledRun) -> None:
    hw.retry(run.out, "i0")
    until("it starts again", lambda: run.started.count("i0") == 2)
    summary = run.join()

    assert [(row.round, row.kind) for row in run.attempts("i0")] == [(1, "interrupted"), (2, "passed")]
    assert summary.outcomes == {"passed": 4}
    assert hw.audit(run.out).ok


def test_a_retried_sample_leaves_pass_at_k_right(tmp_path: Path) -> None:
    with ControlledRun(tmp_path / "run", count=2, samples=2, concurrency=5) as run:
        run.wait_started(2)
        run.fails.add("i0")
        run.finish("i0")
        until("both samples failed", lambda: run.outcome("i0", 0) and run.outcome("i0", 1))
        run.fails.clear()
        hw.retry(run.out, "i0", sample=1)
        until("one is tried again", lambda: (found := run.outcome("i0", 1)) and found.kind == "passed")
        with pytest.raises(hw.BadInput, match="`--sample` must be from 0 to 1: 2"):
            hw.retry(run.out, "i0", sample=2)
        summary = run.join()

        assert summary.outcomes == {"passed": 3, "failed": 1}
        assert [rate.value for rate in summary.pass_at] == [0.75, 1.0]
        assert hw.audit(run.out).ok


def test_a_queued_instance_waits_for_its_turn(run: ControlledRun) -> None:
    reply = hw.retry(run.out, "i3")

    assert (reply.done, reply.changed) == ("`i3` waits for its turn", False)
    with pytest.raises(hw.BadInput, match="no such instance in the run so far: `i9`"):
        hw.retry(run.out, "i9")


def test_an_instance_is_cancelled_before_a_resume_comes_to_it(tmp_path: Path) -> None:
    with ControlledRun(tmp_path / "run", count=12, concurrency=8) as run:
        run.wait_started(8)
    with ControlledRun(tmp_path / "run", count=12, concurrency=1, resumes=True) as resumed:
        resumed.wait_started(1)
        hw.cancel(resumed.out, "i11")
        outcome = resumed.wait_outcome("i11")
        summary = resumed.join()

    assert outcome.kind == "cancelled"
    assert "i11" not in resumed.started
    assert summary.outcomes == {"cancelled": 1, "passed": 11}
    assert hw.audit(resumed.out).ok


def test_members_of_a_group_are_cancelled_and_tried_again(tmp_path: Path) -> None:
    def group(instance: hw.Instance, members: Any) -> list[hw.Grade]:
        return [hw.Grade(passed=True, score=float(len(members)))] * len(members)

    run = ControlledRun(tmp_path / "run", count=2, samples=2, concurrency=4)
    run.group = group
    with run:
        run.wait_started(4)
        hw.cancel(run.out, "i0", sample=1)
        until("one is cancelled", lambda: run.outcome("i0", 1))
        with pytest.raises(hw.BadInput, match="the other samples of `i0` are still running"):
            hw.retry(run.out, "i0", sample=1)
        run.finish("i0")
        until("the rest of the group is scored", lambda: run.outcome("i0", 0))
        hw.retry(run.out, "i0", sample=1)
        hw.retry(run.out, "i1")
        summary = run.join()

        assert summary.outcomes == {"passed": 4}
        assert [run.outcome("i1", sample).score for sample in (0, 1)] == [2.0, 2.0]  # type: ignore[union-attr]
        assert hw.audit(run.out).ok


# Every verb in every state.


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_works_on_a_finished_or_a_dead_run(ended_runs: dict[str, Path], verb: str) -> None:
    for state, words in (("finished", "the run has finished"), ("dead", "it is unfinished")):
        with pytest.raises(hw.BadInput, match=words) as raised:
            VERBS[verb](ended_runs[state])
        assert f"`holdwater resume {ended_runs[state]}" in raised.value.hint
        assert raised.value.exit_status == 2


@pytest.fixture(scope="module")
def ended_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A run that has finished, and a copy of a running one, with the socket that a dead conductor leaves."""
    place = tmp_path_factory.mktemp("ended")
    with ControlledRun(place / "run", count=2) as run:
        run.wait_started(2)
        subprocess.run(["cp", "-a", run.out, place / "copy"], check=True)
        assert (place / "copy" / CONTROL_SOCKET).is_socket()
        run.join()
    yield {"finished": run.out, "dead": place / "copy"}


def test_no_other_command_minds_a_socket_that_is_left(ended_runs: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", ended_runs["dead"], copy], check=True)
    archive = tmp_path / "copy.tar"

    subprocess.run(["tar", "-C", tmp_path, "-cf", archive, "copy"], check=True, stderr=subprocess.DEVNULL)
    assert (copy / CONTROL_SOCKET).is_socket()
    assert hw.audit(copy).sound
    with (tmp_path / "attempts.jsonl").open("wb") as out:
        hw.export(copy, out, what="attempts")
    pruned = try_prune(copy, PruneOptions(remove=True, unfinished=True), True, lambda line: None)

    assert (pruned.problem, pruned.left) == ("", "")
    assert not copy.exists()


@pytest.mark.parametrize("state", ["paused", "draining"])
def test_verbs_in_a_paused_and_a_draining_run(tmp_path: Path, state: str) -> None:
    with ControlledRun(tmp_path / "run") as run:
        run.wait_started(2)
        (hw.pause if state == "paused" else hw.stop)(run.out)

        answers = {verb: answer(VERBS[verb], run.out) for verb in VERBS if verb != "stop"}

        refused = "the run is stopping: it starts no further attempt"
        assert answers == {
            "top": "",
            "pause": "the run is paused already" if state == "paused" else refused,
            "unpause": "the run continues" if state == "paused" else "the run is not paused",
            "set": "`--concurrency`: 3, before: 2",
            "cancel": "cancelled: `i0`",
            "retry": answers["retry"] if state == "paused" else refused,
            "note": "the note is in the ledger",
        }
        summary = run.join()
        assert summary.state == ("finished" if state == "paused" else "interrupted")
        assert summary.outcomes["cancelled"] == 1 or state == "paused"


def answer(call: Callable[[Path], Any], run: Path) -> str:
    try:
        return getattr(call(run), "done", "")
    except hw.BadInput as error:
        return error.message


def test_clients_at_once_are_served_one_after_the_other(run: ControlledRun) -> None:
    calls = [hw.pause, hw.unpause, lambda path: hw.note(path, "a note")] * 8

    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(lambda call: call(run.out), calls))

    changed = sum(reply.changed for reply in replies)
    hw.unpause(run.out)
    counts = run.verbs()
    assert counts["note"] == 8
    assert changed - 8 <= counts["pause"] + counts["unpause"] <= changed - 8 + 1
    assert abs(counts["pause"] - counts["unpause"]) <= 1
    assert run.join().outcomes == {"passed": 4}


# The command.


def test_the_commands_print_what_was_done(run: ControlledRun) -> None:
    path = str(run.out)

    paused = run_forked("pause", path, "--json")
    noted = run_forked("note", path, "a \x1b[31mred\x1b[0m note")
    shown = run_forked("show", path)
    changed = run_forked("set", path, "concurrency=3", "--json")
    wrong = run_forked("set", path, "concurrency")
    line = run_forked("top", path, "--json")
    unpaused = run_forked("unpause", path)

    assert (paused.returncode, json.loads(paused.stdout)["verb"]) == (0, "pause")
    assert noted.stdout == "the note is in the ledger\n"
    assert "running, paused" in shown.stdout
    assert "a red note" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert f"next: holdwater unpause {path}" in shown.stdout
    assert json.loads(changed.stdout)["done"] == "`--concurrency`: 3, before: 2"
    assert (wrong.returncode, "must look like `concurrency=40`" in wrong.stderr) == (2, True)
    assert json.loads(line.stdout)["paused"]["by"].startswith("by user ")
    assert unpaused.stdout == "the run continues\n"


# Displays.


class Display:
    """`holdwater top` in a terminal of its own."""

    def __init__(self, run: Path) -> None:
        self.screen, terminal = os.openpty()
        env = {**os.environ, "TERM": "xterm"}
        self.command = ForkedCommand(("top", str(run)), terminal, terminal, stdin=terminal, env=env)
        os.close(terminal)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self.screen, 65536)
            except OSError:  # the command has ended
                return
            self.text += ESCAPES.sub("", piece.decode(errors="replace"))

    def wait_shown(self, words: str) -> None:
        until(f"`{words}` is shown", lambda: words in self.text, 60)

    def close(self) -> None:
        self.command.kill()
        self.command.wait()
        self._reader.join()
        os.close(self.screen)


def test_displays_come_and_go_without_touching_the_run(run: ControlledRun) -> None:
    first, second, third = displays = [Display(run.out) for _ in range(3)]
    try:
        for display in displays:
            display.wait_shown("running")
        hw.pause(run.out)
        first.wait_shown("paused")
        os.write(first.screen, b"q")
        second.command.send_signal(signal.SIGINT)

        assert first.command.wait(stretch(20)) == 0
        assert second.command.wait(stretch(20)) == 0
        hw.unpause(run.out)
        assert run.join().outcomes == {"passed": 4}
        third.wait_shown("the run has finished")
        assert third.command.wait(stretch(20)) == 0
        assert run.verbs()["top"] == 3
    finally:
        for display in displays:
            display.close()


def test_a_suspended_display_slows_nothing(run: ControlledRun) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        folder = os.open(run.out, os.O_RDONLY)
        client.connect(f"/proc/self/fd/{folder}/{CONTROL_SOCKET}")
        os.close(folder)
        client.sendall(b'{"verb": "top"}\n')  # and it never reads the reply
        hw.note(run.out, "still served")

        assert run.join().outcomes == {"passed": 4}


# The socket.


def test_only_the_user_of_the_run_and_root_may_control_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        with ControlledRun(Path(place, "run"), count=1) as run:
            run.wait_started(1)
            assert stat.S_IMODE((run.out / CONTROL_SOCKET).stat().st_mode) == 0o600

            closed = as_nobody(lambda: answer(hw.pause, run.out))
            run.out.chmod(0o755)
            (run.out / CONTROL_SOCKET).chmod(0o666)
            opened = as_nobody(lambda: answer(hw.pause, run.out))

            assert closed == f"the run belongs to user `root`: `{run.out}`"
            assert opened == "another user may not control this run: user `nobody`"
            assert hw.show(run.out).paused is None
            assert run.join().outcomes == {"passed": 1}
            assert not run.verbs()


def as_nobody(call: Callable[[], str]) -> str:
    """Return the result of a call that another user makes in a process of its own."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(theirs, call().encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as result:
        said = result.read().decode()
    os.waitpid(child, 0)
    return said


def test_a_path_that_is_too_long_for_a_socket_works(tmp_path: Path) -> None:
    with ControlledRun(tmp_path / ("d" * 120) / "run", count=1) as run:
        run.wait_started(1)

        assert hw.pause(run.out).changed
        assert hw.unpause(run.out).changed
        run.join()
        assert not (run.out / CONTROL_SOCKET).exists()


@pytest.mark.parametrize(
    "line", [b"not json\n", b'{"verb": "explode"}\n', b"\n", b"x" * (1 << 21) + b"\n"], ids=range(4)
)
def test_a_line_that_is_no_request_is_refused(wrong_settings_run: ControlledRun, line: bytes) -> None:
    with ControlConnection(wrong_settings_run.out) as connection:
        try:
            connection._socket.sendall(line)
        except (BrokenPipeError, ConnectionResetError):
            return  # it was refused before its end
        assert b"the request is invalid" in connection._read_line()


# A server.


async def test_a_server_can_be_paused_and_its_rollouts_belong_to_clients(tmp_path: Path) -> None:
    scene = Scene(tmp_path, env={"HOLDWATER_SERVE_KEYS": "secret"})
    command = scene.start("serve", "demo", "--agent", "oracle", "--workers", "1", *LISTEN, str(scene.out))
    try:
        until("the server listens", lambda: "serving: " in command.stderr, 60)
        address = command.stderr.partition("serving: ")[2].split()[0]
        async with AsyncClient(address, "secret") as client:
            hw.pause(scene.out)
            ordered = asyncio.create_task(client.run(hw.Instance(id="own")))
            while not (await client.stats()).orders.get("open"):
                await asyncio.sleep(0.02)
            health = await client.health()
            hw.note(scene.out, "orders are accepted and wait")
            attempts = hw.show(scene.out).attempts
            refused = [answer(VERBS[verb], scene.out) for verb in ("cancel", "retry")]
            hw.change(scene.out, concurrency=2)
            hw.unpause(scene.out)
            rollout = await asyncio.wait_for(ordered, stretch(60))

        assert (health.reason, attempts) == ("the run is paused", 0)
        assert refused == ["the rollouts of a server belong to its clients"] * 2
        assert rollout.attempt is not None
        watch(scene.out)
        hw.stop(scene.out)
        assert command.wait(60) == 3, command
    finally:
        scene.close()
