"""A worker that is killed with -9: its sandboxes die with it in bubblewrap, and are swept without it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.sandbox import cgroup, process_marks
from holdwater.sandbox.probe import probe
from holdwater.sandbox.scratch import SweepReport, sweep

WORKER = """
import asyncio, sys
from pathlib import Path
from holdwater.core.config import Network
from holdwater.core.records import Limits
from holdwater.sandbox.probe import MachineFeatures, probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes

async def main(scratch, run, kind):
    hiding = "env -i sleep 1000 &" if probe().cgroup.usable else ""  # found by its group alone
    machine = probe() if kind == "bubblewrap" else MachineFeatures(cgroup=probe().cgroup)
    boxes = ProcessSandboxes(Path(scratch), run, Network.GATEWAY, machine=machine)
    async with boxes.open(7, Limits(), None) as box:
        await box.run(f"{hiding} setsid sleep 1000 & touch started; sleep 1000")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts a worker with a command in a sandbox, and kills it with -9 once the command runs."""
    runs = []

    def begin(run: str, kind: str) -> Path:
        scratch = tmp_path / run
        runs.append((run, scratch))
        worker = subprocess.Popen([sys.executable, "-c", WORKER, str(scratch), run, kind], env=environment())
        until(lambda: (scratch / "7/work/started").exists())
        worker.kill()
        worker.wait()
        return scratch

    yield begin
    for run, scratch in runs:
        sweep(run, scratch)


def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": "/usr/bin:/bin"}


def alive(run: str) -> list[int]:
    return process_marks.find_marked({process_marks.RUN: run})


def until(true) -> None:
    end = time.monotonic() + stretch(10)
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)
def test_in_bubblewrap_the_tree_dies_with_its_worker(start, tmp_path):
    run = f"dies-{os.getpid()}"

    scratch = start(run, "bubblewrap")

    until(lambda: not alive(run))
    until(lambda: not in_groups(run))
    home = probe().cgroup
    groups = len({place for place in (home.memory, home.pids, home.cpu, home.cpuacct) if place})
    assert sweep(run, scratch) == SweepReport(processes=0, directories=1, cgroups=groups)
    assert list(scratch.iterdir()) == []


def test_the_sweep_ends_the_orphans_of_its_run_and_of_no_other(start):
    mine, other = f"mine-{os.getpid()}", f"other-{os.getpid()}"
    scratch = start(mine, "plain")
    start(other, "plain")
    others = alive(other)
    assert alive(mine) and others

    swept = sweep(mine, scratch)

    assert swept.processes >= (3 if probe().cgroup.usable else 2) and swept.directories == 1
    assert alive(mine) == [] and in_groups(mine) == set()
    assert cgroup.find_leftovers(mine) == []
    assert alive(other) == others
    assert sweep(mine, scratch) == SweepReport()


def test_the_sweep_spares_itself_and_those_above_it(tmp_path):
    run = f"self-{os.getpid()}"
    script = "import sys\nfrom pathlib import Path\nfrom holdwater.sandbox.scratch import sweep\n"
    script += "print(sweep(sys.argv[1], Path(sys.argv[2])).processes)"

    told = subprocess.run(
        ["sh", "-c", 'sleep 1000 & "$@"; echo $?', "sh", sys.executable, "-c", script, run, str(tmp_path)],
        env={**environment(), process_marks.RUN: run},
        capture_output=True,
        text=True,
        timeout=stretch(30),
    )

    assert told.stdout.split() == ["1", "0"], told.stderr


def in_groups(run: str) -> set[str]:
    return {
        pid for group in cgroup.find_leftovers(run) for pid in (group / "cgroup.procs").read_text().split()
    }
