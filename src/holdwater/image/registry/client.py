"""Read manifests and blobs from registries, and check them by their digests.

`upload.py` writes to registries; `host.py` sends the requests.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp

from ...core.image import Note, RegistryOptions
from ...core.records import MiB
from .blob_stream import BlobStream, DownloadStream, read_body
from .credentials import RegistryCredentials
from .host import RegistryHost, RegistryRequest
from .manifest import MANIFEST_TYPES
from .pace import RegistryRetryPolicy
from .reference import digest_of, is_digest
from .refusal import RegistryRefusal, mismatch_error, unsupported_error
from .upload import UploadClient

CONNECT_SECONDS = 30.0  # time limit to connect
LARGEST_MANIFEST = 4 * MiB
_OK = frozenset({200})
_HEAD = frozenset({200, 404})
_PART = frozenset({200, 206})
_ACCEPT = {"Accept": ", ".join(sorted(MANIFEST_TYPES))}
_SCHEMA1 = "application/vnd.docker.distribution.manifest.v1"


class FoundManifest(NamedTuple):
    """A manifest from a registry."""

    content: bytes
    media_type: str  # from the registry's response; empty: not sent
    digest: str


UNKNOWN_SIZE = -1  # a blob that exists, but whose size the registry does not send


class RegistryClient(UploadClient):
    """The client of one registry. Repository names do not include the registry."""

    async def read_manifest(self, repository: str, target: str) -> FoundManifest:
        """Return the manifest that a tag or digest refers to."""
        what = f"the manifest of `{self._full_name(repository, target)}` cannot be read"
        ask = RegistryRequest(
            "GET", f"{repository}/manifests/{target}", what, _pull_scope(repository), _ACCEPT
        )

        async def operation() -> FoundManifest:
            answer = await self.host.send(ask, _OK, LARGEST_MANIFEST)
            media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if media_type.startswith(_SCHEMA1):
                raise unsupported_error(
                    what, "unsupported old format `schema1`", "push it again with a newer client"
                )
            told = answer.headers.get("Docker-Content-Digest", "")
            for digest in (target, told):
                if is_digest(digest) and digest_of(answer.body, digest) != digest:
                    raise mismatch_error(what, f"the content does not match the digest `{digest}`")
            return FoundManifest(
                answer.body, media_type, target if is_digest(target) else digest_of(answer.body)
            )

        return await self.host.retry(operation)

    async def read_digest(self, repository: str, target: str) -> str:
        """Return the digest of the manifest that a tag refers to."""
        what = f"the manifest of `{self._full_name(repository, target)}` cannot be read"
        ask = RegistryRequest(
            "HEAD", f"{repository}/manifests/{target}", what, _pull_scope(repository), _ACCEPT
        )
        answer = await self.host.retry(lambda: self.host.send(ask, _HEAD))
        digest = answer.headers.get("Docker-Content-Digest", "")
        if answer.status == 404 or not is_digest(digest):  # only a GET returns the registry's reason
            return (await self.read_manifest(repository, target)).digest
        if is_digest(target) and digest != target:
            raise mismatch_error(what, f"the registry returned `{digest}` instead")
        return digest

    async def has(self, repository: str, digest: str) -> bool:
        """Return whether a blob exists."""
        return await self.measure(repository, digest) is not None

    async def measure(self, repository: str, digest: str) -> int | None:
        """Return the size of a blob, `UNKNOWN_SIZE` if the registry does not send it; None: no such blob."""
        what = f"the blob `{self._full_name(repository, digest)}` cannot be checked"
        path, scopes = f"{repository}/blobs/{digest}", _pull_scope(repository)

        async def operation() -> int | None:
            answer = await self.host.send(RegistryRequest("HEAD", path, what, scopes), _HEAD)
            if answer.status == 200:
                told = answer.headers.get("Content-Length", "")
                return int(told) if told.isdecimal() else UNKNOWN_SIZE
            try:  # only a GET returns the registry's reason
                response = await self.host.open(
                    RegistryRequest("GET", path, what, scopes, {"Range": "bytes=0-0"}), _PART
                )
            except RegistryRefusal as error:
                if error.absent_blob:
                    return None
                raise
            response.close()
            return UNKNOWN_SIZE

        return await self.host.retry(operation)

    @asynccontextmanager
    async def open_blob(self, repository: str, digest: str, size: int) -> AsyncIterator[BlobStream]:
        """Open a blob as a stream; the stream raises if the content does not match size or digest."""
        what = f"the blob `{self._full_name(repository, digest)}` cannot be read"
        ask = RegistryRequest("GET", f"{repository}/blobs/{digest}", what, _pull_scope(repository))
        response = await self.host.retry(lambda: self.host.open(ask, _OK))
        try:
            yield DownloadStream(what, digest, size, response)
        finally:
            response.close()

    async def read_blob(self, repository: str, digest: str, size: int, most: int) -> bytes:
        """Return a whole blob of at most `most` bytes."""
        if size > most:
            name = self._full_name(repository, digest)
            raise unsupported_error(
                f"the blob `{name}` cannot be read", f"it has {size} bytes, more than {most}"
            )

        async def operation() -> bytes:
            async with self.open_blob(repository, digest, size) as flow:
                return b"".join([piece async for piece in flow])

        return await self.host.retry(operation)

    async def read_tail(self, repository: str, digest: str, size: int, count: int) -> bytes:
        """Return the last `count` bytes of a blob, unchecked; empty if the registry sends no ranges."""
        what = f"the end of the blob `{self._full_name(repository, digest)}` cannot be read"
        part = {"Range": f"bytes={size - count}-{size - 1}"}
        ask = RegistryRequest("GET", f"{repository}/blobs/{digest}", what, _pull_scope(repository), part)

        async def operation() -> bytes:
            response = await self.host.open(ask, _PART)
            try:
                return await read_body(response, count) if response.status == 206 else b""
            finally:
                response.close()

        return await self.host.retry(operation)

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
