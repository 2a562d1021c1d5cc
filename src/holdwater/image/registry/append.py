"""The registry engine: a base with layers and edits on top, without pulling it.

A new manifest and a new configuration are written; blobs are mounted or streamed, never stored here. What the
new manifest is, is decided in `manifest.py`; how its blobs get there in `transfer.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ...core.errors import BadInput, ImageFailed
from ...core.image import (
    Blueprint,
    EngineKind,
    Foreseen,
    How,
    Image,
    Made,
    Note,
    Progress,
    key_of,
    labels_of,
)
from .base import Base, resolve
from .check import find_damage
from .client import Registries, RegistryClient
from .manifest import LARGEST_CONFIG, Assembled, Blob, Written, assemble, gather
from .reference import Reference, is_tag, parse, parse_repository
from .refusal import Refusal
from .together import together
from .transfer import Account, Source, Transfers

_BLOB_LOST = "MANIFEST_BLOB_UNKNOWN"


class Drawn(NamedTuple):
    """An image as it shall be, to the byte."""

    base: Base
    place: Reference  # the repository that it goes to
    tag: str  # follows from its content
    top: Written  # what the tag stands for then
    parts: tuple[Assembled, ...]  # an image for each platform
    held: str  # the digest that the tag stands for now; empty: the tag is not there
    damage: str = ""  # what is wrong with the image that the tag stands for

    @property
    def how(self) -> How:
        return How.PRESENT if self.held == self.top.digest and not self.damage else How.MADE

    @property
    def replaces(self) -> str:
        return "" if self.how is How.PRESENT else self.held

    @property
    def configs(self) -> int:
        """Bytes of all configurations."""
        return sum(len(part.config) for part in self.parts)


class RegistryEngine:
    """Makes images by appending; used with `async with`, inside that of its registries."""

    def __init__(self, blueprint: Blueprint, registries: Registries, note: Note) -> None:
        if blueprint.steps:
            raise BadInput("no registry can carry out the recipe's `steps`", "engine `docker` can")
        if not blueprint.platforms:
            raise BadInput("the recipe names no platform")
        self._blueprint = blueprint
        self._registries = registries
        self._note = note

    async def __aenter__(self) -> Self:
        self._transfers = Transfers(self._registries, self._note)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._transfers

    async def foresee(self, image: Image) -> Foreseen:
        """What `make` would do. Sizes are of blobs."""
        with _named(image):
            drawn = await self._drawn(image)
            upload, download = (0, 0) if drawn.how is How.PRESENT else await self._cost(drawn)
        return Foreseen(
            name=image.name,
            base=image.base,
            base_digest=drawn.base.digest,
            reference=f"{image.repository}:{drawn.tag}",
            how=drawn.how,
            upload=upload,
            download=download,
            replaces=drawn.replaces,
        )

    async def make(self, image: Image, log: Path, progress: Progress) -> Made:
        """Nothing is printed, so `log` is not written. A tag that has other content is replaced."""
        began, account = time.monotonic(), Account()
        with _named(image):
            progress.phase("base")
            drawn = await self._drawn(image)
            if drawn.how is How.MADE:
                await self._make(drawn, account, progress)
                if drawn.damage:
                    await self._check_repaired(drawn)
            await together(*(self._alias(drawn, alias) for alias in image.aliases))
        return Made(
            name=image.name,
            how=drawn.how,
            base=image.base,
            base_digest=drawn.base.digest,
            reference=f"{image.repository}:{drawn.tag}",
            digest=drawn.top.digest,
            engine=EngineKind.REGISTRY,
            aliases=image.aliases,
            layers=tuple(layer.digest for layer in self._blueprint.layers),
            uploaded=account.uploaded,
            downloaded=account.downloaded,
            mounted=account.mounted,
            seconds=time.monotonic() - began,
            replaced=drawn.replaces,
        )

    async def _drawn(self, image: Image) -> Drawn:
        reference, place = _references(image)
        client, blueprint = self._registries.registry(reference.registry), self._blueprint
        base = await resolve(client, reference, blueprint.platforms)
        tag = key_of(base.digest, blueprint)
        held, *configs = await together(
            self._standing(place, tag),
            *(client.small(reference.repository, *one.config, LARGEST_CONFIG) for one in base.images),
        )
        labels = labels_of(base.digest, blueprint)
        parts = tuple(
            assemble(one, config, blueprint, labels, platform)
            for one, config, platform in zip(base.images, configs, blueprint.platforms, strict=True)
        )
        written = [part.manifest for part in parts]
        top = gather(base.several, base.children, written) if base.several else written[0]
        same = held == top.digest
        damage = await find_damage(self._client(place), place, top.digest) if same else ""
        return Drawn(base, place, tag, top, parts, held, damage)

    async def _standing(self, place: Reference, tag: str) -> str:
        """The digest that a tag stands for; empty: the registry says that there is no such tag."""
        try:
            return (await self._client(place).manifest(place.repository, tag)).digest
        except Refusal as error:
            if error.kind == "missing":
                return ""
            raise

    async def _cost(self, drawn: Drawn) -> tuple[int, int]:
        """Bytes up and down."""
        needs = self._needs(drawn)
        sizes = await together(
            *(self._transfers.foresee(blob, drawn.place, source) for blob, source in needs)
        )
        streamed = sum(
            size for size, (_, source) in zip(sizes, needs, strict=True) if isinstance(source, Reference)
        )
        return sum(sizes) + drawn.configs, streamed

    async def _make(self, drawn: Drawn, account: Account, progress: Progress) -> None:
        progress.phase("layers")
        await self._supply(drawn, account)
        progress.phase("push")
        try:
            await self._put(drawn)
        except Refusal as error:
            if error.code != _BLOB_LOST:
                raise
            # What was known to be there is not: someone removed it, or collected it as garbage.
            self._transfers.forget(drawn.place, {blob.digest for blob, _ in self._needs(drawn)})
            await self._supply(drawn, account)
            await self._put(drawn)

    def _needs(self, drawn: Drawn) -> list[tuple[Blob, Source]]:
        """The blobs that its repository must have beside configurations, and where they are."""
        layers: list[tuple[Blob, Source]] = [
            (Blob(layer.digest, layer.size), Path(layer.path)) for layer in self._blueprint.layers
        ]
        base = drawn.base.reference
        if base.name == drawn.place.name:
            return layers
        blobs = dict.fromkeys(blob for one in drawn.base.images for blob in one.layers)
        return [*layers, *((blob, base) for blob in blobs)]

    async def _supply(self, drawn: Drawn, account: Account) -> None:
        """Blobs go first: a registry takes no manifest of what it has not."""
        client, place = self._client(drawn.place), drawn.place
        await together(
            *(self._transfers.bring(blob, place, source, account) for blob, source in self._needs(drawn)),
            *(client.upload_bytes(place.repository, one.config_digest, one.config) for one in drawn.parts),
        )
        account.uploaded += drawn.configs

    async def _put(self, drawn: Drawn) -> None:
        client, repository = self._client(drawn.place), drawn.place.repository
        if drawn.base.several:
            written = [part.manifest for part in drawn.parts]
            await together(*(client.put_manifest(repository, one.digest, one) for one in written))
        await client.put_manifest(repository, drawn.tag, drawn.top)

    async def _check_repaired(self, drawn: Drawn) -> None:
        """A registry may keep what it has in spite of an upload: it counts by digest alone."""
        if damage := await find_damage(self._client(drawn.place), drawn.place, drawn.top.digest):
            raise ImageFailed(
                f"it is damaged in the registry, which keeps it so: {damage}",
                "remove the blob from the registry's storage, or choose another `repository`",
                kind="damaged",
                again=False,
            )

    async def _alias(self, drawn: Drawn, alias: str) -> None:
        if drawn.how is How.PRESENT and await self._standing(drawn.place, alias) == drawn.top.digest:
            return
        await self._client(drawn.place).put_manifest(drawn.place.repository, alias, drawn.top)

    def _client(self, place: Reference) -> RegistryClient:
        return self._registries.registry(place.registry)


def _references(image: Image) -> tuple[Reference, Reference]:
    """The base, and the repository that the image goes to."""
    try:
        base, place = parse(image.base), parse_repository(image.repository)
    except BadInput as error:
        raise ImageFailed(error.message, kind="unsupported", again=False) from None
    for alias in image.aliases:
        if not is_tag(alias):
            raise ImageFailed(f"not a tag: {alias[:200]!r}", kind="unsupported", again=False)
    return base, place


@contextmanager
def _named(image: Image) -> Iterator[None]:
    """What goes wrong names the image."""
    try:
        yield
    except ImageFailed as error:
        message = f"image `{image.name}` from `{image.base}`: {error.message}"
        raise ImageFailed(
            message, error.hint, kind=error.kind, again=error.again, after=error.after
        ) from None
