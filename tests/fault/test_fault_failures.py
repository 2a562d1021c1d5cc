"""The failure table, row by row, each produced for real: outcome, attempts, resources, score, exit status."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, until
from tests.in_process_run import QUICK, attempts, kinds, numbered, outcomes, play, solve, suite, whole
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.records import FailureOrigin
from holdwater.core.summary import RunSummary
from holdwater.sandbox.probe import probe
from holdwater.testing.scripted_model import ReplyFault, Script, ScriptedReply, apply_plan, serve_script

ONE = {"instances": numbered(1)}
Agent = Callable[..., Any]


def failures(out: Path) -> list[tuple[str, str]]:
    """Where and how each attempt at `i0` failed; an empty place for one that did not."""
    verdicts = [row.verdict for row in attempts(out, "i0")]
    return [(str(v.failure.where), v.failure.kind) if v and v.failure else ("", "") for v in verdicts]


def end(out: Path) -> tuple[str, float | None]:
    """What became of `i0`, and its score."""
    row = outcomes(out)["i0"]
    return row.kind, row.score


# agent: tried again by `--attempts`, scored on what it left, exit 0


def test_agent_that_raises(tmp_path: Path) -> None:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        raise RuntimeError("no idea")

    summary = play(tmp_path / "run", suite(**ONE), agent)

    assert failures(tmp_path / "run") == [("agent", "exception")]
    assert (end(tmp_path / "run"), summary.exit_status) == (("failed", 0.0), 0)


def test_agent_that_exits_with_a_status(tmp_path: Path) -> None:
    agent = "command:sh -c 'echo -n i0 > made.txt; echo why >&2; exit 3'"

    summary = play(tmp_path / "run", suite(**ONE), agent)

    assert failures(tmp_path / "run") == [("agent", "exit")]
    assert (end(tmp_path / "run"), summary.exit_status) == (("passed", 1.0), 0)
    assert outcomes(tmp_path / "run")["i0"].failure == "`sh` ended with status 3: why"


def test_an_errored_attempt_with_salvaged_work_is_graded_and_kept(tmp_path: Path) -> None:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        await solve(instance, sandbox, model)
        raise RuntimeError("after the work was done")

    play(tmp_path / "run", suite(**ONE), agent, attempts=3)

    [only] = attempts(tmp_path / "run")
    assert only.verdict is not None and only.verdict.salvage is not None
    assert (tmp_path / "run" / "artifacts" / only.verdict.salvage.name).stat().st_size > 0
    assert (end(tmp_path / "run"), only.verdict.salvage.files) == (("passed", 1.0), 1)


def test_failed_then_crashed_then_tried_again(tmp_path: Path) -> None:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: Any) -> None:
        if model.seed % 1000 == 1:
            return
        if model.seed % 1000 == 2:
            raise RuntimeError("in the second attempt")
        await solve(instance, sandbox, model)

    summary = play(tmp_path / "run", suite(), agent, attempts=3)

    assert failures(tmp_path / "run") == [("", ""), ("agent", "exception"), ("", "")]
    assert [row.round for row in attempts(tmp_path / "run", "i0")] == [1, 2, 3]
    assert set(kinds(tmp_path / "run").values()) == {"passed"}
    assert summary.exit_status == 0


# limit: as an agent's failure


def test_acting_time(tmp_path: Path) -> None:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        if model.seed % 1000 == 2:  # type: ignore[attr-defined]
            await solve(instance, sandbox, model)
        await sandbox.run("sleep 600")

    summary = play(tmp_path / "run", suite(**ONE), agent, timeout=stretch(0.5), attempts=2)

    assert failures(tmp_path / "run") == [("limit", "timeout")] * 2
    assert (end(tmp_path / "run"), summary.exit_status) == (("passed", 1.0), 0), "on what it left"


# resource: `--retries`, with 2x, 4x; a zero only when they are spent


def greedy(megabytes: int) -> Agent:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        code = f"x = bytearray({megabytes} << 20); open('made.txt', 'w').write('i0')"
        await sandbox.run(["python3", "-c", code])

    return agent


needs_cgroup = pytest.mark.skipif(
    not probe().cgroup.usable and not os.environ.get("CI"), reason="no control group can be made here"
)


@needs_cgroup
def test_sandbox_memory_that_a_retry_has(tmp_path: Path) -> None:
    summary = play(tmp_path / "run", suite(**ONE), greedy(60), sandbox_memory="40MiB", retries=3)

    assert failures(tmp_path / "run") == [("resource", "memory"), ("", "")]
    assert [row.scale for row in attempts(tmp_path / "run")] == [1, 2]
    assert [row.round for row in attempts(tmp_path / "run")] == [1, 1]
    assert (end(tmp_path / "run"), summary.exit_status) == (("passed", 1.0), 0)


@needs_cgroup
def test_sandbox_memory_that_no_retry_has(tmp_path: Path) -> None:
    summary = play(tmp_path / "run", suite(**ONE), greedy(600), sandbox_memory="32MiB", retries=2)

    assert failures(tmp_path / "run") == [("resource", "memory")] * 4
    assert [row.scale for row in attempts(tmp_path / "run")] == [1, 2, 4, 8]
    assert (end(tmp_path / "run"), summary.exit_status) == (("failed", 0.0), 1)


# model: `--retries`; never scored


async def talk(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
    await solve(instance, sandbox, model)  # what is left would pass: a model's failure is not scored
    await model.chat([{"role": "user", "content": "hello"}])


def converse(out: Path, script: Script, agent: Agent = talk, **options: Any) -> RunSummary:
    async def conduct() -> RunSummary:
        async with serve_script(script) as url:
            asked = {**QUICK, "model": "m", "base_url": url, **options}
            return await hw.arun(suite(**ONE), agent, out=out, **asked)

    return asyncio.run(conduct())


def always(**reply: Any) -> Script:
    return lambda request: ScriptedReply(**reply)


HURRY = {"Retry-After": "0"}


@pytest.mark.parametrize(("status", "kind"), [(429, "429"), (500, "5xx"), (529, "5xx")])
def test_model_that_always_fails(tmp_path: Path, status: int, kind: str) -> None:
    summary = converse(tmp_path / "run", always(status=status, headers=HURRY))

    assert failures(tmp_path / "run") == [("model", kind)] * 3
    assert (end(tmp_path / "run"), summary.exit_status) == (("model", None), 1)


def test_model_that_recovers(tmp_path: Path) -> None:
    # five answers: the call and the gateway's own four tries; then the attempt is tried again
    script = apply_plan([ScriptedReply(status=503, headers=HURRY)] * 5, always(text="hello"))

    summary = converse(tmp_path / "run", script)

    assert failures(tmp_path / "run") == [("model", "5xx"), ("", "")]
    assert (end(tmp_path / "run"), summary.exit_status) == (("passed", 1.0), 0)


def test_model_that_stalls(tmp_path: Path) -> None:
    summary = converse(tmp_path / "run", always(fault=ReplyFault.STALL), stall=0.3)

    assert failures(tmp_path / "run") == [("model", "stall")] * 3
    assert (end(tmp_path / "run"), summary.exit_status) == (("model", None), 1)


def test_model_whose_failure_the_agent_hides(tmp_path: Path) -> None:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        try:
            await model.chat([{"role": "user", "content": "hello"}])
        except hw.HoldwaterError:
            return

    summary = converse(tmp_path / "run", always(status=500, headers=HURRY), agent)

    assert (end(tmp_path / "run"), summary.exit_status) == (("model", None), 1), "never a zero for the agent"


def test_model_that_refuses_the_request(tmp_path: Path) -> None:
    summary = converse(tmp_path / "run", always(status=400, text="too long"))

    assert failures(tmp_path / "run") == [("model", "invalid")], "not tried again"
    assert (end(tmp_path / "run"), summary.exit_status) == (("model", None), 1)


# sandbox, grade: `--retries`; a pass counts, never a zero


def test_sandbox_that_cannot_start(tmp_path: Path) -> None:
    def instances() -> Iterator[hw.Instance]:
        (place,) = (tmp_path / "scratch").iterdir()
        place.rename(tmp_path / "aside")
        place.touch()  # no sandbox can be made below a file
        yield hw.Instance(id="i0", files={"given.txt": "content"})

    summary = play(tmp_path / "run", suite(instances=instances), scratch=str(tmp_path / "scratch"))

    assert [where for where, _ in failures(tmp_path / "run")] == ["sandbox"] * 3
    assert (end(tmp_path / "run"), summary.exit_status) == (("sandbox", None), 1)


def test_sandbox_whose_set_up_fails(tmp_path: Path) -> None:
    def instances() -> Iterator[hw.Instance]:
        yield hw.Instance(id="i0", setup="echo broken >&2; exit 4")

    summary = play(tmp_path / "run", suite(instances=instances), retries=1)

    assert failures(tmp_path / "run") == [("sandbox", "setup")] * 2
    assert (end(tmp_path / "run"), summary.exit_status) == (("sandbox", None), 1)


def test_sandbox_that_fails_after_the_work_was_done(tmp_path: Path) -> None:
    async def agent(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        await solve(instance, sandbox, model)
        raise hw.SandboxFailed("gone")

    summary = play(tmp_path / "run", suite(**ONE), agent)

    assert failures(tmp_path / "run") == [("sandbox", "sandbox")], "a pass counts, so no try follows"
    assert (end(tmp_path / "run"), summary.exit_status) == (("passed", 1.0), 0)


@pytest.mark.parametrize("result", ["yes", None, float("nan")])
def test_grade_that_is_unreadable(tmp_path: Path, result: Any) -> None:
    summary = play(tmp_path / "run", suite(**ONE, grade=lambda instance, sandbox, answer: result))

    assert failures(tmp_path / "run") == [("grade", "type")] * 3
    assert (end(tmp_path / "run"), summary.exit_status) == (("grade", None), 1)


# worker: without blame; poison is not tried again

DEADLY = """
import os
import signal
from pathlib import Path

import holdwater as hw


def instances():
    for n in range(4):
        yield hw.Instance(id=f"i{n}")


def grade(instance, sandbox, answer):
    return answer == instance.id


def solve(instance, sandbox, model):
    tries = Path(__file__).with_name(f"tries-{instance.id}")
    with tries.open("a") as file:
        file.write("x")
    if instance.id == "i0" and tries.stat().st_size <= DEATHS:
        os.kill(os.getpid(), signal.SIGNAL)
    return instance.id


suite = hw.Suite(name="deadly", instances=instances, grade=grade)
"""


def die(tmp_path: Path, deaths: int, signal: str = "SIGSEGV") -> RunSummary:
    file = tmp_path / "deadly.py"
    file.write_text(DEADLY.replace("DEATHS", str(deaths)).replace("SIGNAL", signal))
    options = {**QUICK, "workers": 1, "concurrency": 1, "retries": 0}
    return hw.run(f"{file}:suite", f"{file}:solve", out=tmp_path / "run", **options)


def test_worker_that_died(tmp_path: Path) -> None:
    summary = die(tmp_path, deaths=1)

    assert failures(tmp_path / "run") == [("worker", "lost"), ("", "")]
    assert kinds(tmp_path / "run") == dict.fromkeys(["i0", "i1", "i2", "i3"], "passed")
    assert summary.exit_status == 0
    whole(tmp_path / "run")


def test_poison(tmp_path: Path) -> None:
    summary = die(tmp_path, deaths=100)

    reasons = ["lost", "lost", "crashed", "poison"]
    assert failures(tmp_path / "run") == [("worker", reason) for reason in reasons]
    assert [row.alone for row in attempts(tmp_path / "run", "i0")] == [False, False, True, True]
    assert kinds(tmp_path / "run") == {"i0": "worker", **dict.fromkeys(["i1", "i2", "i3"], "passed")}
    assert (end(tmp_path / "run"), summary.exit_status) == (("worker", None), 1)
    whole(tmp_path / "run")


@pytest.mark.parametrize(("deaths", "kind"), [(4, "passed"), (100, "worker")])
def test_poison_has_one_more_chance(tmp_path: Path, deaths: int, kind: str) -> None:
    die(tmp_path, deaths)

    summary = hw.resume(tmp_path / "run", retry_poison=True)

    rows = attempts(tmp_path / "run", "i0")
    assert [row.alone for row in rows] == [False, False, True, True, True]
    assert kinds(tmp_path / "run")["i0"] == kind
    assert summary.exit_status == (0 if kind == "passed" else 1)
    whole(tmp_path / "run")


# interrupted: always tried again, exit 3

SLOW = """
import asyncio
from pathlib import Path

import holdwater as hw

BEGUN = Path(__file__).with_name("begun")


def instances():
    yield hw.Instance(id="i0")


def grade(instance, sandbox, answer):
    return True


async def solve(instance, sandbox, model):
    first = not BEGUN.exists()
    BEGUN.touch()
    await asyncio.sleep(600 if first else 0)


suite = hw.Suite(name="slow", instances=instances, grade=grade)
"""


def test_interrupted(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.suite(SLOW)
    command = scene.run(*scene.agent(), "--retries", "0", "--grace", "0.1", "--workers", "1")
    try:
        until("the agent has begun", (tmp_path / "begun").exists)
        command.signal(signal.SIGINT)

        assert command.wait(60) == 3, command
        assert (failures(scene.out), kinds(scene.out)) == ([("interrupted", "interrupted")], {})
        resumed = scene.resume()
        assert resumed.wait(60) == 0, resumed
        assert failures(scene.out) == [("interrupted", "interrupted"), ("", "")]
        assert end(scene.out) == ("passed", 1.0)
    finally:
        scene.close()


# run: stops early, exit 4, and what was not tried can be resumed


@pytest.mark.parametrize(
    ("reply", "kind", "hint"),
    [
        ({"status": 401, "text": "bad key"}, "key", "check the upstream's API key"),
        ({"status": 404, "text": "no such model"}, "model", "check the model's name"),
    ],
)
def test_upstream_that_will_fail_for_all(tmp_path: Path, reply: Any, kind: str, hint: str) -> None:
    async def conduct() -> RunSummary:
        async with serve_script(always(**reply)) as url:
            asked = {**QUICK, "concurrency": 1, "model": "m", "base_url": url}
            return await hw.arun(suite(), talk, out=tmp_path / "run", **asked)

    summary = asyncio.run(conduct())

    assert failures(tmp_path / "run") == [("run", kind)]
    assert (summary.state, summary.exit_status, summary.outcomes) == ("stopped", 4, {})
    assert len(attempts(tmp_path / "run")) == 1, "the others are not even tried"
    assert str(reply["text"]) in summary.reason and hint in summary.reason


def test_upstream_that_is_mended(tmp_path: Path) -> None:
    """What a run's failure stopped is tried again on resume, without blame."""

    async def conduct() -> RunSummary:
        async with serve_script(apply_plan([ScriptedReply(status=401)], always(text="hello"))) as url:
            asked = {**QUICK, "concurrency": 1, "model": "m", "base_url": url, "retries": 0}
            assert (await hw.arun(suite(), talk, out=tmp_path / "run", **asked)).exit_status == 4
            return await hw.aresume(tmp_path / "run", suite=suite(), agent=talk)

    summary = asyncio.run(conduct())

    assert (summary.exit_status, set(kinds(tmp_path / "run").values())) == (0, {"passed"})
    whole(tmp_path / "run")


@pytest.mark.parametrize(("program", "status"), [("/no/such/program", 4), ("no-such-program-anywhere", 2)])
def test_agent_binary_that_is_missing(tmp_path: Path, program: str, status: int) -> None:
    scene = Scene(tmp_path)
    scene.suite(SLOW)
    command = scene.run("--command", program, "--workers", "0")

    assert command.wait(60) == status, command
    assert f"the agent's program is missing: `{program}`" in " ".join(command.stderr.split())
    assert "Traceback" not in command.stderr
    if scene.out.exists():
        assert failures(scene.out) == [("run", "agent-missing")]


def test_every_place_of_the_table_but_the_budget_is_played_here() -> None:
    """`budget` has nothing that produces it yet, images are not opened here, and clients are a server's."""
    played = {"agent", "limit", "resource", "model", "sandbox", "grade", "worker", "interrupted", "run"}
    assert {str(where) for where in FailureOrigin} - played == {"budget", "image", "cancelled"}
