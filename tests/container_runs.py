"""Runs in containers: a docker daemon in a network name space of its own, and commands in it.

The daemon can be stopped and started again. Nothing of the machine's own networks is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, until
from tests.docker_daemon import (
    PATIENCE,
    _answers,
    _awaited,
    _client,
    _mounted,
    _orphans_ended,
    _unmounted,
    needed,
)
from tests.wait_bounds import stretch

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / ".clients"
DEBIAN = CLIENTS / "debian.tar"
IMAGE = "debian:test"
MB = 1_000_000
DISK = 6_000 * MB  # of the daemon; a file with holes


class Ground:
    """A daemon with a small Debian in it, and a place of the network for everything that talks to it."""

    def __init__(self, place: Path, short: Path, holder: int) -> None:
        self.place = place
        self.data = place / "data"
        self.host = f"unix://{short}/docker.sock"
        self.network = f"/proc/{holder}/ns/net"
        self.before = ("nsenter", f"--net={self.network}")
        self._short = short
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["dockerd", "--data-root", self.data, "--exec-root", self._short / "exec", "--pidfile"]
        words += [self._short / "pid", "-H", self.host, "--bridge", "none", "--ip6tables=false"]
        words += ["--default-address-pool", "base=10.232.0.0/16,size=24", "--config-file", self._empty()]
        (self.place / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # in the daemon's own network
        resolver = f"mount --bind '{self.place}/resolv.conf' /etc/resolv.conf && exec \"$@\""
        apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c", resolver, "sh"]
        with (self.place / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen([*self.before, *apart, *words], stdout=log, stderr=log)
        sock = Path(self.host.removeprefix("unix://"))
        _awaited(lambda: _answers(sock), self._process, self.place / "dockerd.log")

    def stop(self, number: int = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(stretch(PATIENCE))
            # Its containerd goes with it, and may be a zombie for long: that would count as one that runs.
            (self._short / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def docker(self, *words: str) -> str:
        done = subprocess.run(
            [_client(), "-H", self.host, *words], capture_output=True, text=True, timeout=stretch(120)
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def logs(self, container: str) -> tuple[str, str]:
        """What a container has printed: stdout and stderr."""
        words = [_client(), "-H", self.host, "logs", container]
        done = subprocess.run(words, capture_output=True, text=True, timeout=stretch(30), check=True)
        return done.stdout, done.stderr

    def inside(self, *words: str) -> str:
        """What a program says that is run in the daemon's network."""
        return subprocess.check_output([*self.before, *words], text=True, timeout=stretch(30))

    def scene(self, place: Path) -> Scene:
        env = {"DOCKER_HOST": self.host, "HOLDWATER_CACHE": str(place / "cache")}
        return Scene(place, env=env, network=self.network)

    @contextmanager
    def registry(self) -> Iterator[str]:
        """A real registry in the daemon's network, with the image in it; its address."""
        needed("docker-registry")
        host = "127.0.0.1:5000"
        told = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(self.place / "registry")}},
            "http": {"addr": host},
        }
        (self.place / "registry.yml").write_text(json.dumps(told))
        words = [*self.before, "docker-registry", "serve", str(self.place / "registry.yml")]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            ask = ("python3", "-c", f"import urllib.request as u; u.urlopen('http://{host}/v2/')")
            until(
                "the registry",
                lambda: subprocess.run([*self.before, *ask], capture_output=True).returncode == 0,
            )
            self.docker("tag", IMAGE, f"{host}/{IMAGE}")
            self.docker("push", "--quiet", f"{host}/{IMAGE}")
            self.docker("rmi", f"{host}/{IMAGE}")
            yield host
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(self.place / "registry", ignore_errors=True)

    def left(self) -> dict[str, Any]:
        """Everything that a run could leave."""
        return {
            "containers": self.docker("ps", "--all", "--format", "{{.Names}} {{.Status}}").split("\n")[:-1],
            "networks": [
                name
                for name in self.docker("network", "ls", "--format", "{{.Name}}").split()
                if name not in ("host", "none")
            ],
            "volumes": self.docker("volume", "ls", "--quiet").split(),
            "mounts": [line for line in self._mounts() if f"{self.data}/overlay2/" in line],
            "rules": [line for line in self.inside("iptables", "-S").splitlines() if "holdwater" in line],
        }

    def assert_clean(self) -> None:
        left = self.left()
        assert left == {"containers": [], "networks": [], "volumes": [], "mounts": [], "rules": []}, left

    def images(self) -> set[str]:
        return set(self.docker("images", "--format", "{{.Repository}}:{{.Tag}}").split())

    def used(self) -> int:
        told = os.statvfs(self.data)
        return (told.f_blocks - told.f_bfree) * told.f_frsize

    def _mounts(self) -> list[str]:
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/mounts").read_text().splitlines()

    def _empty(self) -> Path:
        (self.place / "none.json").write_text("{}")
        return self.place / "none.json"


@contextmanager
def ground(place: Path) -> Iterator[Ground]:
    """A daemon below `place`; a visible skip where there can be none, except in CI."""
    needed("dockerd", "docker", "unshare", "nsenter", "ip", "iptables")
    if not DEBIAN.exists():
        assert os.environ.get("CI") != "true", "`scripts/test-image` has made no image"
        pytest.skip("there is no image to start from: `scripts/test-image` makes it")
    (place / "data").mkdir(parents=True)
    with (place / "disk.img").open("wb") as disk:
        disk.truncate(DISK)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", place / "disk.img"], check=True, capture_output=True)
    _mounted(f"mount -o loop {place / 'disk.img'} {place / 'data'}")
    short = Path(tempfile.mkdtemp(prefix="hw-"))  # a socket's path has at most 107 characters
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up; echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        found = Ground(place, short, holder.pid)
        found.start()
        try:
            found.docker("import", str(DEBIAN), IMAGE)
            yield found
        finally:
            found.stop()
    finally:
        holder.kill()
        holder.communicate()
        _orphans_ended(short)
        _unmounted(place)
        _unmounted(short)
        shutil.rmtree(short, ignore_errors=True)
        (place / "disk.img").unlink()


def listed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
