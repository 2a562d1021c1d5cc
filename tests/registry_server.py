"""A real registry on a loopback port, bases in it, and a front before it that misbehaves as it is told."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.client
import io
import json
import os
import secrets
import shutil
import socket
import subprocess
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
from aiohttp import web
from tests.wait_bounds import stretch

from holdwater.core.image import ConfigEdits, ImageBlueprint, ImageLayer, ImageTarget, RegistryOptions
from holdwater.image.registry.client import RegistryClients
from holdwater.image.registry.credentials import RegistryCredentials
from holdwater.image.registry.engine import RegistryEngine
from holdwater.image.registry.host import RegistryRetryPolicy

PROGRAM = "docker-registry"
QUICK = RegistryRetryPolicy(tries=4, first=0.01, longest=0.05, pause=5.0, waiting=10.0, stall=10.0)

CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:{port}", relativeurls: true}}
validation: {{manifests: {{urls: {{allow: ["^https?://"]}}}}}}
"""

DOCKER = {
    "manifest": "application/vnd.docker.distribution.manifest.v2+json",
    "index": "application/vnd.docker.distribution.manifest.list.v2+json",
    "config": "application/vnd.docker.container.image.v1+json",
    "layer": "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
OCI = {
    "manifest": "application/vnd.oci.image.manifest.v1+json",
    "index": "application/vnd.oci.image.index.v1+json",
    "config": "application/vnd.oci.image.config.v1+json",
    "layer": "application/vnd.oci.image.layer.v1.tar+gzip",
}
FORMS = ("schema2", "oci", "index", "list")  # the last two: OCI's and docker's index
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def tar(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    """An archive; a name that ends in `/` is a directory, a `TarInfo` is taken as it is."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name.rstrip("/"))
            info.mode = 0o755
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


def zipped(content: bytes) -> bytes:
    return gzip.compress(content, 1, mtime=0)


def layer(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> ImageLayer:
    """The members as a layer on disk."""
    unpacked = tar(members)
    content = zipped(unpacked)
    path.write_bytes(content)
    return ImageLayer(digest(content), digest(unpacked), len(content), len(unpacked), str(path))


class RealRegistry:
    """Debian's `docker-registry` as a process."""

    def __init__(self, place: Path) -> None:
        program = shutil.which(PROGRAM)
        if program is None:
            assert os.environ.get("CI") != "true", f"`{PROGRAM}` is not installed"
            pytest.skip(f"`{PROGRAM}` is not installed")
        place.mkdir()
        self.root = place / "data"
        self._log = (place / "registry.log").open("wb")
        self._line: http.client.HTTPConnection | None = None
        assert any(self._started(program, place) for _ in range(3)), (place / "registry.log").read_text()
        self.address = f"127.0.0.1:{self.port}"

    def _started(self, program: str, place: Path) -> bool:
        """Whether it came up; someone else may take the port first."""
        self.port = free_port()
        (place / "config.yml").write_text(CONFIG.format(root=self.root, port=self.port))
        command = [program, "serve", str(place / "config.yml")]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        until = time.monotonic() + stretch(20)
        while self._process.poll() is None and time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return True
            except OSError:
                time.sleep(0.02)
        self._process.kill()
        self._process.wait()
        return False

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, Any, bytes]:
        """One request that has nothing to do with the code under test."""
        if self._line is None:
            self._line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=stretch(30))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._line.request(method, path if path.startswith("/") else f"/v2/{path}", body, named)
        response = self._line.getresponse()
        return response.status, response.headers, response.read()

    def put_blob(self, repository: str, content: bytes) -> str:
        status, headers, _ = self.ask("POST", f"{repository}/blobs/uploads/")
        assert status == 202
        target = headers["Location"] + ("&" if "?" in headers["Location"] else "?")
        status, _, told = self.ask(
            "PUT", f"{target}digest={digest(content)}", content, Content_Type="application/octet-stream"
        )
        assert status == 201, told
        return digest(content)

    def put_manifest(self, repository: str, target: str, body: dict[str, Any], media_type: str) -> str:
        content = json.dumps(body).encode()
        status, _, told = self.ask(
            "PUT", f"{repository}/manifests/{target}", content, Content_Type=media_type
        )
        assert status == 201, told
        return digest(content)

    def manifest(self, repository: str, target: str) -> dict[str, Any]:
        status, _, body = self.ask(
            "GET",
            f"{repository}/manifests/{target}",
            Accept=", ".join([OCI["manifest"], OCI["index"], DOCKER["manifest"], DOCKER["index"]]),
        )
        assert status == 200, body
        return json.loads(body)

    def digest(self, repository: str, target: str) -> str:
        accept = ", ".join([OCI["manifest"], OCI["index"], DOCKER["manifest"], DOCKER["index"]])
        status, headers, _ = self.ask("HEAD", f"{repository}/manifests/{target}", Accept=accept)
        return headers["Docker-Content-Digest"] if status == 200 else ""

    def blob(self, repository: str, wanted: str) -> bytes:
        status, _, body = self.ask("GET", f"{repository}/blobs/{wanted}")
        assert status == 200 and digest(body) == wanted
        return body

    def config(self, repository: str, target: str) -> dict[str, Any]:
        return json.loads(self.blob(repository, self.manifest(repository, target)["config"]["digest"]))

    def tags(self, repository: str) -> list[str]:
        status, _, body = self.ask("GET", f"{repository}/tags/list")
        return sorted(json.loads(body)["tags"] or []) if status == 200 else []

    def push(self, repository: str, tag: str, form: str = "oci", **parts: Any) -> str:
        """A base in one of the `FORMS`; the digest of what the tag stands for."""
        types = OCI if form in ("oci", "index") else DOCKER
        if form in ("schema2", "oci"):
            return self._push_image(repository, tag, types, **parts)
        entries = []
        for architecture, variant in (("arm64", "v8"), ("amd64", "")):
            parts["architecture"] = architecture
            child = self._push_image(repository, None, types, **parts)
            size = len(self.ask("GET", f"{repository}/manifests/{child}", Accept=types["manifest"])[2])
            platform = {"os": "linux", "architecture": architecture} | (
                {"variant": variant} if variant else {}
            )
            entries.append(
                {"mediaType": types["manifest"], "digest": child, "size": size, "platform": platform}
            )
        body = {"schemaVersion": 2, "mediaType": types["index"], "manifests": entries}
        return self.put_manifest(repository, tag, body, types["index"])

    def _push_image(
        self,
        repository: str,
        tag: str | None,
        types: dict[str, str],
        layers: list[bytes] | None = None,
        config: dict[str, Any] | None = None,
        architecture: str = "amd64",
        foreign: bool = False,
        **more: Any,
    ) -> str:
        layers = [tar({"etc/": b"", "etc/base": repository.encode()})] if layers is None else layers
        described = []
        for content in layers:
            packed = zipped(content)
            described.append(
                {
                    "mediaType": types["layer"],
                    "size": len(packed),
                    "digest": self.put_blob(repository, packed),
                }
            )
        diff_ids = [digest(content) for content in layers]
        if foreign:
            where = ["https://example.com/layer"]
            described.append({"mediaType": FOREIGN, "size": 10, "digest": digest(b"far"), "urls": where})
            diff_ids.append(digest(b"far away"))
        inner = {"Env": ["PATH=/bin", "A=base"], "Cmd": ["sh"], "Labels": {"of": "base"}} | (config or {})
        whole = {
            "architecture": architecture,
            "os": "linux",
            "created": "2024-01-02T03:04:05Z",
            "config": inner,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created_by": "base"} for _ in diff_ids],
        } | more
        packed = json.dumps(whole).encode()
        self.put_blob(repository, packed)
        body = {
            "schemaVersion": 2,
            "mediaType": types["manifest"],
            "config": {"mediaType": types["config"], "size": len(packed), "digest": digest(packed)},
            "layers": described,
        }
        content = json.dumps(body).encode()
        return self.put_manifest(repository, tag or digest(content), body, types["manifest"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def real_registry(place: Path) -> Iterator[RealRegistry]:
    registry = RealRegistry(place)
    try:
        yield registry
    finally:
        registry.close()


Fault = Callable[[str, web.Request], web.StreamResponse | None]


class Front:
    """A reverse proxy before a real registry. Each attribute below is a fault, or what was seen."""

    def __init__(self, registry: RealRegistry) -> None:
        self.registry = registry
        self.address = ""
        self.elsewhere = ""  # another port of it, that asks for no credentials and must be given none
        self.auth = ""  # `bearer`, `basic`
        self.user, self.password, self.identity = "someone", "", ""
        self.lifetime = 300
        self.refuses_mounts = False
        self.redirects_blobs = False
        self.uploads_elsewhere = False
        self.cuts = 0  # so many uploads are cut in the middle
        self.tells = False  # how far an upload got that was cut; the real one gives it up
        self.cuts_downloads = 0
        self.spoils = ""  # a digest whose bytes come wrong
        self.fault: Fault = lambda kind, request: None
        self.seen: Counter[str] = Counter()
        self.up = self.down = 0  # bytes of blobs
        self.strayed: list[str] = []  # credentials that were sent elsewhere
        self.scopes: list[frozenset[str]] = []  # of each token
        self.tokens: dict[str, tuple[frozenset[str], float]] = {}
        self._reached: dict[str, dict[str, str]] = {}  # path of an upload -> headers
        self._client: aiohttp.ClientSession

    def expire(self) -> None:
        """No token that was given so far is worth anything."""
        self.tokens = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        own = request.host == self.address
        if request.path == "/token":
            return await self._token(request)
        kind = _kind(request)
        self.seen[kind] += 1
        if not own and "Authorization" in request.headers:
            self.strayed.append(f"{kind} {request.path}")
        if own and (refused := self._unauthorized(request)) is not None:
            return refused
        if (answer := self.fault(kind, request)) is not None:
            return answer
        if kind == "mount" and self.refuses_mounts:
            return await self._pass(request, request.path)
        if kind == "GET blob" and self.redirects_blobs and own and await self._there(request):
            raise web.HTTPTemporaryRedirect(f"http://{self.elsewhere}{request.path_qs}")
        if kind == "PUT blob" and self.cuts:
            self.cuts -= 1
            return await (self._stop(request) if self.tells else self._cut(request))
        if kind == "status" and request.path in self._reached:
            return web.Response(status=204, headers=self._reached.pop(request.path))
        return await self._pass(request, request.path_qs)

    async def _there(self, request: web.Request) -> bool:
        """A registry redirects to what it has."""
        async with self._client.head(f"http://{self.registry.address}{request.path}") as answer:
            return answer.status == 200

    async def _pass(self, request: web.Request, path: str) -> web.StreamResponse:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("Host", "Authorization", "Transfer-Encoding")
        }
        url = f"http://{self.registry.address}{path}"
        body = self._counted(request) if request.body_exists else None
        async with self._client.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            return await self._back(request, answer)

    async def _back(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        kept = ("Content-Type", "Content-Length", "Docker-Content-Digest", "Location", "Range")
        headers = {name: answer.headers[name] for name in kept if name in answer.headers}
        if self.uploads_elsewhere and "uploads" in headers.get("Location", ""):
            headers["Location"] = f"http://{self.elsewhere}{headers['Location']}"
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        spoiled = bool(self.spoils) and self.spoils in request.path and answer.status == 200
        async for piece in answer.content.iter_any():
            if _kind(request) == "GET blob":
                self.down += len(piece)
                if self.cuts_downloads:
                    self.cuts_downloads -= 1
                    await response.write(piece[: len(piece) // 2])
                    assert request.transport is not None
                    request.transport.abort()
                    return response
            await response.write(bytes(len(piece)) if spoiled else piece)
        return response

    async def _counted(self, request: web.Request) -> AsyncIterator[bytes]:
        async for piece in request.content.iter_any():
            if _kind(request) == "PUT blob":
                self.up += len(piece)
            yield piece

    async def _cut(self, request: web.Request) -> web.StreamResponse:
        """Half of the body reaches the registry, then both lines go dead."""
        half = int(request.headers["Content-Length"]) // 2

        async def some() -> AsyncIterator[bytes]:
            sent = 0
            async for piece in request.content.iter_any():
                yield piece[: half - sent]
                sent += len(piece)
                if sent >= half:
                    await asyncio.sleep(0.05)  # what was sent is to arrive before the line goes dead
                    raise ConnectionError

        headers = {"Content-Length": request.headers["Content-Length"]}
        url = f"http://{self.registry.address}{request.path_qs}"
        try:
            async with self._client.put(url, headers=headers, data=some()):
                pass
        except aiohttp.ClientError:
            pass
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        """Half of the body is kept by the registry, then the client's line goes dead."""
        half = await request.content.readexactly(int(request.headers["Content-Length"]) // 2)
        self.up += len(half)
        url = f"http://{self.registry.address}{request.path_qs}"
        async with self._client.patch(url, data=io.BytesIO(half)) as answer:
            assert answer.status == 202
            self._reached[request.path] = {name: answer.headers[name] for name in ("Location", "Range")}
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _unauthorized(self, request: web.Request) -> web.Response | None:
        sent = request.headers.get("Authorization", "")
        if self.auth == "basic":
            if sent == self._basic():
                return None
            return _refused(401, "UNAUTHORIZED", {"WWW-Authenticate": 'Basic realm="here"'})
        if self.auth == "bearer":
            scopes, until = self.tokens.get(sent.removeprefix("Bearer "), (frozenset(), 0.0))
            wanted = _wanted(request)
            if time.monotonic() < until and all(_covers(scopes, one) for one in wanted):
                return None
            value = f'Bearer realm="http://{self.address}/token",service="here",scope="{" ".join(wanted)}"'
            return _refused(401, "UNAUTHORIZED", {"WWW-Authenticate": value})
        return None

    async def _token(self, request: web.Request) -> web.Response:
        self.seen["token"] += 1
        if request.method == "POST":
            form = await request.post()
            good = bool(self.identity) and form["refresh_token"] == self.identity
            scopes = frozenset(str(form["scope"]).split())
        else:
            sent = request.headers.get("Authorization")
            good = sent == self._basic() if self.password else sent is None
            scopes = frozenset(parse_qs(urlsplit(request.path_qs).query).get("scope", []))
        if not good:
            return _refused(401, "UNAUTHORIZED")
        token = "tok-" + secrets.token_hex(12)
        self.scopes.append(scopes)
        self.tokens[token] = scopes, time.monotonic() + self.lifetime
        return web.json_response({"token": token, "expires_in": self.lifetime})

    def _basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


@asynccontextmanager
async def front(registry: RealRegistry) -> AsyncIterator[Front]:
    made = Front(registry)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    async with aiohttp.ClientSession(auto_decompress=False) as made._client:
        lines = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        made.address, made.elsewhere = (f"127.0.0.1:{line.getsockname()[1]}" for line in lines)
        for line in lines:
            await web.SockSite(runner, line).start()
        try:
            yield made
        finally:
            await runner.cleanup()


def refused(status: int, code: str = "UNKNOWN", **headers: str) -> web.Response:
    """A registry's own kind of refusal."""
    return _refused(status, code, {name.replace("_", "-"): value for name, value in headers.items()})


def _refused(status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"errors": [{"code": code, "message": f"told by the front: {code.lower()}"}]}
    return web.json_response(body, status=status, headers=headers)


def _kind(request: web.Request) -> str:
    if "/blobs/uploads/" in request.path:
        if request.method == "POST":
            return "mount" if "mount" in request.query else "begin"
        return {"PUT": "PUT blob", "GET": "status", "DELETE": "cancel"}[request.method]
    return f"{request.method} {'manifest' if '/manifests/' in request.path else 'blob'}"


def _wanted(request: web.Request) -> list[str]:
    name = request.path.removeprefix("/v2/").partition("/manifests/")[0].partition("/blobs/")[0]
    writes = request.method not in ("GET", "HEAD")
    wanted = [f"repository:{name}:{'pull,push' if writes else 'pull'}"]
    if "from" in request.query:
        wanted.append(f"repository:{request.query['from']}:pull")
    return wanted


def _covers(scopes: frozenset[str], wanted: str) -> bool:
    kind, _, actions = wanted.rpartition(":")
    return any(
        scope.rpartition(":")[0] == kind
        and set(actions.split(",")) <= set(scope.rpartition(":")[2].split(","))
        for scope in scopes
    )


class Steps:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def disk(self, bytes_: int) -> None:
        raise AssertionError("nothing is put on a disk")


class Notes(list[tuple[str, str]]):
    """What a run would count."""

    def __call__(self, kind: str, message: str) -> None:
        self.append((kind, message))


@asynccontextmanager
async def registries(
    config: Path | None = None,
    search: str = "",
    settings: dict[str, RegistryOptions] | None = None,
    patience: RegistryRetryPolicy = QUICK,
) -> AsyncIterator[tuple[RegistryClients, Notes]]:
    notes = Notes()
    async with RegistryClients(
        RegistryCredentials(config, search), settings or {}, notes, patience
    ) as opened:
        yield opened, notes


@asynccontextmanager
async def engine(
    layers: tuple[ImageLayer, ...] = (), edits: ConfigEdits | None = None, **options: Any
) -> AsyncIterator[Making]:
    blueprint = options.pop("blueprint", None) or ImageBlueprint(layers=layers, edits=edits or ConfigEdits())
    async with registries(**options) as (opened, notes), RegistryEngine(blueprint, opened, notes) as made:
        yield Making(made, opened, notes)


class Making:
    """An engine and what a test asks of it."""

    def __init__(self, engine: RegistryEngine, registries: RegistryClients, notes: Notes) -> None:
        self.engine = engine
        self.registries = registries
        self.notes = notes

    async def make(self, base: str, repository: str, *aliases: str) -> Any:
        image = ImageTarget(name=base, base=base, repository=repository, aliases=aliases)
        return await self.engine.make(image, Path("/nonexistent/log"), Steps())

    async def foresee(self, base: str, repository: str) -> Any:
        return await self.engine.foresee(ImageTarget(name=base, base=base, repository=repository))

    async def all(self, bases: list[str], repository: str, at_once: int = 16) -> list[Any]:
        """Many images, so many at once."""
        slots = asyncio.Semaphore(at_once)

        async def one(base: str) -> Any:
            async with slots:
                return await self.make(base, repository)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(base)) for base in bases]
        return [task.result() for task in tasks]
