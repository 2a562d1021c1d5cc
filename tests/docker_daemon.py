"""A docker daemon and a registry of the tests' own, real ones, with bases made here: nothing is pulled.

Everything lies below a temporary directory; the daemon's data on a file system of a given size if asked for.
Where there is no daemon or no root it is a visible skip, except in CI.
"""

from __future__ import annotations

import base64
import ctypes
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.wait_bounds import stretch

from holdwater.core.errors import ImageFailed
from holdwater.core.image import KEY_LABEL, ImageLayer, ImagePlatform
from holdwater.image.docker.bases import BaseImage, BaseLayer
from holdwater.image.docker.engine import BuildOptions

SCHEMA2 = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
BLOB = "application/vnd.docker.image.rootfs.diff.tar.gzip"
PROGRAMS = ("sh", "cat", "mkdir", "sleep", "chown", "ls", "ln")
MB = 1_000_000
WAY = BuildOptions(network="none")  # the daemon has no bridge
PATIENCE = 60.0  # seconds of a quiet machine for a daemon to come or to go


def needed(*programs: str) -> None:
    """Skip the test where it cannot be played, but never in CI."""
    missing = [f"`{one}` is not installed" for one in programs if shutil.which(one) is None]
    if os.geteuid() != 0:
        missing.append("not root")
    if missing:
        assert os.environ.get("CI") != "true", missing
        pytest.skip(f"no docker daemon can be started here: {', '.join(missing)}")


class Daemon:
    """A running dockerd."""

    def __init__(self, place: Path, sock: Path, process: subprocess.Popen[bytes]) -> None:
        self.data = place / "data"
        self.host = f"unix://{sock}"
        self.process = process
        self._sock = sock
        self._log = place / "dockerd.log"
        self._mounts = os.open(f"/proc/{process.pid}/ns/mnt", os.O_RDONLY)
        self._net = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)

    def kill(self) -> None:
        """As a crash does: its containers run on until it is there again."""
        self.process.kill()
        self.process.wait()
        # Its containerd goes with it, and may be a zombie for long: that would count as one that runs.
        (self._sock.parent / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def start(self) -> None:
        """The same again, where its mounts and networks are."""
        enter = [
            "nsenter",
            f"--mount=/proc/self/fd/{self._mounts}",
            f"--net=/proc/self/fd/{self._net}",
            "--",
            "sh",
            "-c",
            str(self.process.args[-1]),
        ]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(enter, stdout=log, stderr=log, pass_fds=[self._mounts, self._net])
        _awaited(lambda: _answers(self._sock), self.process, self._log)

    def listener(self, host: str) -> socket.socket:
        """A socket that listens at this address, where the daemon's networks are."""

        def listen() -> socket.socket:
            assert ctypes.CDLL(None, use_errno=True).setns(self._net, 0) == 0, os.strerror(ctypes.get_errno())
            return socket.create_server((host, 0))

        with ThreadPoolExecutor(1) as thread:  # a thread can be elsewhere than its process
            return thread.submit(listen).result()

    def close(self) -> None:
        os.close(self._mounts)
        os.close(self._net)
        _stopped(self.process)

    def docker(self, *arguments: str, data: bytes | None = None, check: bool = True) -> str:
        """What others do on the daemon, with a client of theirs."""
        return self.raw(*arguments, data=data, check=check).decode()

    def raw(self, *arguments: str, data: bytes | None = None, check: bool = True) -> bytes:
        done = subprocess.run(
            [_client(), "-H", self.host, *arguments],
            input=data,
            capture_output=True,
            timeout=stretch(60),
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
        )
        assert not check or done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def free(self) -> int:
        told = os.statvfs(self.data)
        return told.f_bavail * told.f_frsize

    def images(self) -> set[str]:
        """All that has a name, and what has none."""
        listed = self.docker(
            "images", "--all", "--digests", "--format", "{{.Repository}}:{{.Tag}}@{{.Digest}}"
        )
        return set(listed.split())

    def records(self) -> dict[str, dict[str, Any]]:
        """The build cache, without what changes while nothing happens: "30 seconds ago"."""
        told = json.loads(self.docker("system", "df", "--verbose", "--format", "{{json .BuildCache}}"))
        return {
            one["ID"]: {name: value for name, value in one.items() if not name.endswith("Since")}
            for one in told or ()
        }


@contextmanager
def daemon(
    place: Path, size: int | None = None, *, apart: bool = False, networks: str = ""
) -> Iterator[Daemon]:
    """A daemon below `place`; with `size`, its data on a file system of so many bytes.

    `apart`: that file system is mounted for the daemon alone. `networks`: where it may take addresses for
    networks from, in a name space of its own; none otherwise.
    """
    needed("dockerd", "docker", "mkfs.ext4", "losetup", "unshare")
    data = place / "data"
    data.mkdir(parents=True)
    before = ""
    if size is not None:
        disk = place / "disk.img"
        with disk.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk], check=True, capture_output=True)
        before = f"mount -o loop {disk} {data} && "
        if not apart:
            _mounted(f"{before}true")
            before = ""
    short = Path(tempfile.mkdtemp(prefix="hw-"))  # a socket's path has at most 107 characters
    try:
        with _running(place, short, before, networks) as process:
            found = Daemon(place, short / "docker.sock", process)
            try:
                yield found
            finally:
                found.close()
    finally:
        _orphans_ended(short)
        _unmounted(place)
        _unmounted(short)
        shutil.rmtree(short)
        shutil.rmtree(data, ignore_errors=True)
        (place / "disk.img").unlink(missing_ok=True)


def _mounted(command: str) -> None:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    if done.returncode:
        assert os.environ.get("CI") != "true", done.stderr
        pytest.skip(f"no file system can be mounted from a file here: {done.stderr.strip()}")


@contextmanager
def _running(place: Path, short: Path, before: str, networks: str) -> Iterator[subprocess.Popen[bytes]]:
    sock = short / "docker.sock"
    net = f"--default-address-pool base={networks},size=24" if networks else "--iptables=false"
    command = (
        f"exec dockerd --data-root {place}/data --exec-root {short}/exec --pidfile {short}/pid "
        f"-H unix://{sock} --bridge none {net} --ip6tables=false --config-file {place}/none.json"
    )
    (place / "none.json").write_text("{}")
    # A mount name space of its own: one that others make meanwhile would take its mounts along, and with them
    # hold what it has removed.
    own = ["--net"] if networks else []
    before = f"ip link set lo up && {before}" if networks else before
    apart = ["unshare", *own, "--mount", "--propagation", "private", "sh", "-c", before + command]
    with (place / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(apart, stdout=log, stderr=log)
    try:
        _awaited(lambda: _answers(sock), process, place / "dockerd.log")
        yield process
    finally:
        _stopped(process)


def _stopped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(stretch(PATIENCE))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Registry:
    """A real docker-registry, and how bases get into it: straight, without a daemon."""

    def __init__(self, port: int) -> None:
        self.host = f"127.0.0.1:{port}"
        self.url = f"http://{self.host}"

    def put(
        self, name: str, layers: Sequence[bytes], config: dict[str, Any] | None = None, tag: str = "1"
    ) -> str:
        """An image of these (unpacked) layers; its reference."""
        packed = [gzip.compress(layer, 0 if len(layer) > 5 * MB else 1, mtime=0) for layer in layers]
        content = {
            "architecture": "amd64",
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer) for layer in layers]},
            "history": [{"created_by": f"layer {number}"} for number in range(len(layers))],
        }
        image = json.dumps(content).encode()
        for blob in (*packed, image):
            self._blob(name, blob)
        manifest = {
            "schemaVersion": 2,
            "mediaType": SCHEMA2,
            "config": {"mediaType": CONFIG, "size": len(image), "digest": _digest(image)},
            "layers": [{"mediaType": BLOB, "size": len(blob), "digest": _digest(blob)} for blob in packed],
        }
        self.ask("PUT", f"/v2/{name}/manifests/{tag}", json.dumps(manifest).encode(), SCHEMA2)
        return f"{self.host}/{name}:{tag}"

    def manifest(self, name: str, tag: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("GET", f"/v2/{name}/manifests/{tag}"))
        return found

    def config(self, name: str, tag: str) -> dict[str, Any]:
        digest = self.manifest(name, tag)["config"]["digest"]
        found: dict[str, Any] = json.loads(self.ask("GET", f"/v2/{name}/blobs/{digest}"))
        return found

    def tags(self, name: str) -> set[str]:
        try:
            return set(json.loads(self.ask("GET", f"/v2/{name}/tags/list"))["tags"] or ())
        except urllib.error.HTTPError:
            return set()

    def ask(self, method: str, path: str, data: bytes | None = None, kind: str = "") -> bytes:
        headers = {"Accept": SCHEMA2, **({"Content-Type": kind} if kind else {})}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=stretch(30)) as answer:
            return bytes(answer.read())

    def _blob(self, name: str, blob: bytes) -> None:
        digest = _digest(blob)
        request = urllib.request.Request(f"{self.url}/v2/{name}/blobs/uploads/", b"", method="POST")
        with urllib.request.urlopen(request, timeout=stretch(30)) as answer:
            where = answer.headers["Location"]
        where = where if where.startswith("http") else self.url + where
        path = f"{where.removeprefix(self.url)}{'&' if '?' in where else '?'}digest={digest}"
        self.ask("PUT", path, blob, "application/octet-stream")


@contextmanager
def registry(place: Path) -> Iterator[Registry]:
    needed("docker-registry")
    place.mkdir(parents=True, exist_ok=True)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    told = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(place / "blobs")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (place / "registry.yml").write_text(json.dumps(told))
    with (place / "registry.log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", place / "registry.yml"], stdout=log, stderr=log
        )
    try:
        found = Registry(port)
        _awaited(lambda: _serves(found), process, place / "registry.log")
        yield found
    finally:
        process.terminate()
        process.wait(stretch(PATIENCE))
        shutil.rmtree(place / "blobs", ignore_errors=True)


class RegistryBases:
    """What the engine asks of registries, over HTTP, as simply as it goes."""

    async def find_base(self, reference: str, platform: ImagePlatform) -> BaseImage:
        host, name, tag = _parts(reference)
        async with aiohttp.ClientSession(f"http://{host}") as session:
            async with session.get(f"/v2/{name}/manifests/{tag}", headers={"Accept": SCHEMA2}) as answer:
                if answer.status != 200:
                    raise ImageFailed(f"no base: `{reference}`: {answer.status}", kind="missing", again=False)
                digest = answer.headers["Docker-Content-Digest"]
                manifest = json.loads(await answer.read())
            async with session.get(f"/v2/{name}/blobs/{manifest['config']['digest']}") as answer:
                config = json.loads(await answer.read())
        pairs = zip(manifest["layers"], config["rootfs"]["diff_ids"], strict=True)
        layers = tuple(BaseLayer(digest=one["digest"], size=one["size"], diff_id=diff) for one, diff in pairs)
        unpacked = 2 * layers[0].size + sum(int(layer.size * 1.05) for layer in layers)
        return BaseImage(digest=digest, config=manifest["config"]["digest"], layers=layers, unpacked=unpacked)

    async def find_tag(self, reference: str) -> tuple[str, str] | None:
        host, name, tag = _parts(reference)
        async with aiohttp.ClientSession(f"http://{host}") as session:
            async with session.get(f"/v2/{name}/manifests/{tag}", headers={"Accept": SCHEMA2}) as answer:
                if answer.status == 404:
                    return None
                digest = answer.headers["Docker-Content-Digest"]
                config = json.loads(await answer.read())["config"]["digest"]
            async with session.get(f"/v2/{name}/blobs/{config}") as answer:
                labels = json.loads(await answer.read())["config"].get("Labels") or {}
        return digest, labels.get(KEY_LABEL, "")

    async def alias(self, reference: str, tag: str) -> None:
        host, name, old = _parts(reference)
        async with aiohttp.ClientSession(f"http://{host}") as session:
            async with session.get(f"/v2/{name}/manifests/{old}", headers={"Accept": SCHEMA2}) as answer:
                content, kind = await answer.read(), answer.headers["Content-Type"]
            put = session.put(f"/v2/{name}/manifests/{tag}", data=content, headers={"Content-Type": kind})
            async with put as answer:
                assert answer.status == 201

    async def auth(self, host: str) -> str:
        return base64.urlsafe_b64encode(json.dumps({"username": "a", "password": "b"}).encode()).decode()


class Watched:
    """Progress, remembered."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.highest = 0

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def disk(self, bytes_: int) -> None:
        self.highest = max(self.highest, bytes_)


class Notes(list[tuple[str, str]]):
    """What was noted, but for the choice of a client, which depends on the machine."""

    def __call__(self, kind: str, message: str) -> None:
        if kind != "docker.client":
            self.append((kind, message))


def tar(entries: Sequence[tarfile.TarInfo | tuple[str, bytes]]) -> bytes:
    """A tar of these: whole entries, or a file's name and content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                made.addfile(entry)
                continue
            info = tarfile.TarInfo(entry[0])
            info.size, info.mode = len(entry[1]), 0o644
            made.addfile(info, io.BytesIO(entry[1]))
    return buffer.getvalue()


def root() -> bytes:
    """The layer of a base in which a shell runs: some programs of this machine, and their libraries."""
    files: dict[str, Path] = {}
    for name in PROGRAMS:
        program = Path(shutil.which(name) or f"/bin/{name}")
        files[f"bin/{name}"] = program.resolve()
        for library in re.findall(r"(/\S+) \(0x", subprocess.check_output(["ldd", program], text=True)):
            files[library.lstrip("/")] = Path(library).resolve()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, path in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = path.stat().st_size, 0o755
            with path.open("rb") as file:
                made.addfile(info, file)
        users = b"root:x:0:0::/:/bin/sh\nagent:x:1000:1000::/:/bin/sh\n"
        for name, content in (("etc/passwd", users), ("etc/group", b"root:x:0:\nagent:x:1000:\n")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def noise(size: int, name: str = "data/noise") -> bytes:
    """A layer that does not compress."""
    return tar([(name, os.urandom(size))])


def layer(place: Path, content: bytes, name: str = "agent.tar.gz") -> ImageLayer:
    """A layer on disk, of this tar."""
    packed = gzip.compress(content, 1, mtime=0)
    path = place / name
    path.write_bytes(packed)
    return ImageLayer(
        digest=_digest(packed),
        diff_id=_digest(content),
        size=len(packed),
        unpacked=len(content),
        path=str(path),
    )


def _client() -> str:
    """A client that builds: where there are several, a newer one may lack buildx."""
    return "/usr/bin/docker" if Path("/usr/bin/docker").exists() else str(shutil.which("docker"))


def _parts(reference: str) -> tuple[str, str, str]:
    host, _, rest = reference.partition("/")
    if "@" in rest:
        name, _, tag = rest.partition("@")
    else:
        name, _, tag = rest.partition(":")
    return host, name, tag


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _awaited(done: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + stretch(PATIENCE)
    while not done():
        assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
        time.sleep(0.05)


def _answers(sock: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(str(sock))
            one.sendall(b"GET /_ping HTTP/1.0\r\nHost: x\r\n\r\n")
            return b"200 OK" in one.recv(100)
        except OSError:
            return False


def _serves(found: Registry) -> bool:
    try:
        found.ask("GET", "/v2/")
    except OSError:
        return False
    return True


def _orphans_ended(short: Path) -> None:
    """What a daemon that was killed left of its containers: known by the daemon's own directory."""
    for process in psutil.process_iter():
        try:
            if any(str(short) in word for word in process.cmdline()):
                for one in (*process.children(recursive=True), process):
                    one.kill()
        except psutil.Error:
            continue  # it is gone


def _unmounted(place: Path) -> None:
    """What a daemon mounted below `place`, the innermost first."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed([one for one in mounts if one.startswith(f"{place}/")]):
        subprocess.run(["umount", "--lazy", mount], check=False)
