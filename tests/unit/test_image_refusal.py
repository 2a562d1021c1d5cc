"""What registries say, and what is made of it."""

from __future__ import annotations

import json

import pytest

from holdwater.image.registry.credentials import RegistryLogin
from holdwater.image.registry.refusal import parse_refusal, parse_retry_after, sanitize_line
from holdwater.image.registry.tokens import parse_challenge


def told(code: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": "because"}]}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "again"),
    [
        (404, told("MANIFEST_UNKNOWN"), "missing", False),
        (404, told("NAME_UNKNOWN"), "missing", False),
        (404, told("NOT_FOUND"), "missing", False),
        (404, b"<html>no such page</html>", "registry", True),
        (404, b"", "registry", True),
        (404, told("BLOB_UNKNOWN"), "registry", True),
        (500, told("MANIFEST_UNKNOWN"), "registry", True),
        (502, b"bad gateway", "registry", True),
        (503, b"", "registry", True),
        (401, told("UNAUTHORIZED"), "denied", False),
        (403, told("DENIED"), "denied", False),
        (403, told("NAME_UNKNOWN"), "denied", False),
        (429, b"", "rate", True),
        (403, told("TOOMANYREQUESTS"), "rate", True),
        (400, told("DIGEST_INVALID"), "digest", True),
        (400, told("MANIFEST_BLOB_UNKNOWN"), "registry", True),
        (400, told("NAME_INVALID"), "registry", False),
        (405, told("UNSUPPORTED"), "unsupported", False),
        (400, b'{"errors": [[[', "registry", False),
        (400, b'{"errors": [7]}', "registry", False),
    ],
)
def test_only_a_registry_that_says_so_has_no_such_image(
    status: int, body: bytes, kind: str, again: bool
) -> None:
    found = parse_refusal("`a` cannot be read", status, {}, body)
    assert (found.kind, found.again) == (kind, again)
    assert found.message.startswith(f"`a` cannot be read: {status}")


def test_retry_after_is_seconds_or_a_date() -> None:
    assert parse_retry_after({}, 0.0) is None
    assert parse_retry_after({"Retry-After": "7"}, 0.0) == 7.0
    assert parse_retry_after({"Retry-After": "-7"}, 0.0) == 0.0
    assert parse_retry_after({"Retry-After": "soon"}, 0.0) is None
    assert parse_retry_after({"Retry-After": "inf"}, 0.0) is None
    assert parse_retry_after({"Retry-After": "nan"}, 0.0) is None
    date = {"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT"}
    assert parse_retry_after(date, 40.0) == 60.0
    assert parse_retry_after(date, 400.0) == 0.0


def test_foreign_text_is_shown_on_a_short_line_without_url_queries() -> None:
    line = sanitize_line("GET https://s3.example.com/x?X-Amz-Signature=abc failed\n\x1b[2J" + "y" * 1000)
    assert "abc" not in line and "\n" not in line and "\x1b" not in line and len(line) < 310


def test_a_challenge_is_read_and_a_token_preferred() -> None:
    bearer = 'Bearer realm="https://auth.example.com/token",service="reg, 1",scope="repository:a:pull x:y:z"'
    found = parse_challenge(['Basic realm="x"', bearer])
    assert found is not None and found.bearer
    assert (found.realm, found.service) == ("https://auth.example.com/token", "reg, 1")
    assert found.scopes == {"repository:a:pull", "x:y:z"}
    joined = parse_challenge([f'Basic realm="x", {bearer}'])
    assert joined == found
    basic = parse_challenge(["basic"])
    assert basic is not None and not basic.bearer
    assert parse_challenge(['Negotiate abc, Bearer service="x"']) is None


def test_a_login_does_not_print_what_it_knows() -> None:
    login = RegistryLogin("user", "hunter2-hunter2", "identity-token")
    for text in (repr(login), str(login), f"{login}", f"{[login]}"):
        assert "hunter2" not in text and "identity-token" not in text
