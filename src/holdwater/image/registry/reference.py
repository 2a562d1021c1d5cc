"""Names of images: `debian:12`, `ghcr.io/a/b@sha256:...`, read as docker reads them.

Pure. Who is asked about a name is in `client.py`.
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


class Reference(Record, frozen=True):
    """Where an image, or a repository of images, is."""

    registry: str  # as it is written: `docker.io`, `localhost:5000`
    repository: str  # `library/debian`
    tag: str = ""
    digest: str = ""  # the tag is a mere name then

    @property
    def target(self) -> str:
        """What the registry is asked for."""
        return self.digest or self.tag or "latest"

    @property
    def name(self) -> str:
        return f"{self.registry}/{self.repository}"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return self.name + tag + (f"@{self.digest}" if self.digest else "")


def parse(text: str) -> Reference:
    """A reference in full; what is left out is docker's: Docker Hub, `library/`, `latest`."""
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise _bad(text, f"{_shown(digest)} is not a digest, which is `sha256:` and 64 hexadecimal digits")
    registry, path = _parted(rest)
    repository, colon, tag = path.partition(":")
    if colon and not is_tag(tag):
        raise _bad(text, f"{_shown(tag)} is not a tag")
    _check_host(text, registry)
    _check_path(text, repository)
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    if len(registry) + 1 + len(repository) > _LONGEST_NAME:
        raise _bad(text, f"the name is longer than {_LONGEST_NAME} characters")
    return Reference(registry, repository, tag if tag or at else "latest", digest)


def parse_repository(text: str) -> Reference:
    """A repository: a reference without tag and digest."""
    found = parse(text)
    if found.digest or ":" in text.rpartition("/")[2]:
        raise _bad(text, "a repository has neither a tag nor a digest")
    return Reference(found.registry, found.repository)


def is_tag(text: str) -> bool:
    return _TAG.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None


def digest_of(content: bytes, like: str = "sha256:") -> str:
    """The digest of `content`, by the algorithm of the digest `like`."""
    algorithm = like.partition(":")[0]
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


def api_host(registry: str) -> str:
    """The host, and where it is said the port, that a registry's API is at."""
    return _DOCKER_HUB_API if registry == DOCKER_HUB else registry


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _parted(text: str) -> tuple[str, str]:
    """Registry and path. The first part is a registry where it could not be part of a path."""
    first, slash, rest = text.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first or first != first.lower()):
        return (DOCKER_HUB if first == f"index.{DOCKER_HUB}" else first), rest
    return DOCKER_HUB, text


def _check_host(text: str, host: str) -> None:
    if not _HOST.fullmatch(host):
        raise _bad(text, f"{_shown(host)} is not the name of a registry")


def _check_path(text: str, path: str) -> None:
    for part in path.split("/"):
        if _PART.fullmatch(part):
            continue
        if part and _PART.fullmatch(part.lower()):
            raise _bad(text, f"{_shown(part)} has capital letters, which a repository must not have")
        raise _bad(text, f"{_shown(part)} is not part of a repository's name")


def _bad(text: str, why: str) -> BadInput:
    return BadInput(f"not a reference to an image: {text[:300]!r}: {why}")


def _shown(text: str) -> str:
    return "`" + text[:80].encode("unicode_escape").decode() + "`"
