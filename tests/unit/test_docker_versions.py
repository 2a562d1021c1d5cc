"""Which daemon understands what, and who can build.

buildx is not to be had where these tests run: what it prints is recorded here, and nothing is run with it.
"""

from __future__ import annotations

import json

import pytest

from holdwater.docker.versions import (
    BuildxBuilder,
    DockerProgram,
    explain_unfit,
    make_prune_query,
    make_usage_query,
    negotiate_version,
    parse_builder,
)

INSPECTED = """\
Name:          remote
Driver:        docker-container
Last Activity: 2024-03-05 10:11:12 +0000 UTC

Nodes:
Name:      remote0
Endpoint:  unix:///var/run/docker.sock
Status:    running
Buildkit:  v0.12.5
"""
INSPECTED_DEFAULT = """\
Name:   default
Driver: docker

Nodes:
Name:             default
Endpoint:         default
Status:           running
Buildkit version: v0.11.6
"""


@pytest.mark.parametrize(
    ("newest", "oldest", "spoken"),
    [
        ("1.41", "1.12", (1, 41)),  # 20.10
        ("1.47", "1.24", (1, 47)),  # 27.4
        ("1.48", "1.24", (1, 48)),  # 28.0
        ("1.52", "1.44", (1, 48)),  # 29: newer than what is known here
        ("1.38", "1.12", None),  # 18.06: no BuildKit
        ("1.60", "1.50", None),  # one that has forgotten what is known here
    ],
)
def test_the_api_version_is_negotiated(newest: str, oldest: str, spoken: tuple[int, int] | None) -> None:
    assert negotiate_version(newest, oldest) == spoken


@pytest.mark.parametrize(
    ("api", "kept"), [((1, 41), "keep-storage"), ((1, 47), "keep-storage"), ((1, 48), "reserved-space")]
)
def test_a_prune_uses_the_words_that_the_daemon_knows(api: tuple[int, int], kept: str) -> None:
    query = make_prune_query(api, "abc")
    assert query.pop(kept) == "0"
    assert query.pop("all") == "true"  # or else a record that an image shares stays
    assert json.loads(query.pop("filters")) == {"id": ["abc"]}
    assert query == {}


def test_the_build_cache_alone_is_asked_for_where_that_is_known() -> None:
    assert (make_usage_query((1, 41)), make_usage_query((1, 42))) == ({}, {"type": "build-cache"})


@pytest.mark.parametrize(
    ("release", "buildx", "reason"),
    [
        ("Docker version 20.10.24+dfsg1, build 297e128", "", ""),
        ("Docker version 28.2.2, build e6534b4", "", "release 28.2 requires buildx"),
        ("Docker version 28.2.2, build e6534b4", "github.com/docker/buildx v0.24.0 d0e5e86", ""),
        ("Docker version 18.06.1-ce, build e68fc7a", "", "does not support BuildKit"),
        ("podman version 4.3.1", "", "not a Docker client"),
    ],
)
def test_who_can_build(release: str, buildx: str, reason: str) -> None:
    told = explain_unfit(DockerProgram(path="/usr/bin/docker", release=release, buildx=buildx))
    assert told == "" if not reason else reason in told


def test_a_builder_is_known_by_its_driver() -> None:
    """One of another driver is refused: the daemon's prune would not reach its cache."""
    assert parse_builder(INSPECTED) == BuildxBuilder(name="remote", driver="docker-container")
    assert parse_builder(INSPECTED_DEFAULT) == BuildxBuilder()
    assert parse_builder("ERROR: no builder") is None
