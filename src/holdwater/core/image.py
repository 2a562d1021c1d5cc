"""The records of images: what is asked for, what it is made of, what became of it.

Pure. A recipe is read in `image/recipe.py`, an image made by an `Engine`; its build is an attempt of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import msgspec

from .records import GiB, Record

KEY_LABEL = "io.holdwater.key"  # what an image was made of, as `key_of` says
BASE_DIGEST_LABEL = "org.opencontainers.image.base.digest"


class EngineKind(StrEnum):
    """How images are made."""

    AUTO = "auto"  # in the registry where the recipe allows it
    REGISTRY = "registry"
    DOCKER = "docker"


class Platform(Record, frozen=True):
    """What an image runs on."""

    os: str = "linux"
    architecture: str = "amd64"
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Edits(Record, frozen=True):
    """What an image's configuration gets on top of its base's; None and empty leave the base's own."""

    env: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] | None = None  # as in a Dockerfile, it takes the base's `cmd` away
    cmd: tuple[str, ...] | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class Steps(Record, frozen=True):
    """Dockerfile lines that no registry can carry out: they need a real build."""

    before: tuple[str, ...] = ()  # on the base, before the agent is there
    after: tuple[str, ...] = ()  # with the agent there

    def __bool__(self) -> bool:
        return bool(self.before or self.after)


class Layer(Record, frozen=True):
    """Files that are put on top of a base: a gzipped tar on this machine."""

    digest: str  # `sha256:...` of the file
    diff_id: str  # the same of what is in it, unpacked
    size: int  # bytes of the file
    unpacked: int  # bytes of the tar in it
    path: str


class Blueprint(Record, frozen=True):
    """What all images of a build have in common."""

    layers: tuple[Layer, ...] = ()
    edits: Edits = Edits()
    steps: Steps = Steps()
    platforms: tuple[Platform, ...] = (Platform(),)  # more than one: an index is written


class Image(Record, frozen=True):
    """One image that is asked for."""

    name: str  # of the instance in the ledger
    base: str  # a reference: `debian:12`, `ghcr.io/a/b@sha256:...`
    repository: str  # where it goes: `localhost:5000/agents`
    aliases: tuple[str, ...] = ()  # friendly tags beside the one that follows from its content


class How(StrEnum):
    """What became of an image that did not fail."""

    MADE = "made"
    PRESENT = "present"


class Made(Record, frozen=True):
    """An image as it is in the registry now."""

    name: str
    how: How
    base: str
    base_digest: str
    reference: str  # `localhost:5000/agents:<key>`
    digest: str
    engine: EngineKind
    aliases: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()  # digests of what was put on top, where they are known
    uploaded: int = 0  # bytes
    downloaded: int = 0
    mounted: int = 0  # blobs that were taken over inside the registry
    seconds: float = 0.0
    replaced: str = ""  # the digest of something else that had the tag before


class Foreseen(Record, frozen=True):
    """What a build would do for an image. Sizes are of what is not there yet, as far as can be told."""

    name: str
    base: str
    base_digest: str
    reference: str
    how: How
    upload: int = 0  # bytes
    download: int = 0
    disk: int = 0  # bytes on the daemon's disk while it is made
    replaces: str = ""


class Unforeseen(Record, frozen=True):
    """An image of which it cannot be told what would be done."""

    name: str
    base: str
    failure: str


class Plan(Record, frozen=True):
    """What `images plan --json` prints."""

    recipe: str
    engine: str
    why: str  # that engine
    layers: tuple[str, ...]  # digests
    layer_bytes: int
    total: int
    make: int
    present: int
    unknown: int
    upload: int
    download: int
    disk: int  # the most that one image needs on the daemon's disk
    disk_free: int  # what the daemon has; 0: it is not asked
    images: list[Foreseen | Unforeseen]


class ImagesAudit(Record, frozen=True):
    """Whether every image of a build is in its registry, as it was recorded."""

    planned: int
    settled: int
    checked: int
    failed: int  # images that the build itself says it could not make
    problems: tuple[str, ...]
    ok: bool


class Progress(Protocol):
    """What an engine tells of an image while it makes it."""

    def phase(self, name: str) -> None:
        """A short word: `base`, `layers`, `assembly`, `push`."""

    def disk(self, bytes_: int) -> None:
        """Bytes that this image takes on the daemon's disk by now."""


class Engine(Protocol):
    """Makes images; opened and closed with `async with`. What goes wrong with one is an `ImageFailed`."""

    async def foresee(self, image: Image) -> Foreseen:
        """What would be done, without doing it."""

    async def make(self, image: Image, log: Path, progress: Progress) -> Made:
        """Make it, unless it is there already. `log` takes what a build prints."""


Note = Callable[[str, str], None]  # (kind, message): a counted event of the run, for example `cleanup.failed`


class Registry(Record, frozen=True):
    """How one registry is spoken to."""

    insecure: bool = False  # plain HTTP; for loopback addresses it is tried anyway
    requests_a_minute: float | None = None


class AgentSource(Record, frozen=True):
    """Where the agent's files come from: exactly one of the first four."""

    source: str | None = None  # a Python project's directory: made self-contained
    package: str | None = None  # a requirement, for example `mini-swe-agent==2.4.6`: the same
    directory: str | None = None  # taken as it is
    image: str | None = None  # `reference:/path`: a path of an existing image
    prefix: str = "/opt/agent"  # where it lies in the image


class Recipe(Record, frozen=True):
    """An `images.toml`, read and checked; paths are absolute."""

    path: str
    repository: str
    bases: tuple[tuple[str, str], ...] = ()  # (name, reference)
    suite: str | None = None  # its instances name the bases
    template: str | None = None  # `ghcr.io/o/{id}:latest`; None: the suite's own naming
    agent: AgentSource | None = None
    edits: Edits = Edits()
    steps: Steps = Steps()
    platforms: tuple[Platform, ...] = (Platform(),)
    engine: EngineKind = EngineKind.AUTO
    alias: str | None = None  # a template of a friendly tag: `{id}`
    concurrency: int = 16
    disk: int | None = None  # bytes that the daemon may take beyond what is there; what is free otherwise
    cache: int = 1 * GiB  # bytes of build cache and shared layers that stay warm on the daemon
    network: str = ""  # of a real build's steps: `host`, `none`; empty: the daemon's own
    registries: dict[str, Registry] = msgspec.field(default_factory=dict)

    @property
    def chosen(self) -> EngineKind:
        """The engine: a registry cannot carry out steps."""
        if self.engine is not EngineKind.AUTO:
            return self.engine
        return EngineKind.DOCKER if self.steps else EngineKind.REGISTRY


def key_of(base_digest: str, blueprint: Blueprint) -> str:
    """The tag that follows from content alone: the same for both engines, another when anything differs."""
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


def labels_of(base_digest: str, blueprint: Blueprint) -> dict[str, str]:
    """The labels of an image: the recipe's, and what it was made of."""
    return {
        **blueprint.edits.labels,
        KEY_LABEL: key_of(base_digest, blueprint),
        BASE_DIGEST_LABEL: base_digest,
    }
