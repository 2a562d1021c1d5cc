"""Parse image references such as `debian:12` and `ghcr.io/a/b@sha256:...` by docker's rules.

Pure; `client.py` sends requests about a reference.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re

from ...core.errors import BadInput
from ...core.records import Record

DOCKER_HUB = "docker.io"
_DOCKER_HUB_API = "registry-1.docker.io"
_LONGEST_NAME = 255

_HOST = re.compile(
    r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[a-fA-F0-9:]+\])(?::[0-9]{1,5})?"
)
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


class ImageReference(Record, frozen=True):
    """The location of an image, or of a repository of images."""

    registry: str  # as written: `docker.io`, `localhost:5000`
    repository: str  # `library/debian`
    tag: str = ""
    digest: str = ""  # takes precedence over the tag

    @property
    def target(self) -> str:
        """The digest or tag to request from the registry."""
        return self.digest or self.tag or "latest"

    @property
    def name(self) -> str:
        return f"{self.registry}/{self.repository}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return self.name + tag + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> ImageReference:
    """Return the full reference; missing parts get docker's defaults: Docker Hub, `library/`, `latest`."""
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise _reference_error(
            text, f"{_escape_text(digest)} is not a digest: expected `sha256:` and 64 hexadecimal digits"
        )
    registry, path = _split_registry(rest)
    repository, colon, tag = path.partition(":")
    if colon and not is_tag(tag):
        raise _reference_error(text, f"{_escape_text(tag)} is not a tag")
    if not _HOST.fullmatch(registry):
        raise _reference_error(text, f"{_escape_text(registry)} is not the name of a registry")
    _check_path(text, repository)
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    if len(registry) + 1 + len(repository) > _LONGEST_NAME:
        raise _reference_error(text, f"the name is longer than {_LONGEST_NAME} characters")
    return ImageReference(registry, repository, tag if tag or at else "latest", digest)


def parse_repository(text: str) -> ImageReference:
    """Return a repository: a reference without tag and digest."""
    found = parse_reference(text)
    if found.digest or ":" in text.rpartition("/")[2]:
        raise _reference_error(text, "a repository has neither a tag nor a digest")
    return ImageReference(found.registry, found.repository)


def is_tag(text: str) -> bool:
    return _TAG.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def digest_of(content: bytes, like: str = "sha256:") -> str:
    """Return the digest of `content`, by the algorithm of the digest `like`."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def api_host(registry: str) -> str:
    """Return the host, with the port if given, of a registry's API."""
    return _DOCKER_HUB_API if registry == DOCKER_HUB else registry


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without a port, is this machine."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _split_registry(text: str) -> tuple[str, str]:
    """Return registry and path. The first part is a registry if it cannot be part of a path."""
    first, slash, rest = text.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first or first != first.lower()):
        return (DOCKER_HUB if first == f"index.{DOCKER_HUB}" else first), rest
    return DOCKER_HUB, text


def _check_path(text: str, path: str) -> None:
    for part in path.split("/"):
        if _PART.fullmatch(part):
            continue
        if part and _PART.fullmatch(part.lower()):
            raise _reference_error(
                text, f"{_escape_text(part)} has capital letters, which are invalid in a repository's name"
            )
        raise _reference_error(text, f"{_escape_text(part)} is not part of a repository's name")


def _reference_error(text: str, why: str) -> BadInput:
    return BadInput(f"invalid image reference: {text[:300]!r}: {why}")


def _escape_text(text: str) -> str:
    return "`" + text[:80].encode("unicode_escape").decode() + "`"
