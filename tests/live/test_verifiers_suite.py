"""Tasksets of verifiers as suites, with the real package: hooks, rewards, judges, groups, refusals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.command_runner import SOURCE, Command, Scene, lines, serving, until
from tests.forked_command import Interpreter, run_forked
from tests.verifiers_commands import PYTHON, copy_taskset, find_interpreter
from tests.verifiers_harness import verifiers_client
from tests.wait_bounds import stretch

from holdwater.core.records import GiB, Instance, Network
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import read_exchanges
from holdwater.ledger.reader import LedgerReader
from holdwater.ledger.rows import AttemptRow

MODEL = Path(__file__).parents[1] / "clients" / "task_model.py"
AGENT = """
async def solve(instance, sandbox, model):
    await model.chat([{"role": "user", "content": instance.instruction}])
"""
WORKER = "cp template work"


class TaskScene(Scene):
    """A directory with tasksets and an agent, and the model behind them."""

    def __init__(self, place: Path, url: str, interpreter: Interpreter) -> None:
        super().__init__(place, env={"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "x"}, forks=interpreter)
        (place / "agent.py").write_text(AGENT)
        self.trace, self.gate = place / "requests", place / "gate"

    def play(self, spec: str, *words: str, agent: str = "", workers: str = "0") -> Command:
        """Start a run of a taskset with the agent, or with another."""
        taskset, mark, options = spec.partition("?")
        name, colon, cls = taskset.partition(":")
        path = copy_taskset(self.place, name)
        chosen = ("--agent", agent) if agent else ("--agent", f"{self.place}/agent.py:solve", "--model", "m")
        flags = ("--workers", workers, "--backoff", "0.01", "--retries", "0", "--concurrency", "4")
        return self.start(
            "run", f"vf:{path}{colon}{cls}{mark}{options}", "--out", str(self.out), *chosen, *flags, *words
        )

    def finish(self, spec: str, *words: str, status: int = 0, **options: Any) -> list[AttemptRow]:
        """Run a taskset to its end; return its attempts."""
        command = self.play(spec, *words, **options)
        assert command.wait(120) == status, command
        with LedgerReader(self.out) as reader:
            return list(reader.attempts())

    def read_instance(self, row: int) -> Instance:
        with LedgerReader(self.out) as reader:
            return msgspec.msgpack.decode(reader.payload(row), type=Instance)

    def read_trace(self, attempt: int) -> Any:
        """Verifiers' own record of the trace."""
        return json.loads((self.out / "artifacts" / f"{attempt:06d}.files" / "trace.json").read_text())


@pytest.fixture(scope="module")  # all of these tests run in one process, which loads the package once
def interpreter() -> Interpreter:
    return find_interpreter()


@pytest.fixture
def scene(tmp_path: Path, interpreter: Interpreter) -> Iterator[TaskScene]:
    with serving(str(MODEL), str(tmp_path / "requests"), str(tmp_path / "gate")) as url:
        scene = TaskScene(tmp_path, url, interpreter)
        yield scene
        scene.close()


def read_grade(row: AttemptRow) -> Any:
    assert row.verdict is not None
    assert row.verdict.failure is None, row.verdict.failure
    return row.verdict.grade


def read_failure(row: AttemptRow) -> Any:
    assert row.verdict is not None
    return row.verdict.failure


def test_rewards_and_metrics_read_the_trace_and_are_weighted(scene: TaskScene) -> None:
    rows = scene.finish('reversal?words=["drawer","incomprehensible"]&task.brief=8')

    first, second = map(read_grade, rows)
    assert [row.instance for row in rows] == ["0-drawer", "1-incomprehensible"]
    assert (first.passed, first.score) == (True, 1.0)
    assert (second.passed, second.score) == (False, 0.75)
    expected = {"turns": 1.0, "calls": 1.0, "reward.exact": 1.0, "reward.brief": 0.0, "weight.brief": 0.25}
    assert expected.items() <= second.metrics.items()
    assert second.metrics["prompt_tokens"] > 0
    trace = scene.read_trace(rows[1].attempt)
    assert trace["rewards"] == {
        "exact": {"score": 1.0, "weight": 0.75},
        "brief": {"score": 0.0, "weight": 0.25},
    }
    assert (trace["task"]["type"], trace["stop_condition"], trace["ok"]) == (
        "ReversalTask",
        "agent_completed",
        True,
    )
    task = scene.read_instance(1).data["task"]
    assert (task["key"], task["hash"]) == (trace_of(scene, rows[0])["key"], trace_of(scene, rows[0])["hash"])


def trace_of(scene: TaskScene, row: AttemptRow) -> Any:
    return scene.read_trace(row.attempt)["task"]


def test_hooks_run_in_the_sandbox_and_share_their_state(scene: TaskScene) -> None:
    rows = scene.finish("workshop", "--command", f"sh -c '{WORKER}'", agent="command")

    assert [read_grade(row).score for row in rows] == [1.0, 1.0]
    assert scene.read_trace(rows[0].attempt)["info"] == {"drawn": 1, "work": "gear"}
    instance = scene.read_instance(1)
    assert instance.instruction == "You are in a workshop.\n\nMake a gear."
    assert instance.start.network is Network.GATEWAY
    limits = instance.limits
    assert (limits.setup, limits.acting, limits.grading) == (300, 200, 100)
    assert (limits.cpus, limits.memory) == (1, GiB // 4)


def test_a_hook_that_fails_is_no_zero(scene: TaskScene) -> None:
    rows = scene.finish('workshop?parts=["gear"]', agent="nop", status=1)

    (failure,) = map(read_failure, rows)
    assert (failure.where, failure.kind) == ("grade", "task")
    assert "work" in failure.message


def test_the_answer_stands_for_the_reply_of_an_agent_without_a_model(scene: TaskScene) -> None:
    (scene.place / "agent.py").write_text("def solve(instance, sandbox, model):\n    return 'level'\n")

    rows = scene.finish("contest?env=contest&pass=5")

    # Each sample is alone, so that it also wins the prize of 0.5.
    assert [read_grade(row).score for row in rows] == [5.5, 5.5]


def test_judges_call_the_gateway_as_the_grader(scene: TaskScene) -> None:
    rows = scene.finish("judged?pass=0.8")

    grade = read_grade(rows[0])
    assert (grade.passed, grade.score) == (True, pytest.approx(0.8))
    exchanges = list(read_exchanges(RunDirectory(scene.out), rows[0].attempt))
    assert [exchange.by for exchange in exchanges] == ["", "grader", "grader"]
    judged = scene.read_trace(rows[0].attempt)["info"]["judge_calls"]
    assert len(judged) == 2


def test_a_resume_after_kill_9_asks_neither_model_nor_judge_twice(scene: TaskScene) -> None:
    scene.gate.touch()
    command = scene.play("judged?pass=0.8")
    until("the judge is asked", lambda: len(lines(scene.trace)) >= 2, 60)
    command.kill()
    scene.gate.unlink()
    before = lines(scene.trace)

    resumed = scene.start("resume", str(scene.out))

    assert resumed.wait(120) == 0, resumed
    with LedgerReader(scene.out) as reader:
        rows = list(reader.attempts())
    assert [row.kind for row in rows] == ["interrupted", "passed"]
    assert read_grade(rows[1]).score == pytest.approx(0.8)
    asked = lines(scene.trace)[len(before) :]
    assert not any("colour" in line and "Taste" not in line and "Reference" not in line for line in asked)
    assert len([line for line in asked if "Taste" in line]) == 1  # its reply had not come
    scene.assert_clean()


def test_an_environment_compares_the_samples_of_a_task(scene: TaskScene) -> None:
    rows = scene.finish("contest?env=contest&env.prize=2&pass=100", "--samples", "3")

    for name in ("0-a", "1-b"):
        grades = [read_grade(row) for row in rows if row.instance == name]
        longest = max(grade.metrics["reward.length"] for grade in grades)
        assert [grade.metrics["reward.wins"] for grade in grades] == [
            float(grade.metrics["reward.length"] == longest) for grade in grades
        ]
        assert max(grade.score for grade in grades) == longest + 2
        assert {grade.metrics["rivals"] for grade in grades} == {2.0}
        assert all(row.verdict is not None and row.verdict.group_scored for row in rows)


def test_an_environment_of_the_package_compares_samples_too(scene: TaskScene) -> None:
    rows = scene.finish('reversal?words=["drawer"]&env=best-of-n', "--samples", "2")

    assert [read_grade(row).metrics["pass_at_n"] for row in rows] == [1.0, 1.0]
    assert [read_grade(row).metrics["best"] for row in rows] == [1.0, 1.0]


def test_tasks_that_no_sandbox_can_run_are_refused_by_field(scene: TaskScene) -> None:
    rows = scene.finish("unfit:UnfitTaskset", status=1)

    refused = [str(read_failure(row).message).partition(":")[0] for row in rows[:6]]
    fields = ("prompt", "network_allow", "network_block", "resources.gpu", "skills", "workdir")
    assert refused == [f"field `{field}`" for field in fields]
    assert not any(read_failure(row).again for row in rows[:6])
    assert read_grade(rows[6]).score == 1.0


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("unfit", "several tasksets"),
        (
            "unfit:ToolTaskset",
            "`ToolTaskset` has tool servers, which agent `agent.py:solve` is not given: `lookup_toolset`",
        ),
        (
            "unfit:RewritingTaskset",
            "taskset `RewritingTaskset` rewrites model calls, which are passed on unchanged",
        ),
        ("unfit:NoTaskset", "has no taskset `NoTaskset`"),
        (
            "scripted_user",
            "`QuizEnv` drives the turns of a harness of verifiers, which agent `agent.py:solve`",
        ),
        ("contest", "comes with an environment that compares the runs of its agent: `ContestEnv`"),
        ("reversal?wrods=1", "option `wrods`: Extra inputs are not permitted"),
        ("reversal?env=isolated_verifier", "environment `IsolatedVerifierEnv` cannot score samples"),
        ("reversal?env=agentic_judge", "environment `IsolatedAgenticJudgeEnv` has 2 agents: solver, judge"),
    ],
)
def test_a_taskset_that_cannot_run_is_refused_before_the_run(
    scene: TaskScene, spec: str, problem: str
) -> None:
    command = scene.play(spec)

    assert command.wait(60) == 2, command
    assert problem in command.stderr, command.stderr
    assert not scene.out.exists()


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("vf:harbor", "RuntimeError: Harbor tasksets require the Harbor CLI"),
        ("vf:textarena?game=Wordle-v0", "ImportError: textarena requires nltk and textarena"),
        ("vf:nemo_gym", "option `dataset`: Field required"),
        ("vf:nosuch_env", "taskset 'nosuch_env' not found"),
    ],
)
def test_tasksets_of_the_package_that_cannot_run_are_refused(
    scene: TaskScene, spec: str, problem: str
) -> None:
    command = scene.start("run", spec, "--model", "m", "--workers", "0", "--out", str(scene.out))

    assert command.wait(60) == 2, command
    assert problem in command.stderr, command.stderr


def test_a_taskset_that_fails_in_the_middle_keeps_its_earlier_tasks(scene: TaskScene) -> None:
    rows = scene.finish("unfit:BrokenTaskset", status=2)

    assert [read_grade(row).score for row in rows] == [1.0]


def test_the_commands_of_the_page_run_as_they_stand(scene: TaskScene) -> None:
    """With a taskset of the options that the page names, and a model that answers at once."""
    for place in ("my_env.py", "environments/my_env/taskset.py"):
        (scene.place / place).parent.mkdir(parents=True, exist_ok=True)
        copy_taskset(scene.place, "page").rename(scene.place / place)
    page = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text()
    commands = re.findall(r"(?m)^\$ holdwater (run .*)$", page)

    assert len(commands) == 2
    for command in commands:
        done = run_forked(
            *shlex.split(command),
            "--workers",
            "0",
            "--quiet",
            env={**os.environ, "PYTHONPATH": str(scene.place), **(scene.env or {})},
            cwd=scene.place,
            interpreter=scene.forks,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_a_harness_of_the_package_runs_in_the_sandbox(scene: TaskScene) -> None:
    rows = scene.finish("workshop", "--model", "m", agent="holdwater.suite.verifiers.harness:own")

    assert [read_grade(row).score for row in rows] == [1.0, 1.0]
    exchanges = list(read_exchanges(RunDirectory(scene.out), rows[0].attempt))
    assert len(exchanges) == 2


def test_tool_servers_run_beside_the_harness_and_share_the_state(scene: TaskScene) -> None:
    rows = scene.finish("tooled", "--model", "m", agent="holdwater.suite.verifiers.harness:null")

    assert [read_grade(row).score for row in rows] == [1.0]
    assert rows[0].verdict is not None
    assert rows[0].verdict.salvage is None  # the state's file is no work


@pytest.mark.proof  # a harness starts once more
def test_a_tool_server_that_does_not_start_is_no_zero(scene: TaskScene) -> None:
    harness = "holdwater.suite.verifiers.harness:null"
    rows = scene.finish("unfit:ToolTaskset", "--model", "m", agent=harness, status=1)

    (failure,) = map(read_failure, rows)
    assert (failure.where, failure.kind) == ("sandbox", "tools")
    assert "tool server `lookup_toolset` does not answer" in failure.message


def test_a_harness_that_does_not_exist_ends_the_run(scene: TaskScene) -> None:
    harness = "holdwater.suite.verifiers.harness:nosuch"
    command = scene.play("reversal", "--model", "m", agent=harness)

    assert command.wait(120) == 4, command
    assert "harness 'nosuch' not found" in " ".join(command.stderr.split())


@pytest.mark.parametrize(
    "opening", ['&words=["lever"]', pytest.param("&prompt=null", marks=pytest.mark.proof)]
)
def test_an_environment_plays_the_user_of_a_harness(scene: TaskScene, opening: str) -> None:
    harness = "holdwater.suite.verifiers.harness:null"
    (row,) = scene.finish(f"scripted_user?pass=1.5{opening}", "--model", "m", agent=harness)

    assert (read_grade(row).passed, read_grade(row).score) == (True, 1.5)
    exchanges = list(read_exchanges(RunDirectory(scene.out), row.attempt))
    assert [len(exchange.append) for exchange in exchanges] == [1, 2]  # one conversation
    assert scene.read_trace(row.attempt)["stop_condition"] == "user_closed"


class ResourceServer(ThreadingHTTPServer):
    """A server of NeMo Gym: it seeds a session and verifies a response."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ResourceHandler)
        self.asked: list[str] = []


class ResourceHandler(BaseHTTPRequestHandler):
    server: ResourceServer

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps(asked.get("response", {}).get("output", []))
        reply = {"reward": float("blue" in said), "responses_create_params": {}, "response": {}, "words": 1}
        content = json.dumps(reply if self.path == "/verify" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        return


@pytest.mark.proof  # its tool server imports the package once more
def test_tasks_of_nemo_gym_run_with_their_resource_server(scene: TaskScene) -> None:
    rows = {"responses_create_params": {"input": [{"role": "user", "content": "Name a colour."}]}}
    (scene.place / "gym.jsonl").write_text(json.dumps(rows))
    with ResourceServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = f"dataset={scene.place}/gym.jsonl&task.resources_url=http://127.0.0.1:{server.server_port}"
        harness = ("--agent", "holdwater.suite.verifiers.harness:null", "--model", "m", "--network", "open")
        command = scene.start(
            "run", f"vf:nemo_gym?{options}", "--workers", "0", *harness, "--out", str(scene.out)
        )
        assert command.wait(120) == 0, command
        server.shutdown()

    assert server.asked == ["/seed_session", "/verify"]
    with LedgerReader(scene.out) as reader:
        (grade,) = map(read_grade, reader.attempts())
    assert (grade.score, grade.metrics["words"]) == (1.0, 1.0)


@pytest.mark.proof  # two more imports of the package
def test_another_process_lists_the_tasks_for_a_run_with_workers(scene: TaskScene) -> None:
    path = copy_taskset(scene.place, "reversal")
    words = ("run", f"vf:{path}", "--agent", f"{scene.place}/agent.py:solve", "--model", "m", "--json")

    done = subprocess.run(
        [PYTHON, "-m", "holdwater", *words, "--workers", "1", "--out", scene.out],
        env={**os.environ, **(scene.env or {}), "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=stretch(120),
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["outcomes"] == {"passed": 3}


def test_a_trainer_gets_the_rewards_of_a_served_taskset(scene: TaskScene) -> None:
    address, upstream = scene.place / "vf.socket", scene.env["OPENAI_BASE_URL"]
    path = copy_taskset(scene.place, "reversal")
    server = scene.start(
        *("serve", f"vf:{path}?task.brief=8", "--agent", f"{scene.place}/agent.py:solve", "--quiet"),
        *("--out", str(scene.out), "--listen", f"unix:{scene.place}/http", "--workers", "1"),
        *("--protocol", "verifiers", "--protocol-listen", f"unix:{address}"),
    )
    taskset = {"path": str(path), "taskset": "ReversalTaskset", "config": "ReversalConfig"}
    words = ["drawer", "incomprehensible"]

    async def train() -> list[dict[str, Any]]:
        async with verifiers_client(
            f"ipc://{address}", upstream, taskset={**taskset, "words": words}
        ) as client:
            assert await client.read_line() == {"ready": True}
            return await client.read_rollouts(2)

    first, second = asyncio.run(train())
    server.signal(signal.SIGINT)

    assert first["same_task"] and second["same_task"]
    [trace] = second["traces"]
    assert trace["rewards"] == {
        "exact": {"score": 1.0, "weight": 0.75},
        "brief": {"score": 0.0, "weight": 0.25},
    }
    assert (trace["reward"], trace["metrics"]["turns"], trace["turns"]) == (0.75, 1.0, 1)
    assert first["traces"][0]["reward"] == 1.0
