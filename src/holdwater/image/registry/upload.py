"""What is put into a registry: blobs from bytes, a file or another registry, mounts, manifests.

Each operation is whole or raises a `Refusal`; it tries again by itself. What is read is in `client.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple

from .flow import Flow, OfFile
from .host import Answer, Ask, Host
from .manifest import Written
from .reference import is_digest
from .refusal import Refusal, mismatch, unreached
from .tokens import Scopes

Opened = Callable[[], AbstractAsyncContextManager[Flow]]

_BEGUN = frozenset({202})
_DONE = frozenset({200, 201, 204})
_EITHER = _BEGUN | _DONE
_NO_SUCH_REQUEST = frozenset({400, 404, 405, 411, 415, 501})  # where a registry knows a request no better way
_RANGE = re.compile(r"(?:bytes=)?0-([0-9]+)")


class Mount(NamedTuple):
    """How a mount ended: done, or an upload that was begun in its place, or neither."""

    done: bool
    location: str = ""


class Uploads:
    """The writing half of a registry's client."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._at_once = True  # until the registry shows that it takes no blob in a single request

    async def mount(self, repository: str, digest: str, origin: str) -> Mount:
        """Have a blob of the repository `origin` in `repository` as well."""
        what = f"{self._blob(repository, digest)} cannot be taken over from `{origin}`"
        scopes = _push(repository) | {f"repository:{origin}:pull"}
        path = f"{repository}/blobs/uploads/?mount={_quoted(digest)}&from={origin}"

        async def operation() -> Mount:
            try:
                answer = await self.host.answer(Ask("POST", path, what, scopes), _EITHER)
            except Refusal as error:
                if error.status in _NO_SUCH_REQUEST:
                    return Mount(False)
                raise
            if answer.status in _DONE:
                return Mount(True)
            return Mount(False, self._location(what, answer))

        return await self.host.trying(operation)

    async def upload_bytes(self, repository: str, digest: str, content: bytes) -> None:
        """A small blob: in one request where the registry knows that, in two otherwise."""
        what = f"{self._blob(repository, digest)} cannot be uploaded"

        async def operation() -> None:
            location = await self._at_once_or_begun(repository, digest, content, what)
            if location:
                await self._finish(repository, digest, location, content, what)

        await self.host.trying(operation)

    async def upload_file(
        self, repository: str, digest: str, size: int, path: Path, location: str = ""
    ) -> None:
        """A blob from a file that is read piece by piece; after a cut, from where the registry got to."""
        what = f"{self._blob(repository, digest)} cannot be uploaded"
        begun, cut = location, ""

        async def operation() -> None:
            nonlocal begun, cut
            at, start = (begun, 0) if begun else await self._resumed(repository, cut, size, what)
            begun = cut = ""
            at = at or await self._begin(repository, what)
            with OfFile(what, digest, size, path, start) as flow:
                try:
                    await self._finish(repository, digest, at, flow, what, range(start, size))
                except Refusal as error:
                    cut = at if error.status == 0 and error.kind == "registry" else ""
                    raise

        await self.host.trying(operation)

    async def upload_stream(
        self, repository: str, digest: str, size: int, opened: Opened, location: str = ""
    ) -> None:
        """A blob from wherever `opened` has it, never whole in memory; `location`: one that is begun."""
        what = f"{self._blob(repository, digest)} cannot be uploaded"

        async def operation() -> None:
            nonlocal location
            at, location = location, ""
            async with opened() as flow:
                at = at or await self._begin(repository, what)
                await self._finish(repository, digest, at, flow, what, range(size))

        await self.host.trying(operation)

    async def cancel(self, repository: str, location: str) -> None:
        """Give up an upload that was begun. It is tried once: registries drop old ones themselves."""
        what = f"an upload to `{self.host.registry}/{repository}` cannot be cancelled"
        await self.host.answer(Ask("DELETE", location, what, _push(repository)), _EITHER | {404})

    async def put_manifest(self, repository: str, target: str, manifest: Written) -> None:
        """Under a tag or its own digest."""
        name = f"{self.host.registry}/{repository}{'@' if is_digest(target) else ':'}{target}"
        what = f"the manifest of `{name}` cannot be put"
        headers = {"Content-Type": manifest.media_type}
        path, scopes = f"{repository}/manifests/{target}", _push(repository)
        ask = Ask("PUT", path, what, scopes, headers, manifest.content)

        async def operation() -> None:
            _check_stored(what, await self.host.answer(ask, _EITHER), manifest.digest)

        await self.host.trying(operation)

    async def _at_once_or_begun(self, repository: str, digest: str, content: bytes, what: str) -> str:
        """Where an upload goes on that was begun; empty when it is done."""
        if not self._at_once:
            return await self._begin(repository, what)
        path = f"{repository}/blobs/uploads/?digest={_quoted(digest)}"
        headers = {"Content-Type": "application/octet-stream"}
        try:
            ask = Ask("POST", path, what, _push(repository), headers, content)
            answer = await self.host.answer(ask, _EITHER)
        except Refusal as error:
            if error.status not in _NO_SUCH_REQUEST:
                raise
            self._at_once = False
            return await self._begin(repository, what)
        if answer.status in _DONE:
            _check_stored(what, answer, digest)
            return ""
        self._at_once = False
        return self._location(what, answer)

    async def _begin(self, repository: str, what: str) -> str:
        ask = Ask("POST", f"{repository}/blobs/uploads/", what, _push(repository))
        return self._location(what, await self.host.answer(ask, _BEGUN))

    async def _finish(
        self,
        repository: str,
        digest: str,
        location: str,
        body: bytes | Flow,
        what: str,
        part: range | None = None,
    ) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        if part is not None:
            headers["Content-Length"] = str(len(part))
        if part and part.start:
            headers["Content-Range"] = f"{part.start}-{part.stop - 1}"
        url = f"{location}{'&' if '?' in location else '?'}digest={_quoted(digest)}"
        answer = await self.host.answer(Ask("PUT", url, what, _push(repository), headers, body), _DONE)
        _check_stored(what, answer, digest)

    async def _resumed(self, repository: str, location: str, size: int, what: str) -> tuple[str, int]:
        """Where and from which byte an upload goes on that broke off; nowhere: nobody can tell."""
        if not location:
            return "", 0
        try:
            answer = await self.host.answer(Ask("GET", location, what, _push(repository)), _EITHER)
        except Refusal as error:
            if error.status == 0 or error.status >= 429:
                raise
            return "", 0
        there = _RANGE.fullmatch(answer.headers.get("Range", ""))
        start = int(there[1]) + 1 if there else 0
        if not 1 < start <= size:  # `0-0` is what registries say of one byte and of none
            return "", 0
        return self._location(what, answer), start

    def _location(self, what: str, answer: Answer) -> str:
        location = answer.headers.get("Location")
        if not location:
            raise unreached(what, "the registry does not say where to")
        return str(self.host.located(location, answer.url))

    def _blob(self, repository: str, digest: str) -> str:
        return f"the blob `{self.host.registry}/{repository}@{digest}`"


def _push(repository: str) -> Scopes:
    return frozenset({f"repository:{repository}:pull,push"})


def _quoted(digest: str) -> str:
    return digest.replace(":", "%3A")


def _check_stored(what: str, answer: Answer, digest: str) -> None:
    """The registry may say what it took this for."""
    stored = answer.headers.get("Docker-Content-Digest", "")
    if is_digest(stored) and stored != digest and stored.startswith(digest[:7]):
        raise mismatch(what, f"the registry took it for `{stored}`, it is `{digest}`")
