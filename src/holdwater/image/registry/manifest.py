"""Parse and check manifests and configurations of images, and rewrite them with layers and edits on top.

Pure and deterministic: the same base and blueprint give the same bytes. `engine.py` fetches and puts them.
The three formats are docker's `schema2`, OCI's, and the index of either.
"""

from __future__ import annotations

import posixpath
from typing import Any, NamedTuple

import msgspec

from ...core.image import ConfigEdits, ImageBlueprint, ImagePlatform
from ...core.records import MiB
from .reference import digest_of, is_digest
from .refusal import RegistryRefusal, unsupported_error

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
_FOREIGN = frozenset(  # fetched from other servers, never stored in a registry
    {
        "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
        "application/vnd.oci.image.layer.nondistributable.v1.tar+zstd",
    }
)
# For each architecture: the default variant, and for each variant the variants that run on it, best first.
_VARIANTS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "arm": ("v7", {"v8": ("v8", "v7", "v6", "v5"), "v7": ("v7", "v6", "v5"), "v6": ("v6", "v5")}),
    "arm64": ("v8", {"v9": ("v9", "v8")}),
    "amd64": ("v1", {"v2": ("v2", "v1"), "v3": ("v3", "v2", "v1"), "v4": ("v4", "v3", "v2", "v1")}),
}


class BlobDescriptor(NamedTuple):
    """A blob that a manifest names."""

    digest: str
    size: int


class ImageManifest(NamedTuple):
    """The manifest of one platform's image: its layers and its configuration."""

    name: str  # the reference, for messages
    body: dict[str, Any]
    media_type: str
    config: BlobDescriptor
    layers: tuple[BlobDescriptor, ...]  # only the layers that a registry stores
    depth: int  # the number of all layers


class IndexEntry(NamedTuple):
    """One image of an index."""

    body: dict[str, Any]
    digest: str
    platform: ImagePlatform


class ImageIndex(NamedTuple):
    """Images for several platforms under one name."""

    name: str
    body: dict[str, Any]
    media_type: str
    children: tuple[IndexEntry, ...]


class EncodedManifest(NamedTuple):
    """A manifest as its registry stores it."""

    content: bytes
    media_type: str  # of a manifest that was read: from the response; empty: not sent
    digest: str


class _ImageSettings(msgspec.Struct, frozen=True):
    """The fields of an image's `config` that are read."""

    Env: list[str] | None = None
    Labels: dict[str, str] | None = None
    WorkingDir: str | None = None
    OnBuild: list[str] | None = None


class _ImageRootFS(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class ImageConfig(msgspec.Struct, frozen=True):
    """The fields of an image's configuration that are read; all other fields are kept unchanged."""

    rootfs: _ImageRootFS
    config: _ImageSettings | None = None
    history: list[dict[str, Any]] | None = None
    created: str | None = None
    os: str | None = None
    architecture: str | None = None


class AssembledImage(NamedTuple):
    """An image with layers and edits on top: its manifest and its configuration."""

    manifest: EncodedManifest
    config: bytes
    config_digest: str


def parse_manifest(name: str, content: bytes, media_type: str) -> ImageManifest | ImageIndex:
    """Parse a registry's manifest or index."""
    body = _parse_object(name, content)
    kind = _find_kind(name, body, media_type)
    if kind in _INDEXES:
        entries = _get_list(name, body, "manifests")
        return ImageIndex(name, body, kind, tuple(_parse_entry(name, entry) for entry in entries))
    config = body.get("config")
    if not isinstance(config, dict) or config.get("mediaType") not in (DOCKER_CONFIG, OCI_CONFIG):
        raise _unusable_error(name, f"it is not an image: {_quote_value(config)}")
    layers = _get_list(name, body, "layers")
    stored = tuple(_parse_blob(name, layer) for layer in layers if _is_stored(name, layer))
    return ImageManifest(name, body, kind, _parse_blob(name, config), stored, len(layers))


def choose_entry(index: ImageIndex, platform: ImagePlatform) -> IndexEntry:
    """Return the first entry with the best variant that runs on the platform."""
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
    raise _unusable_error(index.name, f"it has no image for `{platform}`; available: {listed}")


def assemble_image(
    manifest: ImageManifest,
    config: bytes,
    blueprint: ImageBlueprint,
    labels: dict[str, str],
    platform: ImagePlatform,
) -> AssembledImage:
    """Return the base with the blueprint's layers, edits and labels on top, in the base's own format."""
    depth = manifest.depth + len(blueprint.layers)
    if depth > MOST_LAYERS:
        raise _unusable_error(manifest.name, f"it would have {depth} layers, more than {MOST_LAYERS}")
    base = _parse_object(manifest.name, config)
    _check_base(manifest, base, platform)
    made = msgspec.json.encode(_make_config(base, blueprint, labels))
    digest = digest_of(made)
    descriptor = {key: value for key, value in manifest.body["config"].items() if key != "data"}
    body = {key: value for key, value in manifest.body.items() if key != "subject"}
    body["config"] = {**descriptor, "size": len(made), "digest": digest}
    kind = OCI_LAYER if manifest.media_type == OCI_MANIFEST else DOCKER_LAYER
    layers = [{"mediaType": kind, "size": layer.size, "digest": layer.digest} for layer in blueprint.layers]
    body["layers"] = [*body["layers"], *layers]
    return AssembledImage(_encode_manifest(body, manifest.media_type), made, digest)


def assemble_index(
    index: ImageIndex, children: tuple[IndexEntry, ...], parts: list[EncodedManifest]
) -> EncodedManifest:
    """Return an index of these images only, each in place of its base, in the base's own format."""
    entries = []
    for child, written in zip(children, parts, strict=True):
        entry = {key: value for key, value in child.body.items() if key != "data"}
        entries.append({**entry, "digest": written.digest, "size": len(written.content)})
    body = {key: value for key, value in index.body.items() if key != "subject"}
    return _encode_manifest({**body, "manifests": entries}, index.media_type)


def _make_config(base: dict[str, Any], blueprint: ImageBlueprint, labels: dict[str, str]) -> dict[str, Any]:
    made = dict(base)
    made["config"] = _apply_edits(base.get("config") or {}, blueprint.edits, labels)
    diff_ids = [*base["rootfs"]["diff_ids"], *(layer.diff_id for layer in blueprint.layers)]
    made["rootfs"] = {**base["rootfs"], "diff_ids": diff_ids}
    history = base.get("history") or []
    # A base with layers but without history gets none: new entries would not line up with its layers.
    if history or not base["rootfs"]["diff_ids"]:
        entry = {"created": base["created"]} if base.get("created") else {}
        made["history"] = [*history, *({**entry, "created_by": "holdwater"} for _ in blueprint.layers)]
    return made


def _apply_edits(config: dict[str, Any], edits: ConfigEdits, labels: dict[str, str]) -> dict[str, Any]:
    """Return the configuration with the edits, by the rules of a Dockerfile."""
    made = dict(config)
    if edits.env:
        made["Env"] = _merge_env(config.get("Env") or [], edits.env)
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
        made.pop("ArgsEscaped", None)  # refers to the base's command
    made["Labels"] = {**(config.get("Labels") or {}), **labels}
    return made


def _merge_env(base: list[str], env: dict[str, str]) -> list[str]:
    left = dict(env)
    made = []
    for line in base:
        name = line.partition("=")[0]
        made.append(f"{name}={left.pop(name)}" if name in left else line)
    return made + [f"{name}={value}" for name, value in left.items()]


def _check_base(manifest: ImageManifest, config: dict[str, Any], platform: ImagePlatform) -> None:
    """Raise if the base is inconsistent, is for another platform, or cannot be appended to."""
    name = manifest.name
    try:
        given = msgspec.convert(config, ImageConfig)
    except msgspec.ValidationError as error:
        raise _unusable_error(name, f"its configuration is invalid: {error}") from None
    if len(given.rootfs.diff_ids) != manifest.depth:
        raise _unusable_error(name, "its configuration and its manifest differ in the number of layers")
    if given.config is not None and given.config.OnBuild:
        hint = "engine `docker` can build on it"
        raise _unusable_error(name, "it has `ONBUILD` lines, which the registry engine cannot run", hint)
    pairs = ((given.os, platform.os), (given.architecture, platform.architecture))
    if any(one and one != asked for one, asked in pairs):
        raise _unusable_error(
            name, f"it is built for `{given.os}/{given.architecture}`, not for `{platform}`"
        )


def _encode_manifest(body: dict[str, Any], media_type: str) -> EncodedManifest:
    content = msgspec.json.encode(body)
    return EncodedManifest(content, media_type, digest_of(content))


def _find_kind(name: str, body: dict[str, Any], media_type: str) -> str:
    """Return the media type of the content; raise if header and body disagree, as either could be used."""
    own = body.get("mediaType") or ""
    if "manifests" in body and ("layers" in body or "config" in body):
        raise _unusable_error(name, "it is an index and an image at once")
    if media_type in MANIFEST_TYPES and own and own != media_type:
        raise _unusable_error(
            name,
            f"its media type is `{media_type}` in the response, but {_quote_value(own)} in its body",
        )
    kind = media_type if media_type in MANIFEST_TYPES else own
    if not kind and body.get("schemaVersion") == 2:
        kind = OCI_INDEX if "manifests" in body else OCI_MANIFEST
    if kind not in MANIFEST_TYPES:
        raise _unusable_error(name, f"unknown format: {_quote_value(own or media_type)}")
    return kind


def _is_stored(name: str, layer: Any) -> bool:
    kind = layer.get("mediaType") if isinstance(layer, dict) else None
    if kind in _LAYERS:
        return True
    if kind in _FOREIGN:
        return False
    why = "it has an encrypted layer" if "encrypted" in str(kind) else "it has a layer in an unknown format"
    raise _unusable_error(name, f"{why}: {_quote_value(kind)}")


def _parse_blob(name: str, descriptor: dict[str, Any]) -> BlobDescriptor:
    digest, size = descriptor.get("digest"), descriptor.get("size")
    if not isinstance(digest, str) or not is_digest(digest) or type(size) is not int or size < 0:
        raise _unusable_error(name, f"a blob has an invalid digest or size: {_quote_value(digest)}")
    return BlobDescriptor(digest, size)


def _parse_entry(name: str, entry: Any) -> IndexEntry:
    if not isinstance(entry, dict):
        raise _unusable_error(name, "it has an entry that is not an object")
    given = entry.get("platform")
    given = given if isinstance(given, dict) else {}
    parts = [str(given.get(key) or "") for key in ("os", "architecture", "variant")]
    return IndexEntry(entry, _parse_blob(name, entry).digest, ImagePlatform(*parts))


def _parse_object(name: str, content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise _unusable_error(name, "it is not a JSON object")
    return body


def _get_list(name: str, body: dict[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if not isinstance(value, list):
        raise _unusable_error(name, f"it has no `{key}`")
    return value


def _unusable_error(name: str, why: str, hint: str = "") -> RegistryRefusal:
    return unsupported_error(f"`{name}` cannot be appended to", why, hint)


def _quote_value(value: Any) -> str:
    return f"`{str(value)[:120]}`"
