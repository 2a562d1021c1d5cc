"""Headless Chromium in the sandbox, from `examples/browser`, with screenshots in the conversation."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from tests.live.test_examples_run import load_example

import holdwater as hw
from holdwater.ledger.reader import LedgerReader
from holdwater.testing.scripted_model import ScriptedReply, serve_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "browser"
SUITE = f"{EXAMPLE / 'shop.py'}:suite"
MiB = 1024 * 1024


@pytest.fixture(autouse=True)
def chromium() -> None:
    if shutil.which("chromium") is None:
        assert os.environ.get("CI") != "true"
        pytest.skip("`chromium` is not installed: `scripts/test-needs` does it")


def find_members(field: str, value: str) -> set[int]:
    """The processes whose `/proc/PID/cgroup` contains `value`, or whose pid namespace is `value`."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            known = str((place / "ns/pid").readlink()) if field == "ns" else (place / "cgroup").read_text()
        except OSError:
            continue  # it has ended, or is a kernel thread
        if value in known:
            found.add(int(place.name))
    return found


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.proof)])
async def test_every_process_of_a_browser_is_in_its_group(tmp_path: Path, count: int) -> None:
    """Given browsers at once, whose model looks at their processes before it answers."""
    shopper, seen = load_example("browser/scripted_shopper.py"), dict[str, tuple[set[int], set[int]]]()

    def answer(request: dict[str, Any]) -> ScriptedReply:
        seen.update(list_browsers(seen))
        reply: ScriptedReply = shopper.answer(request)
        return reply

    async with serve_script(answer) as url:
        summary = await hw.arun(
            SUITE,
            f"{EXAMPLE / 'shop.py'}:shop",
            model="m",
            base_url=url,
            limit=count,
            concurrency=count,
            memory="6GiB",
            workers=1,
            out=tmp_path / "run",
        )

    assert summary.outcomes == {"passed": count}
    assert len(seen) == count
    for inside, grouped in seen.values():
        assert len(inside) >= 5  # bubblewrap, the forwarder, the program, Chromium and its helpers
        assert inside <= grouped
    check_record(tmp_path / "run")


def list_browsers(known: Container[str]) -> dict[str, tuple[set[int], set[int]]]:
    """For each new sandbox with a page: the processes of its namespace, and those of its control group."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if b"--type=renderer" in (place / "cmdline").read_bytes():
                namespace = str((place / "ns/pid").readlink())
                if namespace in known:
                    continue
                group = (place / "cgroup").read_text().splitlines()[0].rpartition("/")[2]
                found[namespace] = find_members("ns", namespace), find_members("cgroup", group)
        except OSError:
            continue
    return found


def check_record(run: Path) -> None:
    """Each turn has a screenshot in the record, and the memory is that of the whole browser."""
    with LedgerReader(run) as reader:
        verdicts = [row.verdict for row in reader.attempts()]
    assert {verdict.exchanges for verdict in verdicts if verdict} == {5}
    assert all(verdict is not None and verdict.peak_memory > 60 * MiB for verdict in verdicts)
    assert len(list((run / "blobs").rglob("*.zst"))) >= 2 * len(verdicts)
