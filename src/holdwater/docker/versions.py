"""What a daemon of which API version and a client of which release can do. Pure: nobody is asked here.

Old daemons ignore parameters that they do not know without a word, so everything goes by the version.
"""

from __future__ import annotations

import re

import msgspec

from ..core.records import Record

Version = tuple[int, int]

OLDEST: Version = (1, 39)  # the first with BuildKit
NEWEST: Version = (1, 48)  # the newest whose answers are known here; newer daemons speak it as well
DAEMON = "docker"  # the driver whose build cache is in the daemon itself

_RELEASE = re.compile(r"^Docker version (\d+)\.(\d+)")
_FIELD = re.compile(r"^(Name|Driver):[ \t]+(\S+)", re.MULTILINE)


class Client(Record, frozen=True):
    """A `docker` command of this machine, and what it says of itself."""

    path: str
    release: str = ""  # what `docker --version` prints
    buildx: str = ""  # what `docker buildx version` prints; empty: it has no buildx


class Builder(Record, frozen=True):
    """Who builds, and so holds the build cache."""

    name: str = "default"
    driver: str = DAEMON


def version(text: str) -> Version:
    """`1.41` as numbers."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def negotiated(newest: str, oldest: str = "") -> Version | None:
    """The version to speak with a daemon that speaks these; None where there is none."""
    spoken = min(NEWEST, version(newest))
    return spoken if spoken >= max(OLDEST, version(oldest) if oldest else OLDEST) else None


def usage_query(api: Version) -> dict[str, str]:
    """Parameters of `/system/df`: before 1.42 it counts everything, whatever it is asked for."""
    return {"type": "build-cache"} if api >= (1, 42) else {}


def prune_query(api: Version, record: str) -> dict[str, str]:
    """Parameters of `/build/prune` for one record: a second id in the filter would be refused.

    `all`: or else records that an image shares stay, and say nothing. What may be kept is said, as the
    daemon's own policy would count otherwise.
    """
    kept = "reserved-space" if api >= (1, 48) else "keep-storage"
    return {"all": "true", kept: "0", "filters": msgspec.json.encode({"id": [record]}).decode()}


def why_not(client: Client) -> str:
    """Why this client cannot build with BuildKit; empty: it can."""
    if client.buildx:
        return ""
    found = _RELEASE.match(client.release)
    if found is None:
        return f"it is not Docker's own: {client.release[:80]!r}"
    if int(found[1]) >= 23:
        return f"release {found[1]}.{found[2]} builds with buildx alone, which it does not have"
    if (int(found[1]), int(found[2])) < (18, 9):
        return f"release {found[1]}.{found[2]} is older than BuildKit"
    return ""


def builder_of(inspected: str) -> Builder | None:
    """The builder that `docker buildx inspect` tells of."""
    found: dict[str, str] = {}
    for key, value in _FIELD.findall(inspected):
        found.setdefault(key, value)
    return Builder(name=found["Name"], driver=found["Driver"]) if len(found) == 2 else None
