"""The meter, on trees of files as kernels show them: version 1, version 2, both, from outside and inside."""

import os
from pathlib import Path

import pytest

from holdwater.core.records import GiB, MiB
from holdwater.governor.meter import ResourceMeter
from holdwater.governor.resource_reading import ResourceBound, ResourceReading

NO_LIMIT = 9223372036854771712  # as version 1 writes it
OWN = 100 * MiB


class Kernel:
    """A tree in the place of /proc and the control groups; the machine has 16 GiB, 12 of them available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.cgroups = root / "cgroup"
        self.put("proc/meminfo", f"MemTotal:  {16 * MiB} kB\nMemFree: 1 kB\nMemAvailable: {12 * MiB} kB\n")

    def put(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def is_in(self, *lines: str) -> None:
        self.put("proc/self/cgroup", "\n".join(lines))

    def v2(self, group: str, maximum: object = "max", high: object = "max", anon: int = 0) -> None:
        """Beside `anon` it holds 8 MiB of shared memory and 2 GiB of page cache, half of it inactive."""
        at = f"cgroup/{group}".rstrip("/")
        self.put(f"{at}/memory.max", maximum)
        self.put(f"{at}/memory.high", high)
        self.put(f"{at}/memory.current", anon + 8 * MiB + 2 * GiB)
        self.put(
            f"{at}/memory.stat",
            f"anon {anon}\nfile {2 * GiB + 8 * MiB}\nkernel_stack 16384\nshmem {8 * MiB}\n"
            f"inactive_anon 0\nactive_anon {anon}\ninactive_file {GiB}\nactive_file {GiB}",
        )

    def v1(self, group: str, limit: int = NO_LIMIT, smallest: int = NO_LIMIT, rss: int = 0) -> None:
        """The same in version 1; of `rss` bytes, 1 MiB is the group's own and the rest of groups below it."""
        at = f"cgroup/memory/{group}".rstrip("/")
        self.put(f"{at}/memory.limit_in_bytes", limit)
        self.put(f"{at}/memory.usage_in_bytes", rss + 8 * MiB + 2 * GiB)
        self.put(
            f"{at}/memory.stat",
            f"cache {MiB}\nrss {MiB}\nshmem 0\ninactive_file 0\nhierarchical_memory_limit {smallest}\n"
            f"total_cache {2 * GiB}\ntotal_rss {rss}\ntotal_shmem {8 * MiB}\ntotal_inactive_file {GiB}",
        )

    def meter(self, budget: int | None = None, request: int | None = None) -> ResourceMeter:
        return ResourceMeter({"run": self.root}, budget, request, proc=self.proc, cgroups=self.cgroups)

    def read(self, own: int = OWN) -> ResourceReading:
        return self.meter().read(own)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def shape(bound: ResourceBound) -> tuple[str, int, int]:
    return bound.name, bound.limit, bound.used


def containers(reading: ResourceReading) -> list[tuple[int, int]]:
    return [(bound.limit, bound.used) for bound in reading.bounds if bound.name == "container"]


def test_without_groups_there_is_what_the_machine_has_available_beside_others(kernel):
    reading = kernel.read()

    assert [shape(bound) for bound in reading.bounds] == [("machine", OWN + 12 * GiB, OWN)]
    assert reading.bound.room == 12 * GiB
    assert shape(kernel.meter().limit()) == ("machine", 16 * GiB, 4 * GiB)


@pytest.mark.parametrize(("maximum", "high"), [(4 * GiB, "max"), ("max", 4 * GiB), (6 * GiB, 4 * GiB)])
def test_v2(kernel, maximum, high):
    kernel.is_in("0::/pod/box")
    kernel.v2("pod/box", maximum, high, anon=GiB)

    reading = kernel.read()

    assert shape(reading.bound) == ("container", 4 * GiB, GiB + 8 * MiB), "page cache is not use"
    assert "/pod/box/memory." in reading.bound.source


def test_v2_the_smaller_limit_is_above(kernel):
    kernel.is_in("0::/pod/box")
    kernel.v2("pod/box", 6 * GiB, anon=GiB)
    kernel.v2("pod", 4 * GiB, anon=2 * GiB)
    kernel.v2("")

    assert containers(kernel.read()) == [(4 * GiB, 2 * GiB + 8 * MiB), (6 * GiB, GiB + 8 * MiB)]
    assert kernel.meter().limit().limit == 4 * GiB


def test_v2_a_larger_limit_above_is_tighter_when_neighbours_have_used_it(kernel):
    kernel.is_in("0::/pod/box")
    kernel.v2("pod/box", 4 * GiB, anon=GiB)
    kernel.v2("pod", 8 * GiB, anon=7 * GiB)

    assert shape(kernel.read().bound) == ("container", 8 * GiB, 7 * GiB + 8 * MiB)
    assert kernel.meter().limit().limit == 4 * GiB


@pytest.mark.parametrize("path", ["/../../host/path", "/kubepods/pod1/box", "/", "/gone (deleted)"])
def test_v2_in_a_container_that_sees_its_own_group_as_the_root(kernel, path):
    kernel.is_in(f"0::{path}")
    kernel.v2("", 2 * GiB, anon=GiB)

    assert containers(kernel.read()) == [(2 * GiB, GiB + 8 * MiB)]


def test_a_container_finds_its_own_group_behind_the_path_of_the_host(kernel):
    kernel.is_in("4:memory:/docker/abc/inner")
    kernel.v1("", 2 * GiB, smallest=2 * GiB)
    kernel.v1("inner", GiB, smallest=GiB)

    assert kernel.read().bound.limit == GiB


def test_v1(kernel):
    kernel.is_in("9:name=systemd:/", "4:cpu,memory:/box", "2:pids:/")
    kernel.v1("box", 4 * GiB, smallest=4 * GiB, rss=GiB)
    kernel.v1("", rss=9 * GiB)

    assert containers(kernel.read()) == [(4 * GiB, GiB + 8 * MiB)]


def test_v1_finds_a_limit_above_the_visible_groups(kernel):
    kernel.is_in("4:memory:/kubepods/pod1/box")
    kernel.v1("", 6 * GiB, smallest=3 * GiB, rss=GiB)

    reading = kernel.read()

    assert containers(reading) == [(3 * GiB, GiB + 8 * MiB), (6 * GiB, GiB + 8 * MiB)]
    assert "hierarchical_memory_limit" in reading.bound.source


def test_v1_a_limit_above_that_does_not_count_its_children(kernel):
    kernel.is_in("4:memory:/top/box")
    kernel.v1("top/box", 4 * GiB, smallest=4 * GiB)
    kernel.v1("top", GiB, smallest=GiB)

    assert [limit for limit, _ in containers(kernel.read())] == [4 * GiB]


def test_hybrid_memory_is_in_v1_and_pressure_in_v2(kernel):
    kernel.is_in("4:memory:/box", "0::/box")
    kernel.v1("box", 4 * GiB, smallest=4 * GiB, rss=GiB)
    kernel.put("cgroup/unified/cgroup.controllers", "")
    kernel.put("cgroup/unified/box/memory.pressure", "some avg10=3.25 avg60=0.00 avg300=0.00 total=7")
    kernel.put("proc/pressure/memory", "some avg10=9.00 avg60=0.00 avg300=0.00 total=7")

    reading = kernel.read()

    assert containers(reading) == [(4 * GiB, GiB + 8 * MiB)]
    assert reading.pressure == 3.25


def test_groups_without_a_limit_do_not_bind(kernel):
    kernel.is_in("0::/box")
    kernel.v2("box")

    assert containers(kernel.read()) == []

    kernel.is_in("4:memory:/box", "0::/")
    kernel.v1("box")
    kernel.v1("")

    assert containers(kernel.read()) == []


@pytest.mark.parametrize("name", ["self/cgroup", "meminfo", "pressure/memory", "self/mountinfo"])
def test_what_of_the_kernel_cannot_be_read_says_nothing(kernel, name):
    (kernel.proc / name).unlink(missing_ok=True)
    (kernel.proc / name).mkdir(parents=True)

    reading = kernel.read()

    assert [bound.name for bound in reading.bounds] == ["machine"]
    assert reading.bound.room > 0
    assert (reading.pressure, reading.oom_kills) == (None, 0)


def test_a_limit_whose_use_cannot_be_read_is_measured_by_what_can(kernel):
    kernel.is_in("garbage", "0::/box")
    kernel.put("cgroup/box/memory.max", GiB)
    (kernel.cgroups / "box/memory.high").mkdir()

    assert containers(kernel.read()) == [(GiB, OWN)]

    kernel.put("cgroup/box/memory.current", 300 * MiB)

    assert containers(kernel.read()) == [(GiB, 300 * MiB)]


def test_a_changed_limit_and_a_move_are_followed(kernel):
    meter = kernel.meter()
    kernel.is_in("0::/box")
    kernel.v2("box", 4 * GiB)
    kernel.v2("other", GiB)
    assert meter.read(OWN).bound.limit == 4 * GiB

    kernel.v2("box", 3 * GiB)
    assert meter.read(OWN).bound.limit == 3 * GiB

    kernel.is_in("0::/other")
    assert meter.read(OWN).bound.limit == GiB


def test_the_tightest_is_first_and_over_a_limit_there_is_no_room(kernel):
    kernel.is_in("0::/box")
    kernel.v2("box", 4 * GiB, anon=GiB)

    reading = kernel.meter(budget=2 * GiB).read(own=3 * GiB)

    assert [bound.name for bound in reading.bounds] == ["budget", "container", "machine"]
    assert (reading.bound.used, reading.bound.room) == (3 * GiB, 0)


@pytest.mark.parametrize("version", [1, 2])
def test_against_the_pods_request_counts_the_working_set_of_the_container(kernel, version):
    if version == 1:
        kernel.is_in("4:memory:/kubepods/pod1/box")
        kernel.v1("", rss=GiB)
    else:
        kernel.is_in("0::/")
        kernel.v2("", anon=GiB)

    reading = kernel.meter(request=4 * GiB).read(OWN)

    assert shape(reading.bounds[0]) == ("pod", 4 * GiB, 2 * GiB + 8 * MiB)


def test_the_machines_root_is_not_taken_for_a_pod(kernel):
    kernel.is_in("4:memory:/")
    kernel.v1("", rss=9 * GiB)
    kernel.put("cgroup/memory/release_agent", "")

    assert shape(kernel.meter(request=GiB).read(OWN).bounds[0]) == ("pod", GiB, OWN)


def test_kills_are_those_of_our_own_group(kernel):
    kernel.is_in("4:memory:/box")
    kernel.put("cgroup/memory/box/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    assert kernel.read().oom_kills == 3

    kernel.is_in("0::/box")
    kernel.put("cgroup/box/memory.events", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 7\noom_group_kill 0")
    assert kernel.read().oom_kills == 7

    kernel.put("cgroup/box/memory.events.local", "low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0")
    assert kernel.read().oom_kills == 1


def test_pressure_is_the_machines_where_the_group_has_none(kernel):
    kernel.is_in("0::/box")
    kernel.put("proc/pressure/memory", "some avg10=9.50 avg60=0.00 avg300=0.00 total=7\nfull avg10=1.00")

    assert kernel.read().pressure == 9.5


def test_places_on_one_file_system_are_one_disk_and_tmpfs_is_memory(kernel, tmp_path):
    device = tmp_path.stat().st_dev
    mount = f"27 1 {os.major(device)}:{os.minor(device)} / /x rw,relatime shared:1 - tmpfs tmpfs rw"
    kernel.put("proc/self/mountinfo", mount)
    places = {"run": tmp_path, "scratch": tmp_path / "not/yet/made", "kernel": Path("/proc")}

    run, other = ResourceMeter(places, proc=kernel.proc, cgroups=kernel.cgroups).read(0).disks

    assert (run.names, run.memory, other.names, other.memory) == (
        ("run", "scratch"),
        True,
        ("kernel",),
        False,
    )
    assert 0 < run.free <= run.total
    assert (other.free, other.total) == (0, 0), "it has no size"


@pytest.mark.parametrize(
    ("mounted", "filesystem", "memory"),
    [
        ("ext4 /dev/vda rw", "ext4", False),
        ("overlay overlay rw,lowerdir=/a,upperdir=/b", "overlay", False),
        ("ramfs none rw", "ramfs", True),
        ("ext4 /dev/ram0 rw", "ext4", True),
        ("xfs /dev/zram1 rw", "xfs", True),
    ],
)
def test_the_type_of_a_file_system_tells_whether_it_is_memory(kernel, tmp_path, mounted, filesystem, memory):
    device = tmp_path.stat().st_dev
    kernel.put("proc/self/mountinfo", f"27 1 {os.major(device)}:{os.minor(device)} / /x rw - {mounted}")

    (disk,) = ResourceMeter({"cache": tmp_path}, proc=kernel.proc, cgroups=kernel.cgroups).read(0).disks

    assert (disk.filesystem, disk.memory) == (filesystem, memory)


def test_the_real_kernel_agrees_with_itself():
    meter = ResourceMeter({"run": Path("/"), "temp": Path("/dev/shm")})

    reading = meter.read(own=OWN)

    assert 0 < reading.bound.room <= meter.limit().limit
    assert 0 < reading.disk("run").free <= reading.disk("run").total
    assert reading.disk("temp").memory and not reading.disk("run").memory


def test_a_pods_request_holds_only_where_its_node_is_short_of_memory():
    pod = ResourceBound("pod", GiB, GiB, "")
    roomy, short = (
        ResourceBound("machine", 10 * GiB, 2 * GiB, ""),
        ResourceBound("machine", 10 * GiB, 9 * GiB + GiB // 2, ""),
    )

    def reading(machine: ResourceBound) -> ResourceReading:
        return ResourceReading(bounds=(pod, machine), disks=(), pressure=None, oom_kills=0)

    assert reading(roomy).bound is roomy and reading(roomy).holding == (roomy,)
    assert reading(short).bound is pod
