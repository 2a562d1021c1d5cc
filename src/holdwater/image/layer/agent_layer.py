"""Make the layer of the agent that a recipe names: the entry point of this package.

`package.py` and `tree.py` make each kind of layer; `cache.py` keeps the finished layers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

import msgspec

from ...core.errors import BadInput, ImageFailed
from ...core.image import AgentSource, ImageLayer
from ...core.records import Record
from .cache import LayerCache, ScratchDirectory
from .package import PackageRequest, make_environment, package_agent
from .thread import run_in_thread
from .tree import check_prefix, identify, pack

# Writes the files of `reference:/path` into a directory; returns the digest of the image.
FetchFiles = Callable[[str, Path], Awaitable[str]]


class PackagedAgent(Record, frozen=True):
    """The agent's layer, ready to be put on a base."""

    layer: ImageLayer
    env: dict[str, str] = msgspec.field(default_factory=dict)  # variables that the agent's files need
    origin: str = ""  # the digest of the image that the files came from


async def prepare_agent(
    source: AgentSource, cache: LayerCache, log: Path, fetch: FetchFiles | None = None
) -> PackagedAgent:
    """Return the layer of `source`, from the cache or newly built. `log` receives the output of the build."""
    prefix = check_prefix(source.prefix)
    try:
        if source.directory is not None:
            return PackagedAgent(layer=await _pack_directory(Path(source.directory), prefix, cache))
        if source.image is not None:
            return await _pack_image(source.image, prefix, cache, fetch)
        project = Path(source.source) if source.source is not None else None
        if project is None and source.package is None:
            raise BadInput(
                "the agent has no files: none of `source`, `package`, `directory`, `image` is given"
            )
        asked = PackageRequest(prefix=prefix, project=project, requirement=source.package or "")
        return PackagedAgent(layer=await package_agent(asked, cache, log), env=make_environment(prefix))
    except OSError as e:
        raise ImageFailed(f"the agent's layer could not be made: {e}", kind="layer") from e


async def _pack_directory(directory: Path, prefix: str, cache: LayerCache) -> ImageLayer:
    if not directory.is_dir():
        raise BadInput(f"the agent's directory does not exist: `{directory}`")
    identity = await run_in_thread(lambda check: identify(directory, prefix, check))

    async def build(scratch: ScratchDirectory) -> ImageLayer:
        return await run_in_thread(lambda check: pack(directory, prefix, scratch.path / "layer", check))

    return await cache.get(sha256(f"directory {identity}".encode()).hexdigest(), build)


async def _pack_image(place: str, prefix: str, cache: LayerCache, fetch: FetchFiles | None) -> PackagedAgent:
    if fetch is None:
        raise BadInput(f"no engine here can extract files from an image: `{place}`")
    async with cache.scratch() as scratch:
        files = scratch.path / "files"
        files.mkdir()
        digest = await fetch(place, files)
        return PackagedAgent(layer=await _pack_directory(files, prefix, cache), origin=digest)
