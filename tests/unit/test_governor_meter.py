"""The meter, on trees of files that stand in for /proc and the control groups."""

import os
from pathlib import Path

import pytest

from holdwater.core.records import GiB, MiB
from holdwater.governor.meter import PAGE, Meter


class Kernel:
    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.cgroups = root / "cgroup"
        self.put(
            self.proc / "meminfo", f"MemTotal: {16 * MiB} kB\nMemFree: 1 kB\nMemAvailable: {12 * MiB} kB\n"
        )

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def in_groups(self, text: str) -> None:
        self.put(self.proc / "self/cgroup", text)

    def meter(self) -> Meter:
        return Meter(self.proc, proc=self.proc, cgroups=self.cgroups)


@pytest.fixture
def kernel(tmp_path):
    return Kernel(tmp_path)


def test_without_groups_the_machine_is_the_limit(kernel):
    limit = kernel.meter().limit()

    assert (limit.bytes, limit.source) == (16 * GiB, "the machine's memory")


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_the_smallest_limit_up_the_v2_tree_counts(kernel, name):
    kernel.in_groups("0::/pod/container\n")
    kernel.put(kernel.cgroups / "pod/container/memory.max", "max\n")
    kernel.put(kernel.cgroups / "pod/container/memory.high", "max\n")
    kernel.put(kernel.cgroups / "memory.max", str(9 * GiB))
    kernel.put(kernel.cgroups / "pod" / name, str(8 * GiB))

    limit = kernel.meter().limit()

    assert limit.bytes == 8 * GiB
    assert f"pod/{name}" in limit.source


def test_v2_in_a_container_that_sees_only_its_own_group(kernel):
    kernel.in_groups("0::/../../host/path\n")
    kernel.put(kernel.cgroups / "memory.max", str(2 * GiB))

    assert kernel.meter().limit().bytes == 2 * GiB


def test_v1_limits_above_what_is_in_sight_count(kernel):
    kernel.in_groups("4:memory:/docker/abc\n0::/\n")
    unlimited = "9223372036854771712"
    kernel.put(kernel.cgroups / "memory/memory.limit_in_bytes", unlimited)
    kernel.put(kernel.cgroups / "memory/memory.stat", f"cache 1\nhierarchical_memory_limit {3 * GiB}\n")

    assert kernel.meter().limit().bytes == 3 * GiB


def test_other_tenants_of_the_machine_shrink_the_limit(kernel):
    kernel.put(kernel.proc / "7/statm", "999 10 5 1 0 1 0")

    reading = kernel.meter().read([7])

    assert reading.memory == 10 * PAGE
    assert reading.memory_limit == 12 * GiB + 10 * PAGE


def test_a_process_that_has_gone_uses_nothing(kernel):
    kernel.put(kernel.proc / "7/statm", "999 10 5 1 0 1 0")
    kernel.put(kernel.proc / "7/smaps_rollup", "00-ff ---p 0 0 0 [rollup]\nRss: 40 kB\nPss: 24 kB\n")

    assert kernel.meter().read([7, 8]).memory == 10 * PAGE
    assert kernel.meter().read([7, 8], pss=True).memory == 24 * 1024


def test_the_real_kernel_agrees_with_itself():
    meter = Meter(Path("/"))

    reading = meter.read([os.getpid()])

    assert 4 * MiB < reading.memory < reading.memory_limit <= meter.limit().bytes
    assert 0 < reading.disk_free <= reading.disk_total
