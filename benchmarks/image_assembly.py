"""Measures the cost of images: assembled in the registry, built by docker in a budget, in a plain loop.

    python benchmarks/image_assembly.py [--quick] [--json] [--keep DIRECTORY]

The bases have 91 MB (61 MB are shared) and the agent has 60 MB; the registry is a real `docker-registry`, the
daemon a real `dockerd` with its own disk. The loop is docker build, push, rmi and prune, one image after
another. Then 433 images, and 10,000 for memory, are assembled in the registry alone. The daemon needs root.
It measures; it asserts nothing.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import msgspec
import table
from daemons import Disk, Missing, Pusher, Traffic, daemon, docker, layer, registry
from gauge import Watch
from table import Row, at_most, say

MB = 1_000_000
MiB = 1 << 20
DISK = 3 << 30


class Cost(msgspec.Struct, frozen=True):
    """The cost of a number of images."""

    images: int
    seconds: float
    disk: int
    up: int
    down: int

    def rows(self, who: str) -> list[Row]:
        return [
            Row(f"{self.images} images", round(self.seconds / self.images, 3), "s an image", who=who),
            Row("peak disk", round(self.disk / MB, 1), "MB", who=who),
            Row("up", round(self.up / MB, 1), "MB", who=who),
            Row("down", round(self.down / MB, 1), "MB", who=who),
        ]


class Scene:
    """A registry with bases, an agent, and a proxy that counts the traffic."""

    def __init__(self, place: Path, stack: ExitStack, *, quick: bool) -> None:
        self.place = place
        self.count = 3 if quick else 20
        self.many = 40 if quick else 433
        self.most = 300 if quick else 10_000
        self._stack = stack
        self.registry = stack.enter_context(registry(place / "registry"))
        self.traffic = stack.enter_context(Traffic(self.registry))
        self.host = f"127.0.0.1:{self.traffic.port}"
        self.agent = place / "agent"
        self._make_agent(6 if quick else 60)
        self._push_bases((6, 3) if quick else (61, 30))

    def _make_agent(self, megabytes: int) -> None:
        source = random.Random("agent")
        self.agent.mkdir()
        for number in range(megabytes * 10):
            path = self.agent / f"{number % 10}" / f"file-{number}"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(source.randbytes(33_000) + b"x" * 67_000)  # a third does not compress

    def _push_bases(self, megabytes: tuple[int, int]) -> None:
        say(f"pushing {self.count} bases, and {self.most} small ones")
        pusher = Pusher(self.registry)
        shared = layer(megabytes[0] * MB, "shared")
        for number in range(self.count):
            pusher.push(
                "bases", f"b{number}", [shared, layer(megabytes[1] * MB, f"own-{number}")], str(number)
            )
        small = layer(1000, "small")
        for number in range(self.most):
            pusher.push("small", f"s{number}", [small], f"small-{number}")

    def recipe(self, repository: str, bases: list[str], *, engine: str) -> Path:
        path = self.place / f"{repository}.toml"
        names = "\n".join(f"{name} {self.host}/{name}" for name in bases)
        (self.place / f"{repository}.txt").write_text(names)
        path.write_text(
            f'[bases]\nfile = "{repository}.txt"\n[target]\nrepository = "{self.host}/{repository}"\n'
            f'[agent]\ndirectory = "agent"\nenv = {{AGENT = "1"}}\nentrypoint = ["/opt/agent/0/file-0"]\n'
            f'[build]\nengine = "{engine}"\nconcurrency = 16\n'
        )
        return path

    def build(self, recipe: Path, *words: str, host: str = "") -> subprocess.Popen[bytes]:
        out = self.place / "runs" / f"{recipe.stem}-{time.monotonic_ns()}"
        return self.run(recipe, "build", "--quiet", "--out", str(out), *words, host=host)

    def run(self, recipe: Path, verb: str, *words: str, host: str = "") -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "HOLDWATER_CACHE": str(self.place / "cache"),
            "TMPDIR": str(self.place / "tmp"),
            "PATH": f"/usr/bin:{os.environ['PATH']}",
        }
        (self.place / "tmp").mkdir(exist_ok=True)
        if host:
            environment["DOCKER_HOST"] = host
        line = [sys.executable, "-m", "holdwater", "images", verb, str(recipe), *words]
        with (self.place / "said").open("wb") as said:
            return subprocess.Popen(line, env=environment, stdout=said, stderr=said)

    def packed(self, recipe: Path) -> float:
        """Return the seconds of a plan and its layer; later steps find the layer in the cache."""
        began = time.monotonic()
        self.run(recipe, "plan").wait()
        return time.monotonic() - began

    def cost(self, recipe: Path, images: int, disk: Disk, *words: str, host: str = "") -> Cost:
        up, down, began = self.traffic.up, self.traffic.down, time.monotonic()
        with disk:
            process = self.build(recipe, *words, host=host)
            if status := process.wait():
                said = (self.place / "said").read_text()
                raise RuntimeError(f"the build ended with {status}: {recipe}: {said}")
        seconds = time.monotonic() - began
        return Cost(images, seconds, disk.peak, self.traffic.up - up, self.traffic.down - down)


def main() -> None:
    options = table.options(__doc__ or "")
    made = nullcontext(str(options.keep)) if options.keep else tempfile.TemporaryDirectory()
    with made as directory, ExitStack() as stack:
        try:
            rows = measured(Scene(Path(directory), stack, quick=options.quick), stack)
        except Missing as error:
            rows = [Row("not run", str(error))]
    if options.peers:
        rows.append(Row("not run", "the plain loop is what they do", who="peers"))
    table.show(rows, json=options.json)


def measured(scene: Scene, stack: ExitStack) -> list[Row]:
    bases = [f"bases:b{number}" for number in range(scene.count)]
    say("the agent's layer, once")
    packed = scene.packed(scene.recipe("packed", bases[:1], engine="registry"))
    say("in the registry")
    one = scene.cost(scene.recipe("one", bases[:1], engine="registry"), 1, Disk())
    beyond = Disk(below=(scene.place / "cache", scene.place / "tmp"))  # the layer exists by now
    appended = scene.cost(scene.recipe("appended", bases, engine="registry"), scene.count, beyond)
    host, root = stack.enter_context(daemon(scene.place / "docker", DISK))
    say("docker, inside a budget")
    built = scene.cost(scene.recipe("built", bases, engine="docker"), scene.count, Disk(root), host=host)
    say("the plain loop")
    looped = loop(scene, host, Disk(root))
    rows = [Row("the agent's layer, once", round(packed, 2), "s", who="registry")]
    rows += [*appended.rows("registry"), *built.rows("docker"), *looped.rows("loop")]
    each = (appended.seconds - one.seconds) / (scene.count - 1)
    rows.append(Row("a build of one image, start and end", round(one.seconds, 2), "s", who="registry"))
    rows.append(Row("each further image", round(each, 3), "s", who="registry"))
    faster = looped.seconds / scene.count / each
    rows.append(Row("registry against the loop, an image", round(faster, 1), "x", ">= 100", faster >= 100))
    whole = looped.seconds / appended.seconds
    rows.append(Row(f"the same, {scene.count} with start and end", round(whole, 1), "x"))
    shared = built.down / looped.down
    rows.append(Row("docker against the loop, pulled", round(shared, 2), "x its bytes"))
    slower = built.seconds / looped.seconds
    rows.append(Row("docker against the loop", round(slower, 2), "x its time", "<= 1", slower <= 1))
    return rows + many(scene)


def loop(scene: Scene, host: str, disk: Disk) -> Cost:
    """Do what scripts do: build, push, remove, prune, for each image."""
    context = scene.place / "context"
    context.mkdir()
    scene.agent.rename(context / "agent")
    up, down, began = scene.traffic.up, scene.traffic.down, time.monotonic()
    with disk:
        for number in range(scene.count):
            base, target = f"{scene.host}/bases:b{number}", f"{scene.host}/looped:b{number}"
            lines = f'FROM {base}\nCOPY agent /opt/agent\nENV AGENT=1\nENTRYPOINT ["/opt/agent/0/file-0"]\n'
            (context / "Dockerfile").write_text(lines)
            docker(host, "build", "-q", "-t", target, str(context))
            docker(host, "push", "-q", target)
            docker(host, "rmi", target)
            docker(host, "system", "prune", "-af")
            docker(host, "builder", "prune", "-af")
    seconds = time.monotonic() - began
    (context / "agent").rename(scene.agent)
    return Cost(scene.count, seconds, disk.peak, scene.traffic.up - up, scene.traffic.down - down)


def many(scene: Scene) -> list[Row]:
    """Measure the time of hundreds of images and the memory of ten thousand, directly in the registry."""
    rows = []
    scene.host = f"127.0.0.1:{scene.registry}"
    names = [f"small:s{number}" for number in range(scene.many)]
    say(f"{scene.many} images in the registry")
    cost, again = (
        scene.cost(scene.recipe("many", names, engine="registry"), scene.many, Disk()) for _ in range(2)
    )
    rows.append(at_most(f"{scene.many} images", cost.seconds, 30, "s"))
    rows.append(Row("the same again, all present", round(again.seconds, 2), "s"))
    say(f"{scene.most} images, for memory")
    most = scene.recipe("most", [f"small:s{number}" for number in range(scene.most)], engine="registry")
    began = time.monotonic()
    process = scene.build(most)
    with Watch(process.pid, lambda other: False) as watch:
        status = process.wait()
    rows.append(Row(f"{scene.most} images", round(time.monotonic() - began, 1), f"s, exit {status}"))
    early, late = watch.samples[len(watch.samples) // 4], watch.samples[-2]
    rows.append(Row("memory after a quarter of them", round(early.root / MB, 1), "MB PSS"))
    rows.append(Row("memory at the end", round(late.root / MB, 1), "MB PSS"))
    growth = (late.root - early.root) / MB
    rows.append(at_most("growth over the rest", growth, 10, "MB"))
    return rows


if __name__ == "__main__":
    main()
