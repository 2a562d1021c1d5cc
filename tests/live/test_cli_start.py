"""A start that cannot work: one sentence and a hint, exit status 2, and no run directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.forked_command import run_forked

SUITE = """
import holdwater as hw

def instances():
    for n in range(3):
        yield hw.Instance(id=f"add-{n}", instruction="x")

def grade(instance, sandbox, answer):
    return True

async def calls(instance, sandbox, model):
    reply = await model.chat([])

class Caller:
    def __call__(self, instance, sandbox, llm):
        return llm.chat([])

calls_too = Caller()

async def works_alone(instance, sandbox, model):
    await sandbox.write("a.txt", str(instance.id))

async def hands_on(instance, sandbox, model):
    return await works_alone(instance, sandbox, model)

suite = hw.Suite(name="adding", instances=instances, grade=grade)
"""


def holdwater(
    place: Path, *words: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    return run_forked(*words, cwd=cwd or place, env={**env, "PATH": path, **variables})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "suite.py").write_text(SUITE)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bin").mkdir()
    for name, first in (
        ("lost", "#!/opt/no-such/python3 -u"),
        ("lost-too", "#!/usr/bin/env -S no-such-node -x"),
    ):
        (tmp_path / "bin" / name).write_text(f"{first}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


MODEL = "give one with `--model`"
REFUSED = {
    ("--agent", "suite.py:calls"): ("agent `suite.py:calls` calls the model, and the run has none", MODEL),
    ("--agent", "suite.py:calls_too"): (
        "agent `suite.py:calls_too` calls the model, and the run has none",
        MODEL,
    ),
    ("--agent", "bash"): ("agent `bash` calls the model, and the run has none", MODEL),
    ("--command", "true", "--only", "zz*", "--only", "yy"): (
        "no instance of suite `adding` matches `--only`: `zz*`, `yy`",
        "it has, for example, `add-0`, `add-1`, `add-2`",
    ),
    ("--command", "no-such-program-anywhere x"): (
        "the agent's program is missing: `no-such-program-anywhere`",
        "install it, or give its absolute path",
    ),
    ("--command", "lost x"): (
        "the interpreter of the agent's program `lost` is missing: `/opt/no-such/python3`",
        "install it, or fix the first line of `{place}/bin/lost`",
    ),
    ("--command", "lost-too x"): (
        "the interpreter of the agent's program `lost-too` is missing: `no-such-node`",
        "install it, or fix the first line of `{place}/bin/lost-too`",
    ),
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_cannot_work_is_one_error_and_leaves_nothing(place: Path, words: tuple[str, ...]) -> None:
    message, hint = REFUSED[words]

    done = holdwater(place, "run", "suite.py:suite", *words)

    told = done.stderr.splitlines()
    assert told == [f"error: {message}", f"hint: {hint.format(place=place)}"]
    assert (done.returncode, done.stdout) == (2, "")
    assert not (place / "runs").exists()


def test_a_suite_without_instances_leaves_nothing(place: Path) -> None:
    done = holdwater(place, "run", "empty.jsonl", "--command", "true")

    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: suite `empty` has no instances"
    assert not (place / "runs").exists()


@pytest.mark.parametrize("agent", ["works_alone", "hands_on"])
def test_an_agent_that_may_do_without_a_model_runs_without_one(place: Path, agent: str) -> None:
    done = holdwater(place, "run", "suite.py:suite", "--agent", f"suite.py:{agent}", "--only", "add-1")

    assert done.returncode == 0, done.stderr


def test_a_place_that_cannot_be_written_names_the_flag(place: Path) -> None:
    locked = Path("/sys/kernel")  # refuses directories to root too

    done = holdwater(place, "run", f"{place}/suite.py:suite", "--command", "true", cwd=locked)

    first, second = done.stderr.splitlines()
    assert first.startswith("error: cannot make the run's directory: `runs")
    assert second == "hint: choose a writable directory with `--out`"
    assert done.returncode == 2


def test_a_file_of_the_current_directory_in_the_command_is_noted(place: Path) -> None:
    (place / "agent.py").write_text("")

    done = holdwater(place, "run", "suite.py:suite", "--command", "python3 agent.py", "--limit", "1")

    note = "note: `agent.py` in the agent's command refers to the sandbox's working directory"
    assert f"{note}; the file here is `{place}/agent.py`" in done.stderr.splitlines()


def test_credentials_in_the_url_of_a_provider_are_refused(place: Path) -> None:
    words = ("run", "suite.py:suite", "--agent", "suite.py:calls", "--model", "m")

    done = holdwater(place, *words, ANTHROPIC_BASE_URL="http://user:secret@localhost:1")

    assert done.returncode == 2
    assert done.stderr.startswith("error: `ANTHROPIC_BASE_URL` must not contain credentials")
    assert "secret" not in done.stderr
    assert not (place / "runs").exists()
