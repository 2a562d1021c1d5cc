"""The images of remote sandboxes: those of a recipe are made in its registry, and contexts go to the server.

The server pulls and builds them within its own budget. This machine needs no docker daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from ...core.config import RunConfig
from ...core.errors import BadInput, ImageFailed
from ...core.image import Note
from ...core.records import SandboxSpec
from ...core.sandbox_protocol import AnyWork, CallDone, FindContext, PutContext
from ...image.docker.dockerfile import DockerfileContext, read_context
from ...sandbox.tree_stream import pack_tree
from ...shielded_wait import SingleFlight
from ..builds.image_maker import ImageMaker, open_registry_maker
from ..conductor.admission import ImageRequest
from ..setup.config import ProcessEnvironment

THREADS = 2  # each reads or packs one build context


class CallServer(Protocol):
    """Makes a call to the server, with this content."""

    def __call__(self, work: AnyWork, content: AsyncIterable[bytes] | None = None) -> Awaitable[CallDone]: ...


class RemoteImages:
    """Names the images of a run as its server finds them; used with `async with`."""

    def __init__(
        self, config: RunConfig, environment: ProcessEnvironment, logs: Path, note: Note, call: CallServer
    ) -> None:
        self._config = config
        self._environment = environment
        self._logs = logs
        self._note = note
        self._call = call
        self._maker: ImageMaker | None = None
        self._uploads: SingleFlight[None] = SingleFlight()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> RemoteImages:
        self._threads = ThreadPoolExecutor(THREADS, "holdwater-contexts")
        self._stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        if self._config.images is not None:
            maker = open_registry_maker(self._config.images, self._environment, self._logs, self._note)
            self._maker = await self._stack.enter_async_context(maker)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def locate(self, wanted: ImageRequest) -> ImageRequest:
        """Return the request with the run's network, and images and contexts that the server can find."""
        start = wanted.start
        if not start.key:
            start = msgspec.structs.replace(start, image=self._config.image)
        if self._maker is not None:
            start = msgspec.structs.replace(start, image=await self._make_image(self._maker, wanted, start))
        grader = None if wanted.grader is None else await self._locate_start(wanted.grader)
        return msgspec.structs.replace(wanted, start=await self._locate_start(start), grader=grader)

    async def _make_image(self, maker: ImageMaker, wanted: ImageRequest, start: SandboxSpec) -> str | None:
        """Return the image of the recipe; None if the instance names no image, but a build."""
        if start.image is None:
            return None
        try:
            return await maker.ensure_image(msgspec.structs.replace(wanted, start=start))
        except BadInput as error:
            raise ImageFailed(error.message, error.hint, kind="name", again=False) from error

    async def _locate_start(self, start: SandboxSpec) -> SandboxSpec:
        network = start.network or self._config.network
        if start.image is not None or start.build is None:
            return msgspec.structs.replace(start, network=network, build=None, build_target="", build_args={})
        read = partial(read_context, Path(start.build), start.build_target, start.build_args)
        context = await asyncio.get_running_loop().run_in_executor(self._threads, read)
        await self._uploads.join(context.digest, partial(self._send_context, context))
        return msgspec.structs.replace(start, network=network, build=context.digest)

    async def _send_context(self, context: DockerfileContext) -> None:
        """Send a build context to the server, unless it has it already."""
        if (await self._call(FindContext(digest=context.digest))).result:
            return
        self._note("context.sent", f"`{context.directory}` goes to the sandbox server: {context.size} bytes")
        async with pack_tree(Path(context.directory), "", self._threads) as (pieces, packing):
            await self._call(PutContext(digest=context.digest), pieces)
            await packing
