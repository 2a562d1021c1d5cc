"""The pure parts of the docker engine: Dockerfiles, causes of failures, warm bases, journals, the client."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from holdwater.core.errors import ResourceExhausted
from holdwater.core.image import ConfigEdits
from holdwater.core.records import FailureOrigin
from holdwater.docker.build import find_docker, summarize_output
from holdwater.docker.client import DockerError
from holdwater.image.docker import failure_causes
from holdwater.image.docker.bases import host_of, pin_reference
from holdwater.image.docker.dockerfile import render_assembly, render_base
from holdwater.image.docker.journal import (
    BasePulled,
    ReferenceGone,
    TagCreated,
    lock_journal,
    open_journal,
    slug,
)
from holdwater.image.docker.ownership import OwnedBase, chain_of, choose_kept_bases
from holdwater.sandbox.docker.container import make_start_error


def test_nothing_in_a_value_is_expanded() -> None:
    edits = ConfigEdits(env={"A": 'a"$b\\', "B": "x\ny"}, user="u$", entrypoint=("sh", "$c\n"))
    made = render_assembly("base", ["l.tar.gz"], edits, {"k=y": "v"}, ["RUN true"])
    assert made.text.splitlines() == [
        "FROM base",
        "ARG HOLDWATER_0",
        "ARG HOLDWATER_1",
        'ADD ["l.tar.gz", "/"]',
        'ENV "A"="a\\"\\$b\\\\"',
        'ENV "B"="${HOLDWATER_0}"',
        'LABEL "${HOLDWATER_1}"="v"',
        'ENTRYPOINT ["sh", "$c\\n"]',
        "RUN true",
        'USER "u\\$"',
    ]
    assert made.arguments == {"HOLDWATER_0": "x\ny", "HOLDWATER_1": "k=y"}
    assert render_base("base", ["RUN a", "ENV B=c"]).text == "FROM base\nRUN a\nENV B=c\n"


@pytest.mark.parametrize(
    ("words", "kind", "again", "after"),
    [
        ("toomanyrequests: You have reached your pull rate limit", "rate", True, failure_causes.RATE_PAUSE),
        ("received unexpected HTTP status: 429 Too Many Requests, retry-after: 12", "rate", True, 12.0),
        ("unauthorized: authentication required", "denied", False, 0.0),
        (
            "pull access denied for a, repository does not exist or may require 'docker login'",
            "denied",
            False,
            0.0,
        ),
        ("manifest for a:b not found: manifest unknown", "missing", False, 0.0),
        ("Get https://r/v2/: dial tcp: lookup r: no such host", "registry", True, 0.0),
        ("received unexpected HTTP status: 503 Service Unavailable", "registry", True, 0.0),
        ("something nobody has heard of", "registry", True, 0.0),
    ],
)
def test_what_a_transfers_words_mean(words: str, kind: str, again: bool, after: float) -> None:
    error = failure_causes.transfer_error("`a`: base `b`", words)
    assert (error.where, error.kind, error.again, error.after) == (FailureOrigin.IMAGE, kind, again, after)
    assert words in error.message


def test_a_full_disk_is_a_matter_of_resources_wherever_it_shows() -> None:
    words = "write /var/lib/docker/tmp/x: no space left on device"
    for error in (failure_causes.transfer_error("`a`", words), failure_causes.build_error("`a`", words)):
        assert isinstance(error, ResourceExhausted) and (error.kind, error.again) == ("disk", True)


def test_a_build_that_failed_fails_again_unless_the_daemon_is_gone() -> None:
    assert failure_causes.build_error("`a`", "exit code: 1").again is False
    lost = "#4 ERROR: failed to prepare xbsb: open /data/overlay2/xsei/committed: no such file or directory"
    damaged = failure_causes.build_error("`a`", lost)
    assert (damaged.kind, damaged.again) == ("daemon", True)
    assert "build cache of the daemon is damaged" in damaged.hint
    gone = failure_causes.build_error(
        "`a`", "Cannot connect to the Docker daemon at unix:///x. Is it running?"
    )
    assert (gone.kind, gone.again) == ("daemon", True)


def test_a_build_is_summarized_by_its_meaningful_lines() -> None:
    lines = [
        "#1 [internal] load x",
        "#2 sha256:" + "a" * 64,
        "#2 DONE 0.1s",
        "",
        "------",
        "#3 oops",
        " > [2/2] RUN no:",
    ]
    assert summarize_output(lines) == "#3 oops\n > [2/2] RUN no:"
    assert summarize_output([]) == "no output"


def holding(name: str, *layers: str, size: int = 10, used: float = 0.0, warm: bool = False) -> OwnedBase:
    return OwnedBase(reference=name, chain=chain_of(layers), size=size, used=used, warm=warm)


def test_the_smallest_base_of_each_shared_chain_is_kept() -> None:
    a, b = holding("a", "root", "python", "a", size=30), holding("b", "root", "python", "b", size=20)
    c, d = holding("c", "root", "c"), holding("d", "other")
    planned: Counter[str] = Counter()
    for base in (a, b, c, d):
        planned.update(base.chain)
    assert choose_kept_bases([a, b, c, d], [], planned, 100) == {"b"}
    assert choose_kept_bases([a, b, c, d], [], planned, 15) == {"c"}
    assert choose_kept_bases([a, c], [b], planned, 100) == set()
    assert choose_kept_bases([a, b, c, d], [], planned, 0) == set()
    assert choose_kept_bases([holding("e", "root", "e", size=0, warm=True)], [], planned, 0) == set()


def test_bases_of_an_earlier_run_stay_while_there_is_room_newest_first() -> None:
    old, new = holding("old", "x", used=1, warm=True), holding("new", "y", used=2, warm=True)
    assert choose_kept_bases([old, new, holding("other", "z")], [], Counter(), 15) == {"new"}


def test_a_journal_lists_the_leftovers_of_a_run_and_is_locked(tmp_path: Path) -> None:
    mine = open_journal(tmp_path, "run")
    mine.write(BasePulled(holding("base", "root")))
    mine.write(TagCreated("r/a:1"))
    mine.write(ReferenceGone("base"))
    with mine.path.open("ab") as torn:
        torn.write(b'{"type":"named","refer')  # a death in the middle of a line
    beside = open_journal(tmp_path, "run")

    assert lock_journal(mine.path) is None
    assert [mine.path.name, beside.path.name] == ["run.jsonl", "run-2.jsonl"]
    mine.close(remove=False)
    beside.close(remove=True)
    dead = lock_journal(mine.path)
    assert dead is not None and (list(dead.contents.bases), list(dead.contents.names)) == ([], ["r/a:1"])
    dead.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_names_are_what_docker_can_read() -> None:
    assert (slug("run-1.a"), len(slug("Run 1")), slug("Run 1") != slug("Run 2")) == ("run-1.a", 16, True)
    assert pin_reference("localhost:5000/a/b:1", "sha256:x") == "localhost:5000/a/b@sha256:x"
    assert pin_reference("debian@sha256:y", "sha256:x") == "debian@sha256:x"
    hosts = [host_of(name) for name in ("debian", "a/b", "localhost/a", "h:1/a", "ghcr.io/a/b")]
    assert hosts == ["docker.io", "docker.io", "localhost", "h:1", "ghcr.io"]


async def test_the_first_client_that_can_build_is_chosen_and_others_are_named(tmp_path: Path) -> None:
    def client(directory: str, release: str) -> str:
        place = tmp_path / directory
        place.mkdir()
        (place / "docker").write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "{release}" && exit 0\nexit 1\n'
        )
        (place / "docker").chmod(0o755)
        return str(place)

    new = client("new", "Docker version 28.2.2, build e6534b4")
    old = client("old", "Docker version 20.10.24+dfsg1, build 297e128")
    home = tmp_path / "home"

    found = await find_docker("unix:///nowhere", home, f"{new}:/nowhere:{old}")
    assert found.client.path == f"{old}/docker"
    (refused,) = found.refused
    assert refused.startswith(f"`{new}/docker`: release 28.2 requires buildx")
    with pytest.raises(DockerError, match=r"no `docker` command can build with BuildKit: .*28\.2"):
        await find_docker("unix:///nowhere", home, new)


async def test_a_builder_whose_cache_the_daemon_does_not_hold_is_passed_over(tmp_path: Path) -> None:
    """What buildx prints is recorded: it is not to be had here."""

    def client(directory: str, driver: str) -> str:
        place = tmp_path / directory
        place.mkdir()
        (place / "docker").write_text(
            '#!/bin/sh\ncase "$*" in\n'
            '--version) echo "Docker version 28.2.2, build e6534b4" ;;\n'
            '"buildx version") echo "github.com/docker/buildx v0.24.0 d0e5e86" ;;\n'
            f'*"buildx inspect default") printf "Name: default\\nDriver: {driver}\\n" ;;\n'
            "*) exit 1 ;;\nesac\n"
        )
        (place / "docker").chmod(0o755)
        return str(place)

    other, ours = client("other", "docker-container"), client("ours", "docker")

    found = await find_docker("unix:///nowhere", tmp_path / "home", f"{other}:{ours}")

    assert found.client.path == f"{ours}/docker"
    assert found.refused == (
        f"`{other}/docker`: its builder `default` has the driver `docker-container`, not `docker`",
    )


@pytest.mark.parametrize(
    "message",
    [
        "cannot exec in a stopped state",
        "cannot exec in a deleted state",
        "cannot exec a container that has stopped",
    ],
)
def test_a_command_in_a_stopped_container_is_not_blamed(message: str) -> None:
    error = make_start_error(f"OCI runtime exec failed: exec failed: {message}: unknown", "sh")

    assert (error.kind, "the container is gone" in str(error)) == ("daemon", True)
