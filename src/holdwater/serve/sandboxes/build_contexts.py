"""The build contexts that a client of a sandbox server has sent, kept until its session ends.

A context is a tree from outside. `sandbox/tree_copy.py` unpacks it without trust, and docker builds it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from ...core.errors import AttemptInterrupted, ImageFailed
from ...core.failures import SERVER
from ...core.limits import GiB
from ...core.records import SandboxSpec
from ...core.sandbox_protocol import HoldPlace
from ...sandbox.tree_copy import unpack
from ...web.link_streams import LinkStream
from .call_handlers import feed_thread
from .sandbox_host import SandboxHost

DIGEST = re.compile(r"[0-9a-f]{40}")
LARGEST_CONTEXT = 16 * GiB  # bytes, if the disk has them
CONTENT = "context"  # the name of a context's directory inside its own


class BuildContexts:
    """The contexts of one session."""

    def __init__(self, host: SandboxHost) -> None:
        self._host = host
        self._directories: dict[str, Path] = {}  # digest -> its directory; bound: the disk of the server

    def find(self, digest: str) -> bool:
        self._check_builds()
        return digest in self._directories

    async def put(self, digest: str, stream: LinkStream) -> None:
        """Keep the context that the client sends."""
        self._check_builds()
        if not DIGEST.fullmatch(digest):
            raise _make_error("invalid digest of a build context")
        directory = Path(tempfile.mkdtemp(prefix=".context-", dir=self._host.spools))
        try:
            work = partial(_unpack_context, into=directory / CONTENT)
            await feed_thread(work, stream, self._host.threads)
        except BaseException:  # boundary: no part of a context stays; the error is raised again
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            raise
        old = self._directories.get(digest)
        self._directories[digest] = directory
        if old is not None:
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    def locate(self, request: HoldPlace) -> HoldPlace:
        """Return the request with the directories of its contexts."""
        grader = None if request.grader is None else self._locate_start(request.grader)
        return msgspec.structs.replace(request, start=self._locate_start(request.start), grader=grader)

    async def close(self) -> None:
        while self._directories:
            _, directory = self._directories.popitem()
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _locate_start(self, start: SandboxSpec) -> SandboxSpec:
        if start.build is None:
            return start
        self._check_builds()
        directory = self._directories.get(start.build)
        if directory is None:  # it was sent in an earlier session
            raise AttemptInterrupted("the sandbox server has lost a build context", kind=SERVER)
        return msgspec.structs.replace(start, build=str(directory / CONTENT))

    def _check_builds(self) -> None:
        if not self._host.builds:
            raise ImageFailed(
                "the sandbox server builds no Dockerfiles",
                "`holdwater sandboxd --sandbox docker --builds`, or name an image that it can pull",
                kind="build",
                again=False,
            )


def _make_error(message: str) -> ImageFailed:
    return ImageFailed(message, kind="build", again=False)


def _unpack_context(content: IO[bytes], into: Path) -> None:
    """Unpack a context; refuse one with links that lead out of it, which reading it would follow."""
    if left_out := unpack(content, into, largest=LARGEST_CONTEXT):
        raise _make_error(f"a build context for a sandbox server cannot have {left_out[0]}")
