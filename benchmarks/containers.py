"""Measures the start of a container up to its first command, next to `docker run`, and a run of hundreds.

    python benchmarks/containers.py [--quick] [--json] [--keep DIRECTORY]

A real `dockerd` runs with its own disk in its own network namespace; the image is a small Debian
(`scripts/test-image`). Our figure covers a sandbox on the run's network with all its limits, one command, and
its output. The plain figure is `docker run` of the same image on the same network until its output arrives.
Both are measured in alternation, under the same machine load. The benchmark needs root. It measures; it
asserts nothing.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import table
from daemons import DOCKER, Missing, daemon, docker
from gauge import Watch
from table import Row, at_most, say

from holdwater.core.records import Limits, MiB, Network, SandboxSpec
from holdwater.core.sandbox_kind import Containers
from holdwater.docker.client import DockerClient
from holdwater.sandbox.docker import network
from holdwater.sandbox.docker.sandboxes import DockerSandboxes

ROOT = Path(__file__).resolve().parent.parent
DEBIAN = ROOT / ".clients" / "debian.tar"
IMAGE = "debian:benchmark"
DISK = 4 << 30
MB = 1_000_000
APART = "HOLDWATER_BENCHMARK_APART"
LIMITS = Limits(memory=256 * MiB, pids=64, cpus=1.0)
SUITE = """\
import holdwater as hw

def instances():
    for number in range({count}):
        yield hw.Instance(id=f"i-{{number}}", start=hw.SandboxSpec(image="{image}", workdir="/work"))

async def grade(instance, sandbox, answer):
    return (await sandbox.run(["test", "-e", "made"])).ok

suite = hw.Suite(name="containers", instances=instances, grade=grade, size={count})

async def solve(instance, sandbox, model):
    await sandbox.write("made", "yes")
"""


def main() -> None:
    options = table.options(__doc__ or "")
    if os.environ.get(APART) != "1":  # its own networks and packet filter
        os.environ[APART] = "1"
        apart = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c"]
        line = 'ip link set lo up; exec "$0" "$@"'
        os.execvp(apart[0], [*apart, line, sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="hw-bench-") as place:
        rows = measured(options.keep or Path(place), quick=options.quick)
    table.show(rows, json=options.json)


def measured(place: Path, *, quick: bool) -> list[Row]:
    with ExitStack() as stack:
        try:
            if not DEBIAN.exists():
                raise Missing("there is no image: `scripts/test-image` makes it")
            host, _ = stack.enter_context(daemon(place / "docker", DISK, networks=True))
        except Missing as why:
            return [Row("containers", f"not measured: {why}")]
        docker(host, "import", str(DEBIAN), IMAGE)
        rows = asyncio.run(starts(host, 8 if quick else 60))
        return rows + many(host, place, 40 if quick else 300)


async def starts(host: str, count: int) -> list[Row]:
    """Measure the time until the first command's output."""
    rows: list[Row] = []
    containers = Containers(host=host, run="benchmark", home="benchmark")
    async with DockerClient(host) as client:
        await network.make_network(client, containers, Network.GATEWAY)
        sandboxes = DockerSandboxes(client, containers, Network.GATEWAY)
        numbers = iter(range(1, 1_000_000))

        async def ours() -> float:
            began = time.perf_counter()
            start = SandboxSpec(image=IMAGE, workdir="/work")
            async with sandboxes.open(next(numbers), LIMITS, None, start) as sandbox:
                assert (await sandbox.run(["echo", "here"])).stdout == "here\n"
                return time.perf_counter() - began

        plain = plainly(host, containers.network(Network.GATEWAY))
        for at_once in (1, 20):
            say(f"{count} starts, {at_once} at once")
            mine, theirs = await in_turns(ours, plain, count, at_once)
            for name, seconds in (("ours", mine), ("docker run", theirs)):
                p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
                who = "holdwater" if name == "ours" else name
                rows.append(
                    Row(f"start to first command, {at_once} at once, p50", round(p50 * 1e3), "ms", who=who)
                )
                rows.append(
                    Row(f"start to first command, {at_once} at once, p99", round(p99 * 1e3), "ms", who=who)
                )
            ratio = statistics.median(mine) / statistics.median(theirs)
            rows.append(at_most(f"the same, {at_once} at once, against `docker run`, p50", ratio, 1.1, "x"))
    return rows


def plainly(host: str, name: str) -> Callable[[], Awaitable[float]]:
    words = ["--rm", "--init", "--network", name, "--memory", "256m", "--memory-swap", "256m"]
    words += ["--pids-limit", "64", "--cpus", "1", "--workdir", "/work", IMAGE, "echo", "here"]

    async def plain() -> float:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            DOCKER,
            "-H",
            host,
            "run",
            *words,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        line = await process.stdout.readline()
        seconds = time.perf_counter() - began
        assert line == b"here\n", line
        await process.wait()
        return seconds

    return plain


async def in_turns(
    ours: Callable[[], Awaitable[float]], plain: Callable[[], Awaitable[float]], count: int, at_once: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of each, with alternating rounds."""
    seconds: tuple[list[float], list[float]] = ([], [])
    rounds = max(1, count // at_once) if at_once == 1 else max(2, count // at_once)
    for _ in range(rounds):
        for kind, found in zip((ours, plain), seconds, strict=True):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_of(kind)) for _ in range(at_once)]
            found += [task.result() for task in tasks]
    return seconds


async def _of(kind: Callable[[], Awaitable[float]]) -> float:
    return await kind()


def many(host: str, place: Path, count: int) -> list[Row]:
    """Run hundreds of containers: our CPU time per attempt, and memory from early to late."""
    say(f"{count} containers, 20 at once")
    suite = place / "containers_suite.py"
    suite.write_text(SUITE.format(count=count, image=IMAGE))
    words = [sys.executable, "-m", "holdwater", "run", f"{suite}:suite", "--agent", f"{suite}:solve"]
    words += ["--sandbox", "docker", "--sandbox-memory", "128MiB", "--concurrency", "20", "--quiet"]
    words += ["--out", str(place / "run")]
    env = {**os.environ, "DOCKER_HOST": host, "HOLDWATER_CACHE": str(place / "cache")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise each process compiles all modules again
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    pid = os.posix_spawn(sys.executable, words, env)
    with Watch(pid, lambda other: True) as watch:
        _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    early, late = watch.samples[len(watch.samples) // 4], watch.samples[-2]
    growth = (late.total - early.total) / MB
    return [
        Row(f"{count} containers", round(seconds, 1), f"s, exit {os.waitstatus_to_exitcode(status)}"),
        at_most("CPU of conductor and workers", cpu / count * 1e3, 50, "ms an attempt"),
        Row("memory after a quarter of them", round(early.total / MB, 1), "MB PSS"),
        Row("memory at the end", round(late.total / MB, 1), "MB PSS"),
        at_most("growth over the rest", growth, 10, "MB"),
    ]


if __name__ == "__main__":
    main()
