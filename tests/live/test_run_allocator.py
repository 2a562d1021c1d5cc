"""What workers are started with: measured, never in the user's way, and never in a child's environment."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from tests.command_runner import SOURCE, Scene
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.config import RunConfig
from holdwater.core.records import MiB
from holdwater.ledger.directory import RunDirectory
from holdwater.rollout import allocator
from holdwater.rollout.allocator import choose_settings, find_jemalloc, measure_effect, name_allocator
from holdwater.rollout.process_health import RunningClock
from holdwater.rollout.worker_protocol import EventNoted, WorkerReady, WorkerSetup
from holdwater.run.fleet.process import WorkerProcess

ENV = {"PATH": os.defpath, "PYTHONPATH": str(SOURCE)}
OURS = ("LD_PRELOAD", "MALLOC_")
SUITE = """
import os
import holdwater as hw

async def solve(instance, sandbox, model):
    return {"worker": dict(os.environ), "sandbox": (await sandbox.run("env")).stdout}

suite = hw.Suite(
    name="env", instances=lambda: [hw.Instance(id="one")], grade=lambda instance, sandbox, answer: True
)
"""


@pytest.fixture
def installed() -> str:
    if (library := find_jemalloc()) is None:
        assert os.environ.get("CI") != "true", "libjemalloc is not installed"
        pytest.skip("libjemalloc is not installed")
    return library


def without_jemalloc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "find_jemalloc", lambda: None)


def test_jemalloc_is_taken_where_it_is_installed(installed: str) -> None:
    chosen = choose_settings(ENV)

    assert chosen["LD_PRELOAD"] == installed
    assert "dirty_decay_ms:250" in chosen["MALLOC_CONF"]
    assert name_allocator(chosen) == "jemalloc"


def test_glibc_has_its_bounds_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    without_jemalloc(monkeypatch)

    chosen = choose_settings(ENV)

    assert set(chosen) == {"MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert name_allocator(chosen) == "glibc"


def test_what_the_user_preloads_stays_before_ours(installed: str) -> None:
    assert (
        choose_settings({**ENV, "LD_PRELOAD": "/x/libaudit.so"})["LD_PRELOAD"]
        == f"/x/libaudit.so {installed}"
    )


@pytest.mark.usefixtures("installed")
def test_the_users_own_settings_are_never_overridden() -> None:
    assert choose_settings({**ENV, "LD_PRELOAD": "/x/libtcmalloc.so.4"}) == {}
    assert "MALLOC_CONF" not in choose_settings({**ENV, "MALLOC_CONF": "narenas:8"})
    of_glibc = choose_settings({**ENV, "MALLOC_ARENA_MAX": "1"})
    assert "LD_PRELOAD" not in of_glibc
    assert "MALLOC_ARENA_MAX" not in of_glibc


def test_their_effect_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "PATIENCE", stretch(allocator.PATIENCE))
    without = measure_effect(ENV, trimmed=False)
    found = [measure_effect({**ENV, **choose_settings(ENV)}, trimmed=True)]
    without_jemalloc(monkeypatch)
    found.append(measure_effect({**ENV, **choose_settings(ENV)}, trimmed=True))

    assert without is not None
    for effect in found:
        assert effect is not None
        assert effect.peak > effect.base + 50 * MiB
        assert effect.rest < effect.base + 15 * MiB < without.rest


def test_neither_sandboxes_nor_children_of_a_worker_get_them(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.suite(SUITE)
    try:
        assert scene.run(*scene.agent(), "--workers", "1").wait(60) == 0
        (attempt,) = scene.export("attempts")
    finally:
        scene.close()

    told = json.loads(attempt["answer"])
    assert [name for name in told["worker"] if name.startswith(OURS)] == []
    assert [line for line in told["sandbox"].splitlines() if line.startswith(OURS)] == []
    assert "allocator.ignored" not in hw.show(scene.out).events


async def test_a_worker_that_has_another_than_was_asked_for_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "libjemalloc.so.2")
    monkeypatch.setattr(allocator, "find_jemalloc", lambda: missing)
    heard = await told_by_a_worker(tmp_path)

    assert [message.allocator for message in heard if isinstance(message, WorkerReady)] == ["glibc"]
    assert [message.kind for message in heard if isinstance(message, EventNoted)] == ["allocator.ignored"]


async def told_by_a_worker(place: Path) -> list[object]:
    """What it says from its start to its end, but for beats."""
    (place / "suite.py").write_text(SUITE)
    directory = RunDirectory.create(place / "run")
    spec = str(place / "suite.py")
    config = RunConfig(id="r", suite=f"{spec}:suite", agent=f"{spec}:solve", created=0.0, version="0")
    welcome = WorkerSetup(config=config, directory=str(directory.path), worker=0, token=1)
    worker = WorkerProcess(1, welcome, ENV, RunningClock())
    heard: list[object] = []
    async with asyncio.timeout(stretch(30)):
        async for message in worker.messages():
            heard.append(message)
            worker.leave()
        await worker.wait_for_death()
    return heard
