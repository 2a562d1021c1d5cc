"""Manifests and configurations of images: read, checked, and written anew with layers and edits on top.

Pure, and deterministic: the same base and blueprint give the same bytes. Who fetches and puts them is in
`append.py`. The three forms are docker's `schema2`, OCI's, and the index of either.
"""

from __future__ import annotations

import posixpath
from typing import Any, NamedTuple

import msgspec

from ...core.image import Blueprint, Edits, Layer, Platform
from ...core.records import MiB
from .reference import digest_of, is_digest
from .refusal import unsupported

MOST_LAYERS = 127
LARGEST_CONFIG = 8 * MiB

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPES = frozenset({DOCKER_MANIFEST, DOCKER_INDEX, OCI_MANIFEST, OCI_INDEX})
_INDEXES = frozenset({DOCKER_INDEX, OCI_INDEX})

DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_LAYERS = frozenset(
    {
        DOCKER_LAYER,
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.diff.tar.zstd",
        OCI_LAYER,
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.v1.tar+zstd",
    }
)
_FOREIGN = frozenset(  # fetched from elsewhere, and never stored in a registry
    {
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    }
)
_VARIANTS: dict[
    str, tuple[str, dict[str, tuple[str, ...]]]
] = {  # what runs on a variant, the best first; the first name is what an empty one means
    "arm": ("v7", {"v8": ("v8", "v7", "v6", "v5"), "v7": ("v7", "v6", "v5"), "v6": ("v6", "v5")}),
    "arm64": ("v8", {"v9": ("v9", "v8")}),
    "amd64": ("v1", {"v2": ("v2", "v1"), "v3": ("v3", "v2", "v1"), "v4": ("v4", "v3", "v2", "v1")}),
}


class Blob(NamedTuple):
    """A blob that a manifest names."""

    digest: str
    size: int


class Manifest(NamedTuple):
    """One platform's image: what is on top of each other, and its configuration."""

    name: str  # the reference, for messages
    body: dict[str, Any]
    media_type: str
    config: Blob
    layers: tuple[Blob, ...]  # those that a registry stores
    depth: int  # how many layers it has in all


class Child(NamedTuple):
    """One image of an index."""

    body: dict[str, Any]
    digest: str
    platform: Platform


class Index(NamedTuple):
    """Images for several platforms under one name."""

    name: str
    body: dict[str, Any]
    media_type: str
    children: tuple[Child, ...]


class Written(NamedTuple):
    """A manifest to be put."""

    content: bytes
    media_type: str
    digest: str


class _Settings(msgspec.Struct, frozen=True):
    """What is read of a base's `config`."""

    Env: list[str] | None = None
    Labels: dict[str, str] | None = None
    WorkingDir: str | None = None
    OnBuild: list[str] | None = None


class _RootFS(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _Config(msgspec.Struct, frozen=True):
    """What is read of a base's configuration; all else is kept as it is."""

    rootfs: _RootFS
    config: _Settings | None = None
    history: list[dict[str, Any]] | None = None
    created: str | None = None
    os: str | None = None
    architecture: str | None = None


class Assembled(NamedTuple):
    """An image with everything on top: its manifest and its configuration."""

    manifest: Written
    config: bytes
    config_digest: str


def read(name: str, content: bytes, media_type: str) -> Manifest | Index:
    """What a registry has under a name."""
    body = _object(name, content)
    kind = _kind(name, body, media_type)
    if kind in _INDEXES:
        entries = _list(name, body, "manifests")
        return Index(name, body, kind, tuple(_child(name, entry) for entry in entries))
    config = body.get("config")
    if not isinstance(config, dict) or config.get("mediaType") not in (DOCKER_CONFIG, OCI_CONFIG):
        raise unsupported(_cannot(name), f"it is no image: {_shown(config)}")
    layers = _list(name, body, "layers")
    stored = tuple(_blob(name, layer) for layer in layers if _is_stored(name, layer))
    return Manifest(name, body, kind, _blob(name, config), stored, len(layers))


def choose(index: Index, platform: Platform) -> Child:
    """The image for a platform: the best that runs on it, the first of these."""
    usual, known = _VARIANTS.get(platform.architecture, ("", {}))
    asked = platform.variant or usual
    for variant in known.get(asked, (asked,)):
        for child in index.children:
            found = child.platform
            if (found.os, found.architecture) != (platform.os, platform.architecture):
                continue
            if (found.variant or usual) == variant:
                return child
    there = sorted({str(child.platform) for child in index.children if child.platform.os != "unknown"})
    listed = ", ".join(f"`{one}`" for one in there) or "nothing"
    raise unsupported(_cannot(index.name), f"it has no image for `{platform}`; there is: {listed}")


def assemble(
    manifest: Manifest, config: bytes, blueprint: Blueprint, labels: dict[str, str], platform: Platform
) -> Assembled:
    """The base with the blueprint's layers, edits and labels on top, in the base's own family."""
    depth = manifest.depth + len(blueprint.layers)
    if depth > MOST_LAYERS:
        raise unsupported(_cannot(manifest.name), f"with {depth} layers it has more than {MOST_LAYERS}")
    base = _object(manifest.name, config)
    _check(manifest, base, platform)
    made = msgspec.json.encode(_configured(base, blueprint, labels))
    digest = digest_of(made)
    descriptor = {key: value for key, value in manifest.body["config"].items() if key != "data"}
    body = {key: value for key, value in manifest.body.items() if key != "subject"}
    body["config"] = {**descriptor, "size": len(made), "digest": digest}
    kind = OCI_LAYER if manifest.media_type == OCI_MANIFEST else DOCKER_LAYER
    body["layers"] = [*body["layers"], *(_descriptor(layer, kind) for layer in blueprint.layers)]
    return Assembled(_written(body, manifest.media_type), made, digest)


def gather(index: Index, children: tuple[Child, ...], parts: list[Written]) -> Written:
    """An index of these images alone, each in the place of its base, in the base's own family."""
    entries = []
    for child, written in zip(children, parts, strict=True):
        entry = {key: value for key, value in child.body.items() if key != "data"}
        entries.append({**entry, "digest": written.digest, "size": len(written.content)})
    body = {key: value for key, value in index.body.items() if key != "subject"}
    return _written({**body, "manifests": entries}, index.media_type)


def _configured(base: dict[str, Any], blueprint: Blueprint, labels: dict[str, str]) -> dict[str, Any]:
    made = dict(base)
    made["config"] = _edited(base.get("config") or {}, blueprint.edits, labels)
    diff_ids = [*base["rootfs"]["diff_ids"], *(layer.diff_id for layer in blueprint.layers)]
    made["rootfs"] = {**base["rootfs"], "diff_ids": diff_ids}
    history = base.get("history") or []
    if (
        history or not base["rootfs"]["diff_ids"]
    ):  # a base that keeps none would be out of step with its layers
        entry = {"created": base["created"]} if base.get("created") else {}
        made["history"] = [*history, *({**entry, "created_by": "holdwater"} for _ in blueprint.layers)]
    return made


def _edited(config: dict[str, Any], edits: Edits, labels: dict[str, str]) -> dict[str, Any]:
    """As the lines of a Dockerfile would."""
    made = dict(config)
    if edits.env:
        made["Env"] = _environment(config.get("Env") or [], edits.env)
    if edits.user is not None:
        made["User"] = edits.user
    if edits.workdir is not None:
        before = posixpath.join("/", config.get("WorkingDir") or "")
        made["WorkingDir"] = posixpath.normpath(posixpath.join(before, edits.workdir))
    if edits.entrypoint is not None:
        made["Entrypoint"] = list(edits.entrypoint)
        made.pop("Cmd", None)
    if edits.cmd is not None:
        made["Cmd"] = list(edits.cmd)
    if edits.entrypoint is not None or edits.cmd is not None:
        made.pop("ArgsEscaped", None)  # of the command that the base had
    made["Labels"] = {**(config.get("Labels") or {}), **labels}
    return made


def _environment(base: list[str], env: dict[str, str]) -> list[str]:
    left = dict(env)
    made = []
    for line in base:
        name = line.partition("=")[0]
        made.append(f"{name}={left.pop(name)}" if name in left else line)
    return made + [f"{name}={value}" for name, value in left.items()]


def _check(manifest: Manifest, config: dict[str, Any], platform: Platform) -> None:
    """Whether the base is what it says, and can be appended to."""
    what = _cannot(manifest.name)
    try:
        given = msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise unsupported(what, f"its configuration is not an image's: {error}") from None
    if len(given.rootfs.diff_ids) != manifest.depth:
        raise unsupported(what, "its configuration and its manifest differ in the number of layers")
    if given.config is not None and given.config.OnBuild:
        hint = "engine `docker` can build on it"
        raise unsupported(what, "it has `ONBUILD` lines, which no registry can carry out", hint)
    pairs = ((given.os, platform.os), (given.architecture, platform.architecture))
    if any(one and one != asked for one, asked in pairs):
        raise unsupported(what, f"it is made for `{given.os}/{given.architecture}`, not for `{platform}`")


def _descriptor(layer: Layer, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "size": layer.size, "digest": layer.digest}


def _written(body: dict[str, Any], media_type: str) -> Written:
    content = msgspec.json.encode(body)
    return Written(content, media_type, digest_of(content))


def _kind(name: str, body: dict[str, Any], media_type: str) -> str:
    """What the content is. Where it is called two things, it could be taken for either."""
    own = body.get("mediaType") or ""
    if "manifests" in body and ("layers" in body or "config" in body):
        raise unsupported(_cannot(name), "it is an index and an image at once")
    if media_type in MANIFEST_TYPES and own and own != media_type:
        raise unsupported(
            _cannot(name), f"the registry calls it `{media_type}`, it calls itself {_shown(own)}"
        )
    kind = media_type if media_type in MANIFEST_TYPES else own
    if not kind and body.get("schemaVersion") == 2:
        kind = OCI_INDEX if "manifests" in body else OCI_MANIFEST
    if kind not in MANIFEST_TYPES:
        raise unsupported(_cannot(name), f"its format is not known: {_shown(own or media_type)}")
    return kind


def _is_stored(name: str, layer: Any) -> bool:
    kind = layer.get("mediaType") if isinstance(layer, dict) else None
    if kind in _LAYERS:
        return True
    if kind in _FOREIGN:
        return False
    why = "it has an encrypted layer" if "encrypted" in str(kind) else "it has a layer in an unknown format"
    raise unsupported(_cannot(name), f"{why}: {_shown(kind)}")


def _blob(name: str, descriptor: dict[str, Any]) -> Blob:
    digest, size = descriptor.get("digest"), descriptor.get("size")
    if not isinstance(digest, str) or not is_digest(digest) or type(size) is not int or size < 0:
        raise unsupported(_cannot(name), f"a blob of it has no proper digest and size: {_shown(digest)}")
    return Blob(digest, size)


def _child(name: str, entry: Any) -> Child:
    if not isinstance(entry, dict):
        raise unsupported(_cannot(name), "it has an entry that is no object")
    given = entry.get("platform")
    given = given if isinstance(given, dict) else {}
    parts = [str(given.get(key) or "") for key in ("os", "architecture", "variant")]
    return Child(entry, _blob(name, entry).digest, Platform(*parts))


def _object(name: str, content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise unsupported(_cannot(name), "it is not a JSON object")
    return body


def _list(name: str, body: dict[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        raise unsupported(_cannot(name), f"it has no `{key}`")
    return value


def _cannot(name: str) -> str:
    return f"`{name}` cannot be appended to"


def _shown(value: Any) -> str:
    return f"`{str(value)[:120]}`"
