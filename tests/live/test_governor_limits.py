"""The meter in a control group with a limit, on this machine's own kernel, and what a reading costs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdwater.core.records import MiB
from holdwater.governor.meter import ResourceMeter
from holdwater.kernel_files import read_pss, read_resident, read_tree_memory
from holdwater.sandbox.cgroup import ControlGroup
from holdwater.sandbox.probe import probe

HOME = probe().cgroup
CHEAP = 0.010  # seconds of CPU a reading: 1 % of a core at one a second

INSIDE = """
import mmap, sys, tempfile
from pathlib import Path
for entrance in sys.argv[1:]:
    Path(entrance).write_text("0")
import msgspec
from holdwater.governor.meter import ResourceMeter
meter = ResourceMeter({"run": Path.cwd()})
held = []
for line in sys.stdin:
    exec(line)
    print(msgspec.json.encode(meter.read(own=0)).decode(), flush=True)
"""


class Inside:
    """A process in the group that does as it is told and reads the meter after it."""

    def __init__(self, group: ControlGroup) -> None:
        words = [sys.executable, "-c", INSIDE, *map(str, group.procs_files)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def after(self, line: str) -> dict:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def group() -> Iterator[ControlGroup]:
    if not HOME.usable:
        assert os.environ.get("CI") != "true"
        pytest.skip(f"no control group can be made here: {HOME.why}")
    made = ControlGroup.make(HOME, f"holdwater-meter-{os.getpid()}", memory=200 * MiB, pids=None)
    yield made
    assert made.remove()


@pytest.fixture
def inside(group: ControlGroup) -> Iterator[Inside]:
    child = Inside(group)
    yield child
    child.process.kill()
    child.process.communicate()


def test_anonymous_and_shared_memory_are_use_and_page_cache_is_not(inside):
    before = inside.after("pass")["bounds"][0]

    allocated = inside.after("held.append(b'x' * (50 << 20))")["bounds"][0]
    shared = inside.after("held.append(mmap.mmap(-1, 20 << 20)); held[-1].write(b'x' * (20 << 20))")[
        "bounds"
    ][0]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        read = f"p = Path('{place}/f'); p.write_bytes(bytes(40 << 20)); p.read_bytes(); held.append(p)"
        cached = inside.after(read)["bounds"][0]

    assert (before["name"], before["limit"]) == ("container", 200 * MiB)
    assert allocated["used"] - before["used"] == pytest.approx(50 * MiB, abs=4 * MiB)
    assert shared["used"] - allocated["used"] == pytest.approx(20 * MiB, abs=4 * MiB)
    assert cached["used"] - shared["used"] < 8 * MiB


def test_a_limit_that_changes_is_followed(inside, group):
    assert inside.after("pass")["bounds"][0]["limit"] == 200 * MiB

    name = "memory.max" if HOME.kind == "v2" else "memory.limit_in_bytes"
    (group.directories[0] / name).write_text(str(150 * MiB))

    assert inside.after("pass")["bounds"][0]["limit"] == 150 * MiB


def test_a_kill_for_memory_is_counted(inside, group):
    greedy = "open('/proc/self/oom_score_adj', 'w').write('1000'); b'x' * (400 << 20)"
    if HOME.kind == "v2" and (group.directories[0] / "memory.oom.group").exists():
        (group.directories[0] / "memory.oom.group").write_text("0")
    assert inside.after("pass")["oom_kills"] == 0

    told = inside.after(
        f"import subprocess; held.append(subprocess.call([sys.executable, '-c', {greedy!r}]))"
    )

    assert told["oom_kills"] == 1


def test_the_use_of_a_tree_includes_the_children_of_children():
    nested = "import subprocess, sys; x = b'x' * (30 << 20); print(flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nested!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        alone, tree = read_resident([child.pid])[child.pid], read_tree_memory([child.pid])[child.pid]
        share = read_pss([child.pid])[child.pid]
        child.stdin.close()

    assert tree - alone > 30 * MiB
    assert 0 < share <= alone


def test_a_reading_of_thirty_processes_takes_under_a_hundredth_of_a_core(tmp_path, capsys):
    places = {"run": tmp_path, "scratch": tmp_path / "scratch", "temp": Path(tempfile.gettempdir())}
    meter = ResourceMeter(places, budget=512 * MiB, request=256 * MiB)
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(30)]
    try:
        pids = [child.pid for child in children]
        spent = least_cpu(lambda: meter.read(sum(read_resident(pids).values())))
    finally:
        for child in children:
            child.kill()
            child.wait()

    with capsys.disabled():
        print(f" [{spent * 1000:.2f} ms a reading]", end="")
    assert spent < CHEAP


def least_cpu(read, times: int = 20) -> float:
    """Of several: what else the machine does makes each one slower, never faster."""
    found = []
    for _ in range(times):
        before = time.process_time()
        read()
        found.append(time.process_time() - before)
    return min(found)
