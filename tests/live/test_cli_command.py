"""The command as a user meets it: help, exit statuses, output. `test_error_texts.py` has its errors."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked_command import run_forked
from tests.wait_bounds import stretch


def start_interpreter(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdwater", *words]
    settings = {"capture_output": True, "text": True, "timeout": stretch(60), "env": environment(), **options}
    return subprocess.run(command, **settings)  # type: ignore[call-overload,no-any-return]


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    env = environment() | variables
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=stretch(60), check=False)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def test_an_unprintable_word_is_escaped_in_the_error(tmp_path: Path) -> None:
    done = run_forked("a\x1b[2J\nb", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    hint = "hint: `holdwater --help` lists the verbs"
    assert done.stderr.splitlines() == ["error: unknown verb: `a\\x1b[2J\\nb`", hint]


def test_the_overview_names_every_verb() -> None:
    done = start_interpreter("--help")

    named = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert done.returncode == 0
    assert {"run", "resume", "show", "audit", "export", "regrade", "suites", "agents", "doctor"} <= named


@pytest.mark.parametrize(
    "verb", ["serve", "show", "audit", "export", "check", "init", "prune", "suites", "agents", "doctor"]
)
def test_the_help_of_a_verb_has_an_example(verb: str) -> None:
    done = run_forked(verb, "--help")

    assert done.returncode == 0
    assert "Usage: holdwater " + verb in done.stdout
    assert f"For example: holdwater {verb}" in done.stdout


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_load_no_library(flag: str) -> None:
    code = f"import sys, holdwater.cli; holdwater.cli.main(['{flag}']); print(*sys.modules, file=sys.stderr)"

    done = python(code)

    loaded = set(done.stderr.split())
    assert "holdwater.cli" in loaded
    assert loaded.isdisjoint({"cyclopts", "rich", "msgspec", "sqlite3", "asyncio", "aiohttp"})


def test_a_run_without_a_model_loads_no_http_library() -> None:
    modules = ("rollout.worker", "run.execute", "api.runs", "api.machine", "api.reading")
    code = f"import sys, {', '.join(f'holdwater.{name}' for name in modules)}; print(*sys.modules)"

    loaded = set(python(code).stdout.split())

    assert "holdwater.rollout.worker" in loaded
    assert loaded.isdisjoint({"aiohttp", "jinja2", "cyclopts"})


def test_the_overview_is_there_at_once() -> None:
    """Its CPU time, which a busy machine hardly changes, next to that of an idle interpreter."""

    def seconds(work: Callable[[], object]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        work()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    nothing = min(seconds(lambda: python("pass")) for _ in range(5))

    assert min(seconds(lambda: start_interpreter("--help")) for _ in range(5)) < 6 * nothing


@pytest.mark.parametrize("verb", ["suites", "agents", "doctor"])
def test_json_is_exactly_one_document(verb: str) -> None:
    done = run_forked(verb, "--json")

    assert done.returncode == 0
    assert isinstance(json.loads(done.stdout), dict)
    assert done.stderr == ""


def test_the_doctor_sees_a_cache_and_scratch_in_memory(tmp_path: Path) -> None:
    variables = {**environment(), "HOLDWATER_CACHE": "/dev/shm/holdwater-none", "TMPDIR": str(tmp_path)}

    done = run_forked("doctor", "--scratch", "/dev/shm", "--json", env=variables, cwd=tmp_path)

    findings = json.loads(done.stdout)["findings"]
    (memory,) = [one for one in findings if one["what"] == "disk" and one.get("filesystem") == "tmpfs"]
    assert "for cache, scratch at `/dev/shm` (tmpfs)" in memory["value"]
    assert memory["note"].startswith("files there use memory, and are gone after a restart. hint: set ")
    assert "`HOLDWATER_CACHE` and `--scratch` to a directory on a disk" in memory["note"]


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = start_interpreter("agents", stdout=writer, stderr=subprocess.PIPE, capture_output=False)
    finally:
        os.close(writer)

    assert done.returncode == 141
    assert done.stderr == ""


def test_a_full_disk_behind_stdout_is_reported() -> None:
    with Path("/dev/full").open("w") as full:
        done = start_interpreter("agents", stdout=full, stderr=subprocess.PIPE, capture_output=False)

    assert done.returncode == 1
    assert done.stderr == "error: cannot write to stdout: No space left on device\n"


def test_an_interrupt_is_exit_3_without_a_traceback() -> None:
    code = """
import signal, sys
import holdwater.cli as cli
cli.dispatch = lambda words: signal.raise_signal(signal.SIGINT)
sys.exit(cli.main(["agents"]))
"""
    done = python(code)

    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_bug_is_a_sentence_and_its_traceback_a_file(tmp_path: Path) -> None:
    code = """
import sys
import holdwater.cli as cli
cli.dispatch = lambda words: {}["missing"]
sys.exit(cli.main(["agents"]))
"""
    done = python(code, TMPDIR=str(tmp_path))

    error, hint = done.stderr.splitlines()
    kept = list(tmp_path.glob("*.traceback"))
    assert done.returncode == 1
    assert error == "error: internal: KeyError: 'missing'"
    assert f"`{kept[0]}`" in hint
    assert "Traceback" in kept[0].read_text()


def test_a_closed_stdout_and_stderr_are_survived() -> None:
    command = f"{sys.executable} -m holdwater agents >&- 2>&- <&-"

    done = subprocess.run(["sh", "-c", command], env=environment(), timeout=stretch(60), check=False)

    assert done.returncode == 0
