"""A path of an existing image, written to a local directory: its layers are streamed and never stored.

What lies in a layer is handled in `unpack.py`; which manifest is meant in `base.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from ...core.errors import BadInput
from ...core.image import Platform
from .base import resolve
from .client import Registries
from .flow import Flow
from .reference import parse
from .refusal import unsupported
from .unpack import Tree


async def pick(
    registries: Registries, image: str, path: str, into: Path, platform: Platform | None = None
) -> str:
    """Write what lies below `path` in `image` into the empty directory `into`; the digest of its manifest.

    A path that is a file becomes a file in it.
    """
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise BadInput(f"the directory is not empty: {into}")
    reference = parse(image)
    client = registries.registry(reference.registry)
    base = await resolve(client, reference, (platform or Platform(),))
    manifest = base.images[0]
    if manifest.depth != len(manifest.layers):
        raise unsupported(f"`{reference}` cannot be read", "it has layers that no registry stores")

    async def operation() -> None:
        shutil.rmtree(into)  # what an earlier try has left
        into.mkdir()
        tree = Tree(str(reference), path, into)
        with ThreadPoolExecutor(1) as thread:
            for blob in manifest.layers:
                async with client.blob(reference.repository, blob.digest, blob.size) as flow:
                    await _apply(tree, flow, thread)
        tree.finish()

    await client.host.trying(operation)
    return base.digest


async def _apply(tree: Tree, flow: Flow, thread: Executor) -> None:
    """A layer goes through a pair of sockets to a thread that unpacks it, no faster than that is done."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    unpacking = asyncio.get_running_loop().run_in_executor(thread, tree.apply, theirs)
    try:
        await _pour(flow, ours)
    finally:
        ours.close()  # the thread sees the end of it, and ends
        await asyncio.wait([unpacking])
        failure = unpacking.exception()  # of a flow that broke off, that it broke off
    if failure is not None:
        raise failure


async def _pour(flow: Flow, into: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        async for piece in flow:
            await loop.sock_sendall(into, piece)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the thread has given up, and says why
