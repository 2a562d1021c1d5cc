"""Runs a real registry and a real docker daemon for a benchmark, and counts the bytes that they exchange.

Other daemons on the machine are not affected: each one here has its own files, sockets and ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import http.client
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

DOCKER = "/usr/bin/docker"  # Debian's client: a newer one without buildx cannot build
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
STARTING = 60.0
CHUNK = 1 << 18


class Missing(Exception):
    """A requirement of the benchmark is missing."""


@contextmanager
def registry(place: Path) -> Iterator[int]:
    """Run a `docker-registry` on loopback; yield its port."""
    program = shutil.which("docker-registry")
    if program is None:
        raise Missing("`docker-registry` is not installed")
    port = free_port()
    place.mkdir(parents=True)
    config = place / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {place / 'data'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with running([program, "serve", str(config)], place / "log", lambda: answers(port)):
        yield port


@contextmanager
def daemon(place: Path, size: int, *, networks: bool = False) -> Iterator[tuple[str, Path]]:
    """Run a `dockerd` whose data root is its own file system of `size` bytes; yield its host and that root.

    With `networks` it can create networks; use that only in a separate network namespace.
    """
    program = shutil.which("dockerd")
    if program is None or os.geteuid() != 0:
        raise Missing("`dockerd` is not installed, or we are not root")
    root, disk = place / "root", place / "disk"
    root.mkdir(parents=True)
    with disk.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(disk)], check=True)
    subprocess.run(["mount", "-o", "loop", str(disk), str(root)], check=True)
    host = f"unix://{place}/docker.sock"
    words = ["--data-root", root, "--exec-root", place / "exec", "--pidfile", place / "pid", "-H", host]
    words += ["--bridge", "none", "--ip6tables=false", "--storage-driver", "overlay2"]
    words += ["--default-address-pool", "base=10.231.0.0/16,size=24"] if networks else ["--iptables=false"]
    try:
        with running(
            [program, *map(str, words)], place / "log", lambda: docker(host, "info", check=False) == 0
        ):
            yield host, root
    finally:
        subprocess.run(["umount", "-l", str(root)], check=False)
        disk.unlink()


def docker(host: str, *words: str, check: bool = True, **more: str) -> int:
    """Run Debian's docker client against one daemon."""
    done = subprocess.run(
        [DOCKER, "-H", host, *words],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "DOCKER_BUILDKIT": "1", **more},
        capture_output=True,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"docker {' '.join(words)}: {done.stderr.decode()[-2000:]}")
    return done.returncode


@contextmanager
def running(words: list[str], log: Path, ready: object) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
        try:
            until = time.monotonic() + STARTING
            while not ready():  # type: ignore[operator]
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{words[0]} did not start: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


class Traffic:
    """A context manager that forwards bytes to a registry and counts them."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = free_port()
        self.up = self.down = 0
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="traffic", daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._pass_on, "127.0.0.1", self.port))
        self._listening.set()
        self._loop.run_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back, "up"))
                group.create_task(self._pump(there, writer, "down"))

    async def _pump(self, source: asyncio.StreamReader, to: asyncio.StreamWriter, name: str) -> None:
        try:
            while piece := await source.read(CHUNK):
                setattr(self, name, getattr(self, name) + len(piece))
                to.write(piece)
                await to.drain()
        finally:
            to.close()


class Disk:
    """The maximum bytes used on a file system, or below directories, while it is watched."""

    def __init__(self, root: Path | None = None, below: tuple[Path, ...] = ()) -> None:
        self._root, self._below = root, below
        self._before = self._used()
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="disk")

    def __enter__(self) -> Disk:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.peak = max(self.peak, self._used() - self._before)

    def _used(self) -> int:
        if self._root is not None:
            told = os.statvfs(self._root)
            return (told.f_blocks - told.f_bfree) * told.f_frsize
        total = 0
        for place in self._below:
            for here, _, names in os.walk(place):
                for name in names:
                    with contextlib.suppress(OSError):
                        total += Path(here, name).lstat().st_blocks * 512
        return total


class Pusher:
    """Pushes the initial images of a benchmark into a registry without docker."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._known: set[tuple[str, str]] = set()

    def push(self, repository: str, tag: str, layers: list[tuple[bytes, str]], label: str) -> None:
        """Push an image; `layers` are gzipped tars, each with the digest of its uncompressed content."""
        config = msgspec.json.encode(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {"Labels": {"base": label}, "Env": ["PATH=/usr/bin:/bin"]},
                "rootfs": {"type": "layers", "diff_ids": [diff for _, diff in layers]},
                "history": [{"created_by": "benchmark"} for _ in layers],
            }
        )
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._blob(repository, config, "application/vnd.docker.container.image.v1+json"),
            "layers": [
                self._blob(repository, blob, "application/vnd.docker.image.rootfs.diff.tar.gzip")
                for blob, _ in layers
            ],
        }
        self._ask("PUT", f"/v2/{repository}/manifests/{tag}", msgspec.json.encode(manifest), MANIFEST)

    def close(self) -> None:
        self._connection.close()

    def _blob(self, repository: str, content: bytes, kind: str) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if (repository, digest) not in self._known:
            self._known.add((repository, digest))
            place = self._ask("POST", f"/v2/{repository}/blobs/uploads/")
            joint = "&" if "?" in place else "?"
            path = place.partition("//")[2].partition("/")[2]
            self._ask("PUT", f"/{path}{joint}digest={digest}", content, "application/octet-stream")
        return {"mediaType": kind, "size": len(content), "digest": digest}

    def _ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> str:
        self._connection.request(method, path, body, {"Content-Type": kind} if kind else {})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {content[:500]!r}")
        return answer.getheader("Location", "")


def layer(size: int, seed: str) -> tuple[bytes, str]:
    """Return a gzipped tar of `size` incompressible bytes, and the digest of its uncompressed content."""
    source = random.Random(seed)
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for number in range(max(1, size >> 20)):
            entry = tarfile.TarInfo(f"data/{seed}/{number}")
            entry.size = min(size, 1 << 20)
            tar.addfile(entry, io.BytesIO(source.randbytes(entry.size)))
    content = plain.getvalue()
    return gzip.compress(content, 1, mtime=0), f"sha256:{hashlib.sha256(content).hexdigest()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False
