"""The registry engine: put layers and edits on top of a base without pulling it.

The engine writes a new manifest and a new configuration; blobs are mounted or streamed, never stored on this
machine. `manifest.py` computes the manifest; `transfer.py` transfers the blobs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from ...core.errors import BadInput, ImageFailed
from ...core.image import (
    BuildProgress,
    EngineKind,
    ImageBlueprint,
    ImageForecast,
    ImageOutcome,
    ImageTarget,
    Note,
    PublishedImage,
    compute_image_key,
    make_labels,
)
from .client import RegistryClient, RegistryClients
from .lookup import ResolvedBase, find_damage, resolve_base, run_concurrently
from .manifest import (
    LARGEST_CONFIG,
    AssembledImage,
    BlobDescriptor,
    EncodedManifest,
    assemble_image,
    assemble_index,
)
from .reference import ImageReference, is_tag, parse_reference, parse_repository
from .refusal import RegistryRefusal
from .transfer import BlobSource, BlobTransfers, TransferTotals

_BLOB_LOST = "MANIFEST_BLOB_UNKNOWN"


class ImageDraft(NamedTuple):
    """The image to make, to the byte, and the state of its tag."""

    base: ResolvedBase
    place: ImageReference  # the target repository
    tag: str  # derived from the content
    top: EncodedManifest  # the manifest or index that the tag will refer to
    parts: tuple[AssembledImage, ...]  # one image per platform
    current_digest: str  # the digest that the tag refers to now; empty: no such tag
    damage: str = ""  # a description of the damage of the tagged image; empty: none
    forced: bool = False  # the image is made also if it is present

    @property
    def how(self) -> ImageOutcome:
        return ImageOutcome.PRESENT if self.is_whole and not self.forced else ImageOutcome.MADE

    @property
    def is_whole(self) -> bool:
        """Whether the tag refers to this image, and nothing of it is damaged."""
        return self.current_digest == self.top.digest and not self.damage

    @property
    def replaces(self) -> str:
        return "" if self.is_whole else self.current_digest

    @property
    def config_bytes(self) -> int:
        """The total size of all configurations."""
        return sum(len(part.config) for part in self.parts)


class RegistryEngine:
    """Makes images by appending; used with `async with`, while its registry clients are open."""

    def __init__(
        self, blueprint: ImageBlueprint, registries: RegistryClients, note: Note, *, force: bool = False
    ) -> None:
        if blueprint.steps:
            raise BadInput("the registry engine cannot run the recipe's `steps`", "use engine `docker`")
        if not blueprint.platforms:
            raise BadInput("the recipe names no platform")
        self._blueprint = blueprint
        self._registries = registries
        self._note = note
        self._force = force
        self._forced: set[str] = set()  # references that were made in any case; bound: the images of a recipe

    async def __aenter__(self) -> Self:
        self._transfers = BlobTransfers(self._registries, self._note)
        return self

    async def __aexit__(self, *_: object) -> None:
        del self._transfers

    async def foresee(self, image: ImageTarget) -> ImageForecast:
        """Return a forecast of `make`. Sizes are those of blobs."""
        with _prefix_errors(image):
            drawn = await self._draft_image(image)
            present = drawn.how is ImageOutcome.PRESENT
            upload, download = (0, 0) if present else await self._measure_cost(drawn)
        return ImageForecast(
            name=image.name,
            base=image.base,
            base_digest=drawn.base.digest,
            reference=f"{image.repository}:{drawn.tag}",
            how=drawn.how,
            upload=upload,
            download=download,
            replaces=drawn.replaces,
        )

    async def make(self, image: ImageTarget, log: Path, progress: BuildProgress) -> PublishedImage:
        """Make the image; replace a tag that has other content. The engine writes nothing to `log`."""
        began, account = time.monotonic(), TransferTotals()
        with _prefix_errors(image):
            progress.phase("base")
            drawn = await self._draft_image(image)
            if drawn.how is ImageOutcome.MADE:
                await self._make_image(drawn, account, progress)
                if drawn.damage:
                    await self._check_repaired(drawn)
                if self._force:
                    self._forced.add(f"{image.repository}:{drawn.tag}")
            await run_concurrently(*(self._put_alias(drawn, alias) for alias in image.aliases))
        return PublishedImage(
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

    async def _draft_image(self, image: ImageTarget) -> ImageDraft:
        reference, place = _parse_references(image)
        client, blueprint = self._registries.client_for(reference.registry), self._blueprint
        base = await resolve_base(client, reference, blueprint.platforms)
        tag = compute_image_key(base.digest, blueprint)
        held, *configs = await run_concurrently(
            self._read_tag(place, tag),
            *(client.read_blob(reference.repository, *one.config, LARGEST_CONFIG) for one in base.images),
        )
        labels = make_labels(base.digest, blueprint)
        parts = tuple(
            assemble_image(one, config, blueprint, labels, platform)
            for one, config, platform in zip(base.images, configs, blueprint.platforms, strict=True)
        )
        written = [part.manifest for part in parts]
        top = assemble_index(base.several, base.children, written) if base.several else written[0]
        same = held == top.digest
        damage = await find_damage(self._client(place), place, top.digest) if same else ""
        forced = self._force and f"{image.repository}:{tag}" not in self._forced
        return ImageDraft(base, place, tag, top, parts, held, damage, forced)

    async def _read_tag(self, place: ImageReference, tag: str) -> str:
        """Return the digest that a tag refers to; empty: the registry has no such tag."""
        found = await self._client(place).find_manifest(place.repository, tag)
        return found.digest if found else ""

    async def _measure_cost(self, drawn: ImageDraft) -> tuple[int, int]:
        """Return the bytes to upload and to download."""
        needs = self._needed_blobs(drawn)
        sizes = await run_concurrently(
            *(self._transfers.foresee(blob, drawn.place, source) for blob, source in needs)
        )
        streamed = sum(
            size for size, (_, source) in zip(sizes, needs, strict=True) if isinstance(source, ImageReference)
        )
        return sum(sizes) + drawn.config_bytes, streamed

    async def _make_image(self, drawn: ImageDraft, account: TransferTotals, progress: BuildProgress) -> None:
        progress.phase("layers")
        await self._bring_blobs(drawn, account)
        progress.phase("push")
        try:
            await self._put_manifests(drawn)
        except RegistryRefusal as error:
            if error.code != _BLOB_LOST:
                raise
            # A blob that was known to exist is gone: it was deleted, or garbage-collected.
            self._transfers.forget(drawn.place, {blob.digest for blob, _ in self._needed_blobs(drawn)})
            await self._bring_blobs(drawn, account)
            await self._put_manifests(drawn)

    def _needed_blobs(self, drawn: ImageDraft) -> list[tuple[BlobDescriptor, BlobSource]]:
        """Return the blobs that the repository needs, without configurations, each with its source."""
        layers: list[tuple[BlobDescriptor, BlobSource]] = [
            (BlobDescriptor(layer.digest, layer.size), Path(layer.path)) for layer in self._blueprint.layers
        ]
        base = drawn.base.reference
        if base.name == drawn.place.name:
            return layers
        blobs = dict.fromkeys(blob for one in drawn.base.images for blob in one.layers)
        return [*layers, *((blob, base) for blob in blobs)]

    async def _bring_blobs(self, drawn: ImageDraft, account: TransferTotals) -> None:
        """Transfer the blobs before the manifests: a registry rejects a manifest of missing blobs."""
        client, place = self._client(drawn.place), drawn.place
        await run_concurrently(
            *(
                self._transfers.bring(blob, place, source, account)
                for blob, source in self._needed_blobs(drawn)
            ),
            *(client.upload_bytes(place.repository, one.config_digest, one.config) for one in drawn.parts),
        )
        account.uploaded += drawn.config_bytes

    async def _put_manifests(self, drawn: ImageDraft) -> None:
        client, repository = self._client(drawn.place), drawn.place.repository
        if drawn.base.several:
            written = [part.manifest for part in drawn.parts]
            await run_concurrently(*(client.put_manifest(repository, one.digest, one) for one in written))
        await client.put_manifest(repository, drawn.tag, drawn.top)

    async def _check_repaired(self, drawn: ImageDraft) -> None:
        """Raise if the image is still damaged: a registry may keep a bad blob whose digest it already has."""
        if damage := await find_damage(self._client(drawn.place), drawn.place, drawn.top.digest):
            raise ImageFailed(
                f"the registry keeps a damaged copy of it: {damage}",
                "remove the blob from the registry's storage, or choose another `repository`",
                kind="damaged",
                again=False,
            )

    async def _put_alias(self, drawn: ImageDraft, alias: str) -> None:
        if drawn.how is ImageOutcome.PRESENT and await self._read_tag(drawn.place, alias) == drawn.top.digest:
            return
        await self._client(drawn.place).put_manifest(drawn.place.repository, alias, drawn.top)

    def _client(self, place: ImageReference) -> RegistryClient:
        return self._registries.client_for(place.registry)


def _parse_references(image: ImageTarget) -> tuple[ImageReference, ImageReference]:
    """Return the base, and the repository of the new image."""
    try:
        base, place = parse_reference(image.base), parse_repository(image.repository)
    except BadInput as error:
        raise ImageFailed(error.message, kind="unsupported", again=False) from None
    for alias in image.aliases:
        if not is_tag(alias):
            raise ImageFailed(f"invalid tag: {alias[:200]!r}", kind="unsupported", again=False)
    return base, place


@contextmanager
def _prefix_errors(image: ImageTarget) -> Iterator[None]:
    """Add the image's name to the message of an `ImageFailed`."""
    try:
        yield
    except ImageFailed as error:
        message = f"image `{image.name}` from `{image.base}`: {error.message}"
        raise ImageFailed(
            message, error.hint, kind=error.kind, again=error.again, after=error.after
        ) from None
