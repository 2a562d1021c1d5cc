"""Which daemon understands what, and who can build.

buildx is not to be had where these tests run: what it prints is recorded here, and nothing is run with it.
"""

from __future__ import annotations

import json

import pytest

from holdwater.docker.cache import BuilderCache, DaemonCache, cache_of, parse_usage
from holdwater.docker.client import DockerClient
from holdwater.docker.versions import (
    Builder,
    Client,
    builder_of,
    negotiated,
    prune_command,
    prune_query,
    usage_query,
    why_not,
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
USAGE = """\
ID:\t\tzwp3m5j6ydhmfgcfchztyfe4o
Parents:\tq0m2yqdgqnnzd1h3xq3mu9hbz
Created at:\t2024-03-05 10:11:12.5 +0000 UTC
Mutable:\tfalse
Reclaimable:\ttrue
Shared:\t\tfalse
Size:\t\t4.1MB
Description:\tmount / from exec /bin/sh -c echo: hi
Usage count:\t1
Last used:\t2 minutes ago
Type:\t\tregular

ID:\t\tq0m2yqdgqnnzd1h3xq3mu9hbz
Created at:\t2024-03-05 12:11:11 +0200 CEST
Mutable:\ttrue
Reclaimable:\tfalse
Shared:\t\ttrue
Size:\t\t120B
Description:\tlocal source for context
Type:\t\tsource.local

Reclaimable:\t4.1MB
Total:\t\t4.1MB
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
    assert negotiated(newest, oldest) == spoken


@pytest.mark.parametrize(
    ("api", "kept"), [((1, 41), "keep-storage"), ((1, 47), "keep-storage"), ((1, 48), "reserved-space")]
)
def test_a_prune_uses_the_words_that_the_daemon_knows(api: tuple[int, int], kept: str) -> None:
    query = prune_query(api, "abc")
    assert query.pop(kept) == "0"
    assert query.pop("all") == "true"  # or else a record that an image shares stays
    assert json.loads(query.pop("filters")) == {"id": ["abc"]}
    assert query == {}


def test_the_build_cache_alone_is_asked_for_where_that_is_known() -> None:
    assert (usage_query((1, 41)), usage_query((1, 42))) == ({}, {"type": "build-cache"})


@pytest.mark.parametrize(
    ("release", "buildx", "reason"),
    [
        ("Docker version 20.10.24+dfsg1, build 297e128", "", ""),
        ("Docker version 28.2.2, build e6534b4", "", "release 28.2 builds with buildx alone"),
        ("Docker version 28.2.2, build e6534b4", "github.com/docker/buildx v0.24.0 d0e5e86", ""),
        ("Docker version 18.06.1-ce, build e68fc7a", "", "older than BuildKit"),
        ("podman version 4.3.1", "", "not Docker's own"),
    ],
)
def test_who_can_build(release: str, buildx: str, reason: str) -> None:
    told = why_not(Client(path="/usr/bin/docker", release=release, buildx=buildx))
    assert told == "" if not reason else reason in told


def test_the_cache_is_pruned_in_the_builder_that_holds_it() -> None:
    remote, default = builder_of(INSPECTED), builder_of(INSPECTED_DEFAULT)
    assert remote == Builder(name="remote", driver="docker-container") and default == Builder()
    assert builder_of("ERROR: no builder") is None
    assert prune_command(remote, "abc") == [
        *("buildx", "prune", "--builder", "remote", "--force", "--all", "--filter", "id=abc")
    ]


async def test_a_builder_of_another_driver_is_asked_through_the_command() -> None:
    asked: list[list[str]] = []

    async def run(arguments: list[str]) -> str:
        asked.append(arguments)
        return USAGE if "du" in arguments else "ID\tRECLAIMABLE\tSIZE\nabc\ttrue\t4.1MB\nTotal:\t4.1MB\n"

    client = DockerClient("unix:///nowhere")
    assert isinstance(cache_of(Builder(), client, run), DaemonCache)
    cache = cache_of(Builder(name="remote", driver="docker-container"), client, run)
    assert isinstance(cache, BuilderCache)
    assert await cache.records() == parse_usage(USAGE)
    assert (await cache.remove("abc"), await cache.remove("other")) == (True, False)
    assert [one[:4] for one in asked] == [
        ["buildx", verb, "--builder", "remote"] for verb in ("du", "prune", "prune")
    ]


def test_what_a_builder_tells_of_its_cache_is_read() -> None:
    first, second = parse_usage(USAGE)
    assert (first.id[:3], first.parents, first.size) == ("zwp", (second.id,), 4_100_000)
    assert (first.in_use, first.shared, first.kind) == (False, False, "regular")
    assert first.description == "mount / from exec /bin/sh -c echo: hi"
    assert (second.in_use, second.shared, second.kind) == (True, True, "source.local")
    assert first.created - second.created == 1.5
