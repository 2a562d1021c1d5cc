"""The capabilities of docker daemons by API version, and of docker clients by release.

Pure: it sends no request. Old daemons silently ignore unknown parameters, so every choice depends on the
version.
"""

from __future__ import annotations

import re

import msgspec

from ..core.records import Record

ApiVersion = tuple[int, int]

OLDEST: ApiVersion = (1, 39)  # the first version with BuildKit
NEWEST: ApiVersion = (1, 48)  # the newest version with known responses; newer daemons support it too
DAEMON_DRIVER = "docker"  # the driver with its build cache in the daemon itself

_RELEASE = re.compile(r"^Docker version (\d+)\.(\d+)")
_FIELD = re.compile(r"^(Name|Driver):[ \t]+(\S+)", re.MULTILINE)


class DockerProgram(Record, frozen=True):
    """A `docker` command of this machine, and its own version information."""

    path: str
    release: str = ""  # output of `docker --version`
    buildx: str = ""  # output of `docker buildx version`; empty: buildx is not installed


class BuildxBuilder(Record, frozen=True):
    """The builder, which also holds the build cache."""

    name: str = "default"
    driver: str = DAEMON_DRIVER


def parse_version(text: str) -> ApiVersion:
    """Parse a version such as `1.41`."""
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def negotiate_version(newest: str, oldest: str = "") -> ApiVersion | None:
    """Return the version to use with a daemon that supports these; None if there is none."""
    spoken = min(NEWEST, parse_version(newest))
    return spoken if spoken >= max(OLDEST, parse_version(oldest) if oldest else OLDEST) else None


def make_usage_query(api: ApiVersion) -> dict[str, str]:
    """Return the parameters of `/system/df`: before 1.42 it measures everything in any case."""
    return {"type": "build-cache"} if api >= (1, 42) else {}


def make_prune_query(api: ApiVersion, record: str) -> dict[str, str]:
    """Return the parameters of `/build/prune` for one record: the daemon refuses a second id in the filter.

    Without `all`, records that an image shares silently stay. The space to keep is explicit, because the
    daemon's own policy would apply otherwise.
    """
    kept = "reserved-space" if api >= (1, 48) else "keep-storage"
    return {"all": "true", kept: "0", "filters": msgspec.json.encode({"id": [record]}).decode()}


def explain_unfit(client: DockerProgram) -> str:
    """Return why this client cannot build with BuildKit; empty: it can."""
    if client.buildx:
        return ""
    found = _RELEASE.match(client.release)
    if found is None:
        return f"not a Docker client: {client.release[:80]!r}"
    if int(found[1]) >= 23:
        return f"release {found[1]}.{found[2]} requires buildx, which is not installed"
    if (int(found[1]), int(found[2])) < (18, 9):
        return f"release {found[1]}.{found[2]} does not support BuildKit"
    return ""


def parse_builder(inspected: str) -> BuildxBuilder | None:
    """Parse the output of `docker buildx inspect`."""
    found: dict[str, str] = {}
    for key, value in _FIELD.findall(inspected):
        found.setdefault(key, value)
    return BuildxBuilder(name=found["Name"], driver=found["Driver"]) if len(found) == 2 else None
