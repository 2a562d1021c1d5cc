"""Write to a registry: blobs from bytes, a file or another registry, mounts, manifests.

Each operation completes or raises a `RegistryRefusal`, and includes its retries. `client.py` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from .blob_stream import BlobStream, FileStream
from .host import RegistryHost, RegistryRequest, RegistryResponse
from .manifest import EncodedManifest
from .reference import is_digest
from .refusal import RegistryRefusal, mismatch_error, unreached_error
from .tokens import Scopes

StreamOpener = Callable[[], AbstractAsyncContextManager[BlobStream]]

_BEGUN = frozenset({202})
_DONE = frozenset({200, 201, 204})
_EITHER = _BEGUN | _DONE
_NO_SUCH_REQUEST = frozenset({400, 404, 405, 411, 415, 501})  # the registry does not support the request
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]+)")


class MountResult(NamedTuple):
    """The result of a mount: done, or the location of an upload that was begun instead, or neither."""

    done: bool
    location: str = ""


class UploadClient:
    """The write operations of a registry's client."""

    def __init__(self, host: RegistryHost) -> None:
        self.host = host
        self._single_request = True  # false once the registry rejects a blob in a single request

    async def mount(self, repository: str, digest: str, origin: str) -> MountResult:
        """Mount a blob of the repository `origin` into `repository`."""
        what = f"{self._describe_blob(repository, digest)} cannot be mounted from `{origin}`"
        scopes = _push_scope(repository) | {f"repository:{origin}:pull"}
        path = f"{repository}/blobs/uploads/?mount={_quote_digest(digest)}&from={origin}"

        async def operation() -> MountResult:
            try:
                answer = await self.host.send(RegistryRequest("POST", path, what, scopes), _EITHER)
            except RegistryRefusal as error:
                if error.status in _NO_SUCH_REQUEST:
                    return MountResult(False)
                raise
            if answer.status in _DONE:
                return MountResult(True)
            return MountResult(False, self._read_location(what, answer))

        return await self.host.retry(operation)

    async def upload_bytes(self, repository: str, digest: str, content: bytes) -> None:
        """Upload a small blob, in one request if the registry supports that, otherwise in two."""
        what = f"{self._describe_blob(repository, digest)} cannot be uploaded"

        async def operation() -> None:
            location = await self._upload_or_begin(repository, digest, content, what)
            if location:
                await self._finish(repository, digest, location, content, what)

        await self.host.retry(operation)

    async def upload_file(
        self, repository: str, digest: str, size: int, path: Path, location: str = ""
    ) -> None:
        """Upload a blob from a file, piece by piece; resume a lost connection at the registry's offset."""
        what = f"{self._describe_blob(repository, digest)} cannot be uploaded"
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
        what = f"{self._describe_blob(repository, digest)} cannot be uploaded"

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
        await self.host.send(
            RegistryRequest("DELETE", location, what, _push_scope(repository)), _EITHER | {404}
        )

    async def put_manifest(self, repository: str, target: str, manifest: EncodedManifest) -> None:
        """Put a manifest under a tag or its own digest."""
        name = f"{self.host.registry}/{repository}{'@' if is_digest(target) else ':'}{target}"
        what = f"the manifest of `{name}` cannot be put"
        headers = {"Content-Type": manifest.media_type}
        path, scopes = f"{repository}/manifests/{target}", _push_scope(repository)
        ask = RegistryRequest("PUT", path, what, scopes, headers, manifest.content)

        async def operation() -> None:
            _check_stored(what, await self.host.send(ask, _EITHER), manifest.digest)

        await self.host.retry(operation)

    async def _upload_or_begin(self, repository: str, digest: str, content: bytes, what: str) -> str:
        """Upload in one request and return an empty text, or begin an upload and return its location."""
        if not self._single_request:
            return await self._begin(repository, what)
        path = f"{repository}/blobs/uploads/?digest={_quote_digest(digest)}"
        headers = {"Content-Type": "application/octet-stream"}
        try:
            ask = RegistryRequest("POST", path, what, _push_scope(repository), headers, content)
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
        headers = {"Content-Type": "application/octet-stream"}
        if part is not None:
            headers["Content-Length"] = str(len(part))
        if part and part.start:
            headers["Content-Range"] = f"{part.start}-{part.stop - 1}"
        url = f"{location}{'&' if '?' in location else '?'}digest={_quote_digest(digest)}"
        answer = await self.host.send(
            RegistryRequest("PUT", url, what, _push_scope(repository), headers, body), _DONE
        )
        _check_stored(what, answer, digest)

    async def _find_resume_point(
        self, repository: str, location: str, size: int, what: str
    ) -> tuple[str, int]:
        """Return the location and offset at which an interrupted upload resumes; empty location: unknown."""
        if not location:
            return "", 0
        try:
            answer = await self.host.send(
                RegistryRequest("GET", location, what, _push_scope(repository)), _EITHER
            )
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

    def _describe_blob(self, repository: str, digest: str) -> str:
        return f"the blob `{self.host.registry}/{repository}@{digest}`"


def _push_scope(repository: str) -> Scopes:
    return frozenset({f"repository:{repository}:pull,push"})


def _quote_digest(digest: str) -> str:
    return digest.replace(":", "%3A")


def _check_stored(what: str, answer: RegistryResponse, digest: str) -> None:
    """Raise if the registry reports a digest other than the one that was sent."""
    stored = answer.headers.get("Docker-Content-Digest", "")
    if is_digest(stored) and stored != digest and stored.startswith(digest[:7]):
        raise mismatch_error(what, f"the registry stored it as `{stored}`, expected `{digest}`")
