"""Registries as they are spoken to: manifests and blobs, checked by their digests.

What is put into one is in `upload.py`; how a request gets there and back in `host.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp

from ...core.image import Note, Registry
from ...core.records import MiB
from .credentials import Credentials
from .flow import Flow, Incoming, whole
from .host import Ask, Host
from .manifest import MANIFEST_TYPES
from .pace import Patience
from .reference import digest_of, is_digest
from .refusal import Refusal, mismatch, unsupported
from .upload import Uploads

CONNECT = 30.0  # seconds for a connection
LARGEST_MANIFEST = 4 * MiB
_OK = frozenset({200})
_HEAD = frozenset({200, 404})
_PART = frozenset({200, 206})
_ACCEPT = {"Accept": ", ".join(sorted(MANIFEST_TYPES))}
_SCHEMA1 = "application/vnd.docker.distribution.manifest.v1"


class Found(NamedTuple):
    """A manifest as the registry has it."""

    content: bytes
    media_type: str  # as the registry says; empty where it does not
    digest: str


UNKNOWN = -1  # the size of a blob that is there, and of which a registry says no more


class RegistryClient(Uploads):
    """One registry. Repositories are named without it."""

    async def manifest(self, repository: str, target: str) -> Found:
        """What a tag or a digest stands for."""
        what = f"the manifest of `{self._name(repository, target)}` cannot be read"
        ask = Ask("GET", f"{repository}/manifests/{target}", what, _pull(repository), _ACCEPT)

        async def operation() -> Found:
            answer = await self.host.answer(ask, _OK, LARGEST_MANIFEST)
            media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if media_type.startswith(_SCHEMA1):
                raise unsupported(
                    what, "it is in the old format `schema1`", "push it again with a newer client"
                )
            told = answer.headers.get("Docker-Content-Digest", "")
            for digest in (target, told):
                if is_digest(digest) and digest_of(answer.body, digest) != digest:
                    raise mismatch(what, f"what came is not what `{digest}` stands for")
            return Found(answer.body, media_type, target if is_digest(target) else digest_of(answer.body))

        return await self.host.trying(operation)

    async def head(self, repository: str, target: str) -> str:
        """The digest of what a tag stands for."""
        what = f"the manifest of `{self._name(repository, target)}` cannot be read"
        ask = Ask("HEAD", f"{repository}/manifests/{target}", what, _pull(repository), _ACCEPT)
        answer = await self.host.trying(lambda: self.host.answer(ask, _HEAD))
        digest = answer.headers.get("Docker-Content-Digest", "")
        if answer.status == 404 or not is_digest(digest):  # only a body has the registry's reason
            return (await self.manifest(repository, target)).digest
        if is_digest(target) and digest != target:
            raise mismatch(what, f"the registry has `{digest}` in its place")
        return digest

    async def has(self, repository: str, digest: str) -> bool:
        """Whether a blob is there."""
        return await self.measure(repository, digest) is not None

    async def measure(self, repository: str, digest: str) -> int | None:
        """The bytes of a blob, as far as the registry says; None: it is not there."""
        what = f"the blob `{self._name(repository, digest)}` cannot be looked for"
        path, scopes = f"{repository}/blobs/{digest}", _pull(repository)

        async def operation() -> int | None:
            answer = await self.host.answer(Ask("HEAD", path, what, scopes), _HEAD)
            if answer.status == 200:
                told = answer.headers.get("Content-Length", "")
                return int(told) if told.isdecimal() else UNKNOWN
            try:  # only a body has the registry's reason
                response = await self.host.open(Ask("GET", path, what, scopes, {"Range": "bytes=0-0"}), _PART)
            except Refusal as error:
                if error.absent_blob:
                    return None
                raise
            response.close()
            return UNKNOWN

        return await self.host.trying(operation)

    @asynccontextmanager
    async def blob(self, repository: str, digest: str, size: int) -> AsyncIterator[Flow]:
        """A blob as it comes; the flow raises where it is not what was asked for."""
        what = f"the blob `{self._name(repository, digest)}` cannot be read"
        ask = Ask("GET", f"{repository}/blobs/{digest}", what, _pull(repository))
        response = await self.host.trying(lambda: self.host.open(ask, _OK))
        try:
            yield Incoming(what, digest, size, response)
        finally:
            response.close()

    async def small(self, repository: str, digest: str, size: int, most: int) -> bytes:
        """A blob whole, of at most so many bytes."""
        if size > most:
            name = self._name(repository, digest)
            raise unsupported(f"the blob `{name}` cannot be read", f"it has {size} bytes, more than {most}")

        async def operation() -> bytes:
            async with self.blob(repository, digest, size) as flow:
                return b"".join([piece async for piece in flow])

        return await self.host.trying(operation)

    async def tail(self, repository: str, digest: str, size: int, count: int) -> bytes:
        """The last bytes of a blob, where the registry gives parts of one; unchecked."""
        what = f"the end of the blob `{self._name(repository, digest)}` cannot be read"
        part = {"Range": f"bytes={size - count}-{size - 1}"}
        ask = Ask("GET", f"{repository}/blobs/{digest}", what, _pull(repository), part)

        async def operation() -> bytes:
            response = await self.host.open(ask, _PART)
            try:
                return await whole(response, count) if response.status == 206 else b""
            finally:
                response.close()

        return await self.host.trying(operation)

    def _name(self, repository: str, target: str) -> str:
        return f"{self.host.registry}/{repository}{'@' if is_digest(target) else ':'}{target}"


class Registries:
    """A client for each registry, over one pool of connections; used with `async with`."""

    def __init__(
        self,
        credentials: Credentials,
        settings: Mapping[str, Registry],
        note: Note,
        patience: Patience | None = None,
    ) -> None:
        self._credentials = credentials
        self._settings = settings
        self._note = note
        self._patience = patience or Patience()
        self._clients: dict[str, RegistryClient] = {}  # bound: the registries that a recipe names
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        stall = self._patience.stall
        self._session = aiohttp.ClientSession(
            # Without a limit: a blob on its way holds two connections, and would wait for itself.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=stall),
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

    def registry(self, name: str) -> RegistryClient:
        """The client of a registry as a reference names it: `docker.io`, `localhost:5000`."""
        assert self._session is not None, "used outside `async with`"
        if name not in self._clients:
            settings = self._settings.get(name, Registry())
            host = Host(name, settings, self._session, self._credentials, self._note, self._patience)
            self._clients[name] = RegistryClient(host)
        return self._clients[name]


def _pull(repository: str) -> frozenset[str]:
    return frozenset({f"repository:{repository}:pull"})
