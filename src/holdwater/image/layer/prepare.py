"""From what a recipe says of the agent to its layer: the way in.

How each kind is made is in `package.py` and `tree.py`; what is made once is kept by `cache.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

import msgspec

from ...core.errors import BadInput, ImageFailed
from ...core.image import AgentSource, Layer
from ...core.records import Record
from .cache import LayerCache, Scratch
from .package import Asked, environment, package
from .thread import in_thread
from .tree import checked_prefix, identify, pack

# Writes the files of `reference:/path` into a directory; the digest of the image that they came from.
Fetch = Callable[[str, Path], Awaitable[str]]


class Packaged(Record, frozen=True):
    """The agent's files, ready to be put on a base."""

    layer: Layer
    env: dict[str, str] = msgspec.field(default_factory=dict)  # what they need to be told
    origin: str = ""  # the digest of the image that they came from


async def prepare(source: AgentSource, cache: LayerCache, log: Path, fetch: Fetch | None = None) -> Packaged:
    """The layer of `source`: from the cache, or made now. `log` takes what building it prints."""
    prefix = checked_prefix(source.prefix)
    try:
        if source.directory is not None:
            return Packaged(layer=await _directory(Path(source.directory), prefix, cache))
        if source.image is not None:
            return await _image(source.image, prefix, cache, fetch)
        project = Path(source.source) if source.source is not None else None
        if project is None and source.package is None:
            raise BadInput(
                "the agent has no files: none of `source`, `package`, `directory`, `image` is given"
            )
        asked = Asked(prefix=prefix, project=project, requirement=source.package or "")
        return Packaged(layer=await package(asked, cache, log), env=environment(prefix))
    except OSError as e:
        raise ImageFailed(f"the agent's layer could not be made: {e}", kind="layer") from e


async def _directory(directory: Path, prefix: str, cache: LayerCache) -> Layer:
    if not directory.is_dir():
        raise BadInput(f"the agent's directory is not there: `{directory}`")
    identity = await in_thread(lambda check: identify(directory, prefix, check))

    async def build(scratch: Scratch) -> Layer:
        return await in_thread(lambda check: pack(directory, prefix, scratch.path / "layer", check))

    return await cache.get(sha256(f"directory {identity}".encode()).hexdigest(), build)


async def _image(place: str, prefix: str, cache: LayerCache, fetch: Fetch | None) -> Packaged:
    if fetch is None:
        raise BadInput(f"no engine can take files out of an image here: `{place}`")
    async with cache.scratch() as scratch:
        files = scratch.path / "files"
        files.mkdir()
        digest = await fetch(place, files)
        return Packaged(layer=await _directory(files, prefix, cache), origin=digest)
