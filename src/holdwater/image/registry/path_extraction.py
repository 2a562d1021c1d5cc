"""Extract a path of an image to a local directory; layers are streamed and never stored.

`unpacked_tree.py` unpacks the layers; `base.py` resolves the reference.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from ...core.errors import BadInput
from ...core.image import ImagePlatform
from .base import resolve_base
from .blob_stream import BlobStream
from .client import RegistryClients
from .reference import parse_reference
from .refusal import unsupported_error
from .unpacked_tree import UnpackedTree


async def extract_path(
    registries: RegistryClients, image: str, path: str, into: Path, platform: ImagePlatform | None = None
) -> str:
    """Write the content of `path` in `image` into the empty directory `into`; return the manifest's digest.

    A path that is a file becomes a file in `into`.
    """
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise BadInput(f"the directory is not empty: {into}")
    reference = parse_reference(image)
    client = registries.client_for(reference.registry)
    base = await resolve_base(client, reference, (platform or ImagePlatform(),))
    manifest = base.images[0]
    if manifest.depth != len(manifest.layers):
        raise unsupported_error(f"`{reference}` cannot be read", "it has layers that no registry stores")

    async def operation() -> None:
        shutil.rmtree(into)  # remove the leftovers of an earlier attempt
        into.mkdir()
        tree = UnpackedTree(str(reference), path, into)
        with ThreadPoolExecutor(1) as thread:
            for blob in manifest.layers:
                async with client.open_blob(reference.repository, blob.digest, blob.size) as flow:
                    await _apply_layer(tree, flow, thread)
        tree.finish()

    await client.host.retry(operation)
    return base.digest


async def _apply_layer(tree: UnpackedTree, flow: BlobStream, thread: Executor) -> None:
    """Send a layer through a socket pair to a thread that unpacks it; the socket limits the pace."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    unpacking = asyncio.get_running_loop().run_in_executor(thread, tree.apply, theirs)
    try:
        await _feed_socket(flow, ours)
    finally:
        ours.close()  # the thread reads the end of the stream, and ends
        await asyncio.wait([unpacking])
        failure = unpacking.exception()  # retrieve it; if the download failed, that error is raised instead
    if failure is not None:
        raise failure


async def _feed_socket(flow: BlobStream, into: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        async for piece in flow:
            await loop.sock_sendall(into, piece)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the thread has failed; its own error is raised
