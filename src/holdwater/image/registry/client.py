"""The clients of registries: read and write manifests and blobs, each checked by its digest.

Each operation includes its retries, and completes or raises a `RegistryRefusal`. `host.py` sends requests.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import aiohttp

from ...core.image import Note, RegistryOptions
from ...core.records import MiB
from .blob_stream import BlobStream, DownloadStream, FileStream, read_body
from .credentials import RegistryCredentials
from .host import RegistryHost, RegistryRequest, RegistryResponse, RegistryRetryPolicy
from .manifest import MANIFEST_TYPES, EncodedManifest
from .reference import digest_of, is_digest
from .refusal import RegistryRefusal, mismatch_error, unreached_error, unsupported_error

P = ParamSpec("P")
T = TypeVar("T")
StreamOpener = Callable[[], AbstractAsyncContextManager[BlobStream]]

CONNECT_SECONDS = 30.0  # time limit to connect
LARGEST_MANIFEST = 4 * MiB
UNKNOWN_SIZE = -1  # a blob that exists, but whose size the registry does not send
_OK = frozenset({200})
_HEAD = frozenset({200, 404})
_PART = frozenset({200, 206})
_BEGUN = frozenset({202})
_DONE = frozenset({200, 201, 204})
_EITHER = _BEGUN | _DONE
_NO_SUCH_REQUEST = frozenset({400, 404, 405, 411, 415, 501})  # the registry does not support the request
_ACCEPT = {"Accept": ", ".join(sorted(MANIFEST_TYPES))}
_BINARY = {"Content-Type": "application/octet-stream"}
_SCHEMA1 = "application/vnd.docker.distribution.manifest.v1"
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]+)")


class MountResult(NamedTuple):
    """The result of a mount: done, or the location of an upload that was begun instead, or neither."""

    done: bool
    location: str = ""


def _retried(
    operation: Callable[Concatenate[RegistryClient, P], Awaitable[T]],
) -> Callable[Concatenate[RegistryClient, P], Coroutine[Any, Any, T]]:
    """Retry an operation of a client as the error and the host's retry policy allow."""

    @functools.wraps(operation)
    async def retry(self: RegistryClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.host.retry(lambda: operation(self, *args, **kwargs))

    return retry


class RegistryClient:
    """The client of one registry. Repository names do not include the registry."""

    def __init__(self, host: RegistryHost) -> None:
        self.host = host
        self._single_request = True  # false once the registry rejects a blob in a single request

    @_retried
    async def read_manifest(self, repository: str, target: str) -> EncodedManifest:
        """Return the manifest that a tag or digest refers to."""
        ask = self._manifest_request("GET", repository, target)
        answer = await self.host.send(ask, _OK, LARGEST_MANIFEST)
        media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if media_type.startswith(_SCHEMA1):
            raise unsupported_error(
                ask.what, "unsupported old format `schema1`", "push it again with a newer client"
            )
        for digest in (target, answer.headers.get("Docker-Content-Digest", "")):
            if is_digest(digest) and digest_of(answer.body, digest) != digest:
                raise mismatch_error(ask.what, f"the content does not match the digest `{digest}`")
        return EncodedManifest(
            answer.body, media_type, target if is_digest(target) else digest_of(answer.body)
        )

    async def find_manifest(self, repository: str, target: str) -> EncodedManifest | None:
        """Return the manifest that a tag or digest refers to; None: the registry has no such manifest."""
        try:
            return await self.read_manifest(repository, target)
        except RegistryRefusal as error:
            if error.kind == "missing":
                return None
            raise

    async def read_digest(self, repository: str, target: str) -> str:
        """Return the digest of the manifest that a tag refers to."""
        ask = self._manifest_request("HEAD", repository, target)
        answer = await self.host.retry(lambda: self.host.send(ask, _HEAD))
        digest = answer.headers.get("Docker-Content-Digest", "")
        if answer.status == 404 or not is_digest(digest):  # only a GET returns the registry's reason
            return (await self.read_manifest(repository, target)).digest
        if is_digest(target) and digest != target:
            raise mismatch_error(ask.what, f"the registry returned `{digest}` instead")
        return digest

    async def has(self, repository: str, digest: str) -> bool:
        """Return whether a blob exists."""
        return await self.measure(repository, digest) is not None

    @_retried
    async def measure(self, repository: str, digest: str) -> int | None:
        """Return the size of a blob, `UNKNOWN_SIZE` if the registry does not send it; None: no such blob."""
        what = f"{self._describe_blob(repository, digest)} cannot be checked"
        ask = RegistryRequest("HEAD", f"{repository}/blobs/{digest}", what, _pull_scope(repository))
        answer = await self.host.send(ask, _HEAD)
        if answer.status == 200:
            length = answer.headers.get("Content-Length", "")
            return int(length) if length.isdecimal() else UNKNOWN_SIZE
        try:  # only a GET returns the registry's reason
            response = await self.host.open(ask._replace(method="GET", headers={"Range": "bytes=0-0"}), _PART)
        except RegistryRefusal as error:
            if error.absent_blob:
                return None
            raise
        response.close()
        return UNKNOWN_SIZE

    @asynccontextmanager
    async def open_blob(self, repository: str, digest: str, size: int) -> AsyncIterator[BlobStream]:
        """Open a blob as a stream; the stream raises if the content does not match size or digest."""
        what = f"{self._describe_blob(repository, digest)} cannot be read"
        ask = RegistryRequest("GET", f"{repository}/blobs/{digest}", what, _pull_scope(repository))
        response = await self.host.retry(lambda: self.host.open(ask, _OK))
        try:
            yield DownloadStream(what, digest, size, response)
        finally:
            response.close()

    @_retried
    async def read_blob(self, repository: str, digest: str, size: int, most: int) -> bytes:
        """Return a whole blob of at most `most` bytes."""
        if size > most:
            raise unsupported_error(
                f"{self._describe_blob(repository, digest)} cannot be read",
                f"it has {size} bytes, more than {most}",
            )
        async with self.open_blob(repository, digest, size) as flow:
            return b"".join([piece async for piece in flow])

    @_retried
    async def read_tail(self, repository: str, digest: str, size: int, count: int) -> bytes:
        """Return the last `count` bytes of a blob, unchecked; empty if the registry sends no ranges."""
        what = f"the end of {self._describe_blob(repository, digest)} cannot be read"
        part = {"Range": f"bytes={size - count}-{size - 1}"}
        ask = RegistryRequest("GET", f"{repository}/blobs/{digest}", what, _pull_scope(repository), part)
        response = await self.host.open(ask, _PART)
        try:
            return await read_body(response, count) if response.status == 206 else b""
        finally:
            response.close()

    @_retried
    async def mount(self, repository: str, digest: str, origin: str) -> MountResult:
        """Mount a blob of the repository `origin` into `repository`."""
        what = f"{self._describe_blob(repository, digest)} cannot be mounted from `{origin}`"
        path = f"{repository}/blobs/uploads/?mount={_quote_digest(digest)}&from={origin}"
        scopes = _push_scope(repository) | _pull_scope(origin)
        try:
            answer = await self.host.send(RegistryRequest("POST", path, what, scopes), _EITHER)
        except RegistryRefusal as error:
            if error.status in _NO_SUCH_REQUEST:
                return MountResult(False)
            raise
        if answer.status in _DONE:
            return MountResult(True)
        return MountResult(False, self._read_location(what, answer))

    @_retried
    async def upload_bytes(self, repository: str, digest: str, content: bytes) -> None:
        """Upload a small blob, in one request if the registry supports that, otherwise in two."""
        what = self._describe_upload(repository, digest)
        location = await self._upload_or_begin(repository, digest, content, what)
        if location:
            await self._finish(repository, digest, location, content, what)

    async def upload_file(
        self, repository: str, digest: str, size: int, path: Path, location: str = ""
    ) -> None:
        """Upload a blob from a file, piece by piece; resume a lost connection at the registry's offset."""
        what = self._describe_upload(repository, digest)
        begun, cut = location, ""

        async def operation() -> None:
            nonlocal begun, cut
            at, start = (begun, 0) if begun else await self._find_resume_point(repository, cut, size, what)
            begun = cut = ""
            at = at or await self._begin(repository, what)
            with FileStream(what, digest, size, path, start) as flow:
                try:
                    await self._finish(repository, digest, at, flow, what, range(start, size))
                except RegistryRefusal as error:
                    cut = at if error.status == 0 and error.kind == "registry" else ""
                    raise

        await self.host.retry(operation)

    async def upload_stream(
        self, repository: str, digest: str, size: int, opened: StreamOpener, location: str = ""
    ) -> None:
        """Upload a blob from the stream of `opened`, never whole in memory; `location`: a begun upload."""
        what = self._describe_upload(repository, digest)

        async def operation() -> None:
            nonlocal location
            at, location = location, ""
            async with opened() as flow:
                at = at or await self._begin(repository, what)
                await self._finish(repository, digest, at, flow, what, range(size))

        await self.host.retry(operation)

    async def cancel(self, repository: str, location: str) -> None:
        """Cancel an upload that was begun, without retries: registries drop old uploads themselves."""
        what = f"an upload to `{self.host.registry}/{repository}` cannot be cancelled"
        ask = RegistryRequest("DELETE", location, what, _push_scope(repository))
        await self.host.send(ask, _EITHER | {404})

    @_retried
    async def begin_upload(self, repository: str) -> str:
        """Begin an upload and return its location; raise if the registry refuses it."""
        return await self._begin(repository, f"`{self.host.registry}/{repository}` takes no uploads")

    @_retried
    async def put_manifest(self, repository: str, target: str, manifest: EncodedManifest) -> None:
        """Put a manifest under a tag or its own digest."""
        what = f"the manifest of `{self._full_name(repository, target)}` cannot be put"
        headers = {"Content-Type": manifest.media_type}
        path, scopes = f"{repository}/manifests/{target}", _push_scope(repository)
        ask = RegistryRequest("PUT", path, what, scopes, headers, manifest.content)
        _check_stored(what, await self.host.send(ask, _EITHER), manifest.digest)

    async def _upload_or_begin(self, repository: str, digest: str, content: bytes, what: str) -> str:
        """Upload in one request and return an empty text, or begin an upload and return its location."""
        if not self._single_request:
            return await self._begin(repository, what)
        path = f"{repository}/blobs/uploads/?digest={_quote_digest(digest)}"
        try:
            ask = RegistryRequest("POST", path, what, _push_scope(repository), _BINARY, content)
            answer = await self.host.send(ask, _EITHER)
        except RegistryRefusal as error:
            if error.status not in _NO_SUCH_REQUEST:
                raise
            self._single_request = False
            return await self._begin(repository, what)
        if answer.status in _DONE:
            _check_stored(what, answer, digest)
            return ""
        self._single_request = False
        return self._read_location(what, answer)

    async def _begin(self, repository: str, what: str) -> str:
        ask = RegistryRequest("POST", f"{repository}/blobs/uploads/", what, _push_scope(repository))
        return self._read_location(what, await self.host.send(ask, _BEGUN))

    async def _finish(
        self,
        repository: str,
        digest: str,
        location: str,
        body: bytes | BlobStream,
        what: str,
        part: range | None = None,
    ) -> None:
        headers = dict(_BINARY)
        if part is not None:
            headers["Content-Length"] = str(len(part))
        if part and part.start:
            headers["Content-Range"] = f"{part.start}-{part.stop - 1}"
        url = f"{location}{'&' if '?' in location else '?'}digest={_quote_digest(digest)}"
        ask = RegistryRequest("PUT", url, what, _push_scope(repository), headers, body)
        _check_stored(what, await self.host.send(ask, _DONE), digest)

    async def _find_resume_point(
        self, repository: str, location: str, size: int, what: str
    ) -> tuple[str, int]:
        """Return the location and offset at which an interrupted upload resumes; empty location: unknown."""
        if not location:
            return "", 0
        ask = RegistryRequest("GET", location, what, _push_scope(repository))
        try:
            answer = await self.host.send(ask, _EITHER)
        except RegistryRefusal as error:
            if error.status == 0 or error.status >= 429:
                raise
            return "", 0
        there = _RANGE.fullmatch(answer.headers.get("Range", ""))
        start = int(there[1]) + 1 if there else 0
        if not 1 < start <= size:  # registries send `0-0` for one byte and for none
            return "", 0
        return self._read_location(what, answer), start

    def _read_location(self, what: str, answer: RegistryResponse) -> str:
        location = answer.headers.get("Location")
        if not location:
            raise unreached_error(what, "the registry returned no upload location")
        return str(self.host.resolve_location(location, answer.url))

    def _manifest_request(self, method: str, repository: str, target: str) -> RegistryRequest:
        what = f"the manifest of `{self._full_name(repository, target)}` cannot be read"
        path = f"{repository}/manifests/{target}"
        return RegistryRequest(method, path, what, _pull_scope(repository), _ACCEPT)

    def _describe_upload(self, repository: str, digest: str) -> str:
        return f"{self._describe_blob(repository, digest)} cannot be uploaded"

    def _describe_blob(self, repository: str, digest: str) -> str:
        return f"the blob `{self._full_name(repository, digest)}`"

    def _full_name(self, repository: str, target: str) -> str:
        return f"{self.host.registry}/{repository}{'@' if is_digest(target) else ':'}{target}"


class RegistryClients:
    """The clients of all registries, with one connection pool; used with `async with`."""

    def __init__(
        self,
        credentials: RegistryCredentials,
        settings: Mapping[str, RegistryOptions],
        note: Note,
        patience: RegistryRetryPolicy | None = None,
    ) -> None:
        self._credentials = credentials
        self._settings = settings
        self._note = note
        self._retry_policy = patience or RegistryRetryPolicy()
        self._clients: dict[str, RegistryClient] = {}  # bound: the registries that a recipe names
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        stall = self._retry_policy.stall
        self._session = aiohttp.ClientSession(
            # No limit: a streamed blob needs two connections, so a limit could deadlock.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=stall),
            headers={"Accept-Encoding": "identity", "User-Agent": "holdwater"},
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._clients.clear()
        if self._session is not None:
            await self._session.close()

    def client_for(self, name: str) -> RegistryClient:
        """Return the client of a registry, by its name in references: `docker.io`, `localhost:5000`."""
        assert self._session is not None, "used outside `async with`"
        if name not in self._clients:
            settings = self._settings.get(name, RegistryOptions())
            host = RegistryHost(
                name, settings, self._session, self._credentials, self._note, self._retry_policy
            )
            self._clients[name] = RegistryClient(host)
        return self._clients[name]


def _pull_scope(repository: str) -> frozenset[str]:
    return frozenset({f"repository:{repository}:pull"})


def _push_scope(repository: str) -> frozenset[str]:
    return frozenset({f"repository:{repository}:pull,push"})


def _quote_digest(digest: str) -> str:
    return digest.replace(":", "%3A")


def _check_stored(what: str, answer: RegistryResponse, digest: str) -> None:
    """Raise if the registry reports a digest other than the one that was sent."""
    stored = answer.headers.get("Docker-Content-Digest", "")
    if is_digest(stored) and stored != digest and stored.startswith(digest[:7]):
        raise mismatch_error(what, f"the registry stored it as `{stored}`, expected `{digest}`")
