"""A package brings a third kind of sandbox, and the demo runs in it: in the conductor and in its workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_runner import SOURCE
from tests.wait_bounds import stretch

import holdwater as hw

MODULE = """
from contextlib import asynccontextmanager
from pathlib import Path

import holdwater as hw
from holdwater.core.sandbox_kind import SandboxProvision
from holdwater.rollout.sandbox_kinds import find_kind

OPENED = Path(__file__).with_name("opened")


class NumberedSandboxes:
    def __init__(self, inner, prefix):
        self.inner, self.prefix = inner, prefix

    def open(self, attempt, limits, gateway, start):
        with OPENED.open("a") as file:
            file.write(f"{self.prefix}{attempt}\\n")
        return self.inner.open(attempt, limits, gateway, start)

    def gateway_url(self, host_url, network=None):
        return self.inner.gateway_url(host_url, network)


@asynccontextmanager
async def open_sandboxes(site):
    async with find_kind("process").open(site) as opened:
        yield opened._replace(provider=NumberedSandboxes(opened.provider, site.provided["prefix"]))


@asynccontextmanager
async def provide(site):
    provision = SandboxProvision()
    provision.provided = {"prefix": f"{site.config.sandbox} "}
    yield provision


def check(config, agent):
    if config.samples > 2:
        raise hw.BadInput(f"too many samples: {config.samples}")


kind = hw.SandboxKind(open=open_sandboxes, provision=provide, check=check, shows_machine=True)
"""
ENTRY = "[holdwater.sandboxes]\nnumbered = numbered_sandboxes:kind\nbroken = numbered_sandboxes:OPENED\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory in which the package is installed."""
    (tmp_path / "numbered_sandboxes.py").write_text(MODULE)
    about = tmp_path / "numbered_sandboxes-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: numbered-sandboxes\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY)
    return tmp_path


def run_demo(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdwater", "run", "demo", "--quiet", *words],
        capture_output=True,
        text=True,
        timeout=stretch(120),
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{place}"},
        check=False,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_the_demo_runs_in_sandboxes_of_another_package(place: Path, workers: int) -> None:
    done = run_demo(place, "--sandbox", "numbered", "--workers", str(workers), "--out", "run", "--json")

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    audit = hw.audit(place / "run")
    assert audit.ok and audit.planned == audit.settled == sum(summary["outcomes"].values()) == 15
    attempts = {f"numbered {attempt}" for attempt in range(1, summary["attempts"] + 1)}
    assert set((place / "opened").read_text().splitlines()) == attempts
    assert json.loads((place / "run/run.json").read_text())["sandbox"] == "numbered"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sandbox", "numbered", "--samples", "3"), "too many samples: 3"),
        (("--sandbox", "numbered", "--image", "debian:12"), "`--image` requires containers"),
        (("--sandbox", "broken"), "the entry point `broken` of `holdwater.sandboxes` is no `SandboxKind`"),
        (
            ("--sandbox", "moon"),
            "`--sandbox` must be one of `process`, `docker`, `remote`, `broken`, `numbered`: `moon`",
        ),
    ],
)
def test_a_kind_that_cannot_work_is_refused(place: Path, words: tuple[str, ...], message: str) -> None:
    done = run_demo(place, *words, "--out", "run")

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {message}\n")
    assert not (place / "run").exists()
