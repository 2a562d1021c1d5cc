"""A settled run is tried again in part: by outcome or by name, with other settings, and through kill -9."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, lines, until

import holdwater as hw
from holdwater.export.formats import export_run
from holdwater.ledger.reader import LedgerReader
from holdwater.testing.scripted_model import ScriptedReply, serve_script

SUITE = """
import os, pathlib, time
import holdwater as hw

def note(word, instance):
    fd = os.open(TRACE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{word} {instance.id}\\n".encode())
    os.close(fd)

def instances():
    for n in range(COUNT):
        yield hw.Instance(id=f"i{n}", instruction="sleep")

async def setup(instance, sandbox):
    note("start", instance)
    if not pathlib.Path(UP).exists():
        raise OSError("the service is down")

async def grade(instance, sandbox, answer):
    return True

suite = hw.Suite(name="service", instances=instances, setup=setup, grade=grade)
"""
BAD = {
    ("--retry", "zz*"): "error: no instance of the run matches `--retry`: `zz*`",
    (
        "--concurrency",
        "many",
    ): "error: invalid value for --concurrency: `many`, expected a whole number or `auto`",
    ("--workers", "-1"): "error: `--workers` must be at least 0: -1",
    ("--memory", "much"): "error: invalid size for `--memory`: `much`",
    ("--timeout", "0"): "error: `--timeout` must be more than 0: 0",
}


class Service:
    """A grader's service, which is down until someone repairs it."""

    def __init__(self) -> None:
        self.up = False
        self.graded: Counter[str] = Counter()

    def suite(self) -> hw.Suite:
        """`bad` is graded only while the service is up, `wrong` passes only then, `good` always."""
        names = ("bad", "wrong", "good")
        return hw.Suite(
            name="s",
            instances=lambda: (hw.Instance(id=name) for name in names),
            grade=self.grade,
        )

    async def grade(self, instance: hw.Instance, sandbox: Any, answer: Any) -> bool:
        self.graded[instance.id] += 1
        if instance.id == "bad" and not self.up:
            raise OSError("the service is down")
        return instance.id != "wrong" or self.up


async def talk(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    await model.chat([{"role": "user", "content": "hi"}])
    return "done"


@pytest.fixture
async def base_url():
    async with serve_script(lambda request: ScriptedReply(text="a reply")) as url:
        yield url


async def settled(out: Path, service: Service, base_url: str, **options: Any) -> hw.RunSummary:
    """A run that is over, with an infrastructure failure and a zero among its outcomes."""
    summary = await hw.arun(
        service.suite(), talk, out=out, model="m", base_url=base_url, backoff=0.01, retries=1, **options
    )
    assert (summary.outcomes, summary.exit_status) == ({"grade": 1, "failed": 1, "passed": 1}, 1)
    return summary


@pytest.mark.parametrize(
    ("retry", "passed", "status"),
    [
        ("infrastructure", {"bad", "good"}, 0),
        ("failed", {"wrong", "good"}, 1),
        ("all", {"bad", "wrong", "good"}, 0),
        ("w*", {"wrong", "good"}, 1),
        (["w*", "infrastructure"], {"bad", "wrong", "good"}, 0),
        ("g*", {"good"}, 1),
    ],
)
async def test_retry_opens_the_chosen_samples_again(
    tmp_path: Path, base_url: str, retry: str | list[str], passed: set[str], status: int
) -> None:
    out, service = tmp_path / "run", Service()
    await settled(out, service, base_url)
    before = Counter(service.graded)
    service.up = True

    summary = await hw.aresume(out, suite=service.suite(), agent=talk, retry=retry)

    assert {row["instance"] for row in rows(out, "outcomes") if row["kind"] == "passed"} == passed
    assert (summary.state, summary.exit_status, hw.audit(out).ok) == ("finished", status, True)
    tried = set((service.graded - before).keys())
    assert tried == passed - {"good"}  # a pass stays, whatever names it


async def test_a_retried_infrastructure_failure_pays_no_turn_again(tmp_path: Path, base_url: str) -> None:
    out, service = tmp_path / "run", Service()
    before = await settled(out, service, base_url)
    service.up = True

    after = await hw.aresume(out, suite=service.suite(), agent=talk, retry="infrastructure")

    assert after.usage == before.usage
    rounds = {row["round"] for row in rows(out, "attempts") if row["instance"] == "bad"}
    assert rounds == {1}


async def test_a_retried_zero_gets_as_many_new_rounds_as_attempts(tmp_path: Path, base_url: str) -> None:
    out, service = tmp_path / "run", Service()
    await settled(out, service, base_url)

    await hw.aresume(out, suite=service.suite(), agent=talk, retry="failed", attempts=3)

    rounds = [row["round"] for row in rows(out, "attempts") if row["instance"] == "wrong"]
    assert rounds == [1, 2, 3, 4]
    assert hw.audit(out).ok


async def test_a_retried_failure_gets_its_retries_again(tmp_path: Path, base_url: str) -> None:
    out, service = tmp_path / "run", Service()
    await settled(out, service, base_url)

    summary = await hw.aresume(out, suite=service.suite(), agent=talk, retry="infrastructure", retries=2)

    assert service.graded["bad"] == 2 + 3
    assert (summary.outcomes, summary.exit_status) == ({"grade": 1, "failed": 1, "passed": 1}, 1)
    assert hw.audit(out).ok


async def test_work_that_was_not_kept_is_tried_again_in_full(tmp_path: Path, base_url: str) -> None:
    out, service = tmp_path / "run", Service()
    await settled(out, service, base_url, keep="none")
    service.up = True

    summary = await hw.aresume(out, suite=service.suite(), agent=talk, retry="all")

    assert (summary.outcomes, summary.exit_status) == ({"passed": 3}, 0)
    assert hw.audit(out).ok


async def test_each_changed_setting_is_an_event_and_stays(tmp_path: Path, base_url: str) -> None:
    out, service = tmp_path / "run", Service()
    await settled(out, service, base_url)
    changes = {
        "concurrency": 3,
        "workers": 1,
        "memory": "3GiB",
        "disk": "4GiB",
        "timeout": 77.0,
        "rpm": 600.0,
        "tpm": 9e9,
        "base_url": base_url + "/",
        "retries": 0,
        "attempts": 2,
        "run_requests": 900,
        "run_tokens": 90_000,
        "run_time": 900.0,
    }

    await hw.aresume(out, suite=service.suite(), agent=talk, **changes)
    await hw.aresume(out, suite=service.suite(), agent=talk)

    with LedgerReader(out) as reader:
        told = [event.message.split(":")[0] for event in reader.events() if event.kind == "resume.changed"]
        config = reader.config
    assert sorted(told) == sorted(f"`--{name.replace('_', '-')}`" for name in changes)
    assert (config.concurrency, config.limits.acting, config.memory) == (3, 77.0, 3 << 30)
    assert (config.budget.requests, config.budget.seconds, config.retries) == (900, 900.0, 0)


@pytest.mark.timeout(240)
def test_a_retry_that_is_killed_goes_on_where_it_was(scene: Scene) -> None:
    up, trace, count = scene.place / "up", scene.place / "trace", 8
    scene.suite(SUITE, COUNT=count, UP=str(up), TRACE=str(trace))
    command = ("--command", "sleep 0.3", "--workers", "1", "--concurrency", "2", "--retries", "0")
    first = scene.run(*command)
    assert first.wait(120) == 1, first
    assert set(scene.outcomes().values()) == {"sandbox"}
    assert first.document()["outcomes"] == {"sandbox": count}
    up.touch()

    retried = scene.start("resume", str(scene.out), "--retry", "infrastructure", "--json")
    until("some are tried again", lambda: len(lines(trace)) >= count + 3, 120)
    retried.kill()
    last = scene.resume()

    assert last.wait(120) == 0, last
    assert last.document()["outcomes"] == {"passed": count}
    scene.assert_whole(count)
    scene.assert_clean()


@pytest.mark.timeout(240)
def test_a_resume_with_bad_input_changes_nothing(scene: Scene) -> None:
    scene.suite(SUITE, COUNT=1, UP=str(scene.place), TRACE=str(scene.place / "trace"))
    assert scene.run("--command", "true").wait(120) == 0
    before = (scene.out / "run.json").read_bytes()

    for words, message in BAD.items():
        refused = scene.start("resume", str(scene.out), *words)

        assert refused.wait(60) == 2
        assert refused.stderr.splitlines()[0] == message
        assert (scene.out / "run.json").read_bytes() == before
    with LedgerReader(scene.out) as reader:
        assert reader.events() == []


def rows(path: Path, what: str) -> list[dict[str, Any]]:
    out = io.BytesIO()
    export_run(path, what, "jsonl", out)
    return [json.loads(line) for line in out.getvalue().splitlines()]
