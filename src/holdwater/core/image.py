"""Records of image builds: the requested image, its ingredients, the published result.

Pure. `image/recipe.py` reads a recipe and an `ImageEngine` makes an image. A build is an attempt of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec

from .records import GiB, Record

KEY_LABEL = "io.holdwater.key"  # identifies the content of an image: see `compute_image_key`
BASE_DIGEST_LABEL = "org.opencontainers.image.base.digest"
LAYER_CACHE = 10 * GiB
DAEMON_CACHE = 1 * GiB


class EngineKind(StrEnum):
    """How images are made: by assembling them in the registry, or by a docker build."""

    AUTO = "auto"  # the registry if the recipe allows it, otherwise docker
    REGISTRY = "registry"
    DOCKER = "docker"


class ForcedPhase(StrEnum):
    """The phase of a build that is carried out again, also for images that are present."""

    ALL = "all"
    BASES = "bases"  # the `before` lines
    AGENT = "agent"  # the agent's layer, and the image with it


class ImagePlatform(Record, frozen=True):
    """The operating system and architecture that an image runs on."""

    os: str = "linux"
    architecture: str = "amd64"
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class ConfigEdits(Record, frozen=True):
    """Changes to the configuration of the base image; None and empty values keep the base's own."""

    env: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] | None = None  # as in a Dockerfile, it clears the base's `cmd`
    cmd: tuple[str, ...] | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class BuildSteps(Record, frozen=True):
    """Dockerfile lines that a registry cannot execute: they need a real build."""

    before: tuple[str, ...] = ()  # run on the base, before the agent is added
    after: tuple[str, ...] = ()  # run after the agent is added

    def __bool__(self) -> bool:
        return bool(self.before or self.after)


class ImageLayer(Record, frozen=True):
    """Files to put on top of a base: a gzipped tar on this machine."""

    digest: str  # `sha256:...` of the file
    diff_id: str  # `sha256:...` of the unpacked tar
    size: int  # bytes of the file
    unpacked: int  # bytes of the unpacked tar
    path: str


class ImageBlueprint(Record, frozen=True):
    """The content that all images of a build share: layers, configuration and steps."""

    layers: tuple[ImageLayer, ...] = ()
    edits: ConfigEdits = ConfigEdits()
    steps: BuildSteps = BuildSteps()
    platforms: tuple[ImagePlatform, ...] = (ImagePlatform(),)  # with more than one, an index is written


class ImageTarget(Record, frozen=True):
    """One image to make."""

    name: str  # the instance's name in the ledger
    base: str  # a reference: `debian:12`, `ghcr.io/a/b@sha256:...`
    repository: str  # the destination: `localhost:5000/agents`
    aliases: tuple[str, ...] = ()  # readable tags beside the tag that is derived from the content
    bases: str = ""  # the repository of the base with the `before` lines; empty: that base is not published


class ImageOutcome(StrEnum):
    """The result of an image that did not fail: made now, or present already."""

    MADE = "made"
    PRESENT = "present"


class PublishedImage(Record, frozen=True):
    """An image in its registry, after the build."""

    name: str
    how: ImageOutcome
    base: str
    base_digest: str
    reference: str  # `localhost:5000/agents:<key>`
    digest: str
    engine: EngineKind
    aliases: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()  # digests of the layers added to the base, where they are known
    uploaded: int = 0  # bytes
    downloaded: int = 0
    mounted: int = 0  # blobs that were mounted from another repository of the registry
    seconds: float = 0.0
    replaced: str = ""  # the digest of a different image that had the tag before
    prepared: str = ""  # the published base with the `before` lines, pinned by digest


class ImageForecast(Record, frozen=True):
    """The work that a build would do for an image. Sizes estimate the content that is still missing."""

    name: str
    base: str
    base_digest: str
    reference: str
    how: ImageOutcome
    upload: int = 0  # bytes
    download: int = 0
    disk: int = 0  # bytes on the daemon's disk during the build
    replaces: str = ""
    prepared: str = ""  # the reference of the published base with the `before` lines
    prepares: bool = False  # that base must be made first, so the reference of the image is not known yet


class FailedForecast(Record, frozen=True):
    """An image without a forecast, and the reason."""

    name: str
    base: str
    failure: str
    again: bool = False  # the registry or the daemon did not answer properly: the image may be possible


class ImagesPlan(Record, frozen=True):
    """The output of `images plan --json`."""

    recipe: str
    revision: str  # the commit that `{git.sha}` stands for; empty: the recipe does not name it
    engine: str
    why: str  # why this engine was chosen
    layers: tuple[str, ...]  # digests
    layer_bytes: int
    total: int
    make: int
    present: int
    impossible: int  # images that no build can make: a missing base, a refused login
    unknown: int  # images whose registry or daemon did not answer properly
    make_bases: int  # bases with `before` lines that must be made first
    upload: int
    download: int
    disk: int  # the largest need of a single image on the daemon's disk
    disk_free: int  # bytes that the build may use there; 0: not queried
    exit_status: int  # of `images plan`: 0, 1 for impossible or unknown images, 4 for too small a disk
    images: list[ImageForecast | FailedForecast]


class ImagesAudit(Record, frozen=True):
    """The result of checking that every image of a build is in its registry, as recorded."""

    planned: int
    settled: int
    checked: int
    failed: int  # images that the build recorded as failed
    problems: tuple[str, ...]
    ok: bool


class BuildProgress(Protocol):
    """Receives progress from an engine while it makes an image."""

    def phase(self, name: str) -> None:
        """Report the current phase in one word: `base`, `layers`, `assembly`, `push`."""

    def disk(self, bytes_: int) -> None:
        """Report the bytes that this image takes on the daemon's disk now."""


class ImageEngine(Protocol):
    """Makes images; opened and closed with `async with`. A failure of one image is an `ImageFailed`."""

    async def foresee(self, image: ImageTarget) -> ImageForecast:
        """Return the work that `make` would do, without doing it."""

    async def make(self, image: ImageTarget, log: Path, progress: BuildProgress) -> PublishedImage:
        """Make the image unless it is present already. `log` receives the output of a build."""


Note = Callable[[str, str], None]  # (kind, message): a counted event of the run, for example `cleanup.failed`


class RegistryOptions(Record, frozen=True):
    """Connection settings of one registry."""

    insecure: bool = False  # plain HTTP; loopback addresses are tried with it in any case
    requests_a_minute: float | None = None


class StageSource(Record, frozen=True):
    """Files of a stage of a Dockerfile."""

    dockerfile: str
    context: str  # the directory that the build reads
    path: str  # in the stage
    target: str = ""  # the stage; empty: the last one
    arguments: dict[str, str] = msgspec.field(default_factory=dict)


class AgentSource(Record, frozen=True):
    """The source of the agent's files: exactly one of the first five fields."""

    source: str | None = None  # the directory of a Python project, which is made self-contained
    package: str | None = None  # a requirement such as `mini-swe-agent==2.4.6`, which is made self-contained
    directory: str | None = None  # a directory that is copied unchanged
    image: str | None = None  # `reference:/path`: a path in an existing image
    stage: StageSource | None = None
    prefix: str = "/opt/agent"  # the agent's directory in the image
    extras: tuple[str, ...] = ()  # optional dependencies of `source`
    python: str = ""  # the version of a Python package's interpreter; empty: of the one that runs holdwater
    # Field of the recipe -> file and line, for errors that appear only when the layer is made.
    places: dict[str, str] = msgspec.field(default_factory=dict)


class ImageRecipe(Record, frozen=True):
    """A parsed and validated `images.toml`; paths are absolute."""

    path: str
    repository: str
    bases: tuple[tuple[str, str], ...] = ()  # (name, reference)
    suite: str | None = None  # a suite whose instances name the bases
    template: str | None = None  # `ghcr.io/o/{id}:latest`; None: the suite's own image names
    agent: AgentSource | None = None
    edits: ConfigEdits = ConfigEdits()
    steps: BuildSteps = BuildSteps()
    base_repository: str | None = None  # where bases with the `before` lines are published and found
    platforms: tuple[ImagePlatform, ...] = (ImagePlatform(),)
    engine: EngineKind = EngineKind.AUTO
    aliases: tuple[str, ...] = ()  # the templates of readable tags: `{id}`
    revision: str = (
        ""  # the commit that `{git.sha}` stood for, with `-dirty` for changed files; empty: unused
    )
    concurrency: int = 16
    disk: int | None = None  # bytes that the daemon may use beyond those in use already; None: all free space
    cache: int | None = None  # bytes that may stay here and on the daemon; None: see the properties
    keep: bool = False  # bases stay on the daemon for the next build, within `cache`
    force: ForcedPhase | None = None
    network: str = ""  # network of the steps of a real build: `host`, `none`; empty: the daemon's default
    registries: dict[str, RegistryOptions] = msgspec.field(default_factory=dict)

    @property
    def chosen_engine(self) -> EngineKind:
        """The engine to use. `auto` selects docker if there are steps, which a registry cannot execute."""
        if self.engine is not EngineKind.AUTO:
            return self.engine
        return EngineKind.DOCKER if self.steps else EngineKind.REGISTRY

    @property
    def layer_cache(self) -> int:
        """The bytes of agents' layers that stay on this machine."""
        return LAYER_CACHE if self.cache is None else self.cache

    @property
    def daemon_cache(self) -> int:
        """The bytes of bases that stay on the docker daemon."""
        return DAEMON_CACHE if self.cache is None else self.cache

    @property
    def forces_bases(self) -> bool:
        return self.force in (ForcedPhase.ALL, ForcedPhase.BASES)

    @property
    def forces_agent(self) -> bool:
        return self.force in (ForcedPhase.ALL, ForcedPhase.AGENT)


def compute_image_key(base_digest: str, blueprint: ImageBlueprint) -> str:
    """Return a tag derived from content alone.

    Both engines produce the same tag for the same content, and a different tag when anything differs.
    """
    content = msgspec.json.encode(
        [
            base_digest,
            [layer.diff_id for layer in blueprint.layers],
            blueprint.edits,
            blueprint.steps,
            sorted(str(platform) for platform in blueprint.platforms),
        ],
        order="sorted",
    )
    return sha256(content).hexdigest()[:40]


def make_labels(base_digest: str, blueprint: ImageBlueprint) -> dict[str, str]:
    """Return the labels of an image: those of the recipe, its content key and its base digest."""
    return {
        **blueprint.edits.labels,
        KEY_LABEL: compute_image_key(base_digest, blueprint),
        BASE_DIGEST_LABEL: base_digest,
    }
