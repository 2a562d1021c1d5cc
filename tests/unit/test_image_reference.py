"""References as docker reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdwater.core.errors import BadInput
from holdwater.image.registry.reference import api_host, is_loopback, parse_reference, parse_repository

SHA = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "registry", "repository", "tag", "digest"),
    [
        ("debian", "docker.io", "library/debian", "latest", ""),
        ("debian:12", "docker.io", "library/debian", "12", ""),
        ("index.docker.io/debian:12", "docker.io", "library/debian", "12", ""),
        ("a/b", "docker.io", "a/b", "latest", ""),
        ("ghcr.io/a/b/c:v1.2_3-x", "ghcr.io", "a/b/c", "v1.2_3-x", ""),
        (f"ghcr.io/a/b@{SHA}", "ghcr.io", "a/b", "", SHA),
        (f"ghcr.io/a/b:tag@{SHA}", "ghcr.io", "a/b", "tag", SHA),
        ("localhost/a", "localhost", "a", "latest", ""),
        ("localhost:5000/a__b/c-d:1", "localhost:5000", "a__b/c-d", "1", ""),
        ("[::1]:5000/a", "[::1]:5000", "a", "latest", ""),
        ("Host/a", "Host", "a", "latest", ""),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(
    text: str, registry: str, repository: str, tag: str, digest: str
) -> None:
    found = parse_reference(text)
    assert (found.registry, found.repository, found.tag, found.digest) == (registry, repository, tag, digest)
    assert parse_reference(str(found)) == found


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not part of a repository's name"),
        ("Debian", "capital letters"),
        ("ghcr.io/A/b", "capital letters"),
        ("debian:", "is not a tag"),
        ("debian:a b", "is not a tag"),
        ("debian:" + "x" * 129, "is not a tag"),
        ("debian@sha256:12", "is not a digest"),
        ("debian@md5:" + "0" * 32, "is not a digest"),
        ("a//b", "not part of a repository's name"),
        ("ghcr.io/../b", "not part of a repository's name"),
        ("ghcr.io/", "not part of a repository's name"),
        ("-x.io/a", "is not the name of a registry"),
        ("ghcr.io/" + "a" * 260, "longer than 255"),
        ("a\nb", "not part of a repository's name"),
    ],
)
def test_the_fault_of_a_reference_is_named(text: str, named: str) -> None:
    with pytest.raises(BadInput, match=named) as caught:
        parse_reference(text)
    assert "\n" not in caught.value.message


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_bad_input(text: str) -> None:
    try:
        found = parse_reference(text)
    except BadInput:
        return
    assert parse_reference(str(found)) == found
    assert ".." not in f"{found.repository}/{found.target}".split("/")


def test_a_repository_has_neither_tag_nor_digest() -> None:
    assert str(parse_repository("localhost:5000/agents")) == "localhost:5000/agents"
    for text in ("localhost:5000", "localhost:5000/agents:latest", f"agents@{SHA}"):
        with pytest.raises(BadInput, match="neither a tag nor a digest"):
            parse_repository(text)


def test_docker_hub_has_another_name_for_its_api() -> None:
    assert api_host("docker.io") == "registry-1.docker.io"
    assert api_host("localhost:5000") == "localhost:5000"


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("localhost", True),
        ("localhost:5000", True),
        ("127.0.0.1:5000", True),
        ("127.9.9.9", True),
        ("[::1]:5000", True),
        ("registry.localhost:80", True),
        ("localhost.example.com", False),
        ("10.0.0.1:5000", False),
        ("ghcr.io", False),
    ],
)
def test_a_loopback_address_is_known(host: str, here: bool) -> None:
    assert is_loopback(host) is here
