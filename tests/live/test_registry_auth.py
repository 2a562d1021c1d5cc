"""Credentials in all their forms, against a front that asks for them; and that nobody else ever sees them."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.registry_server import Front, Making, RealRegistry, engine, front, layer, real_registry, refused

from holdwater.core.errors import BadInput, ImageFailed
from holdwater.core.image import ImageOutcome, ImageTarget
from holdwater.image.registry import credentials
from holdwater.image.registry.credentials import RegistryCredentials
from holdwater.image.registry.lookup import run_concurrently

SECRET = "hunter2-and-a-half"
IDENTITY = "an-identity-token-of-some-length"
BASES = 6


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "one") as made:
        for number in range(BASES):
            made.push(f"base{number}", "1", "oci")
        yield made


def configured(place: Path, **content: Any) -> Path:
    path = place / "config.json"
    path.write_text(json.dumps(content))
    return path


def login(before: Front, place: Path) -> Path:
    before.password = SECRET
    auth = base64.b64encode(f"{before.user}:{SECRET}".encode()).decode()
    return configured(place, auths={f"http://{before.address}/v1/": {"auth": auth}})


def helper(place: Path, script: str) -> str:
    """A PATH on which `docker-credential-ours` is."""
    path = place / "bin" / "docker-credential-ours"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"{path.parent}:/usr/bin:/bin"


async def built(making: Making, before: Front, repository: str) -> list[Any]:
    bases = [f"{before.address}/base{number}:1" for number in range(BASES)]
    return await making.all(bases, f"{before.address}/{repository}")


def agent(place: Path) -> Any:
    return layer(place / "agent.tar.gz", {"opt/agent/run": b"hello"})


def assert_silent(*things: Any) -> None:
    """No secret, in whatever form it was sent, is in any of these."""
    text = "\n".join(f"{thing!r}\n{thing}" for thing in things)
    forms = [SECRET, IDENTITY, base64.b64encode(f"someone:{SECRET}".encode()).decode(), "tok-"]
    assert [form for form in forms if form in text] == []


def chain(error: BaseException | None) -> list[Any]:
    """An error with all that it came from."""
    found: list[Any] = []
    while error is not None and error not in found:
        found += [error, vars(error), error.args]
        error = error.__cause__ or error.__context__
    return found


@pytest.mark.parametrize(
    "how", ["auth", "username", "helper", "store", "identity", "identity-helper", "anonymous"]
)
async def test_a_registry_that_wants_a_token_gets_one_for_the_right_scopes(
    registry: RealRegistry, tmp_path: Path, how: str
) -> None:
    async with front(registry) as before:
        before.auth, search = "bearer", ""
        if how in ("auth", "username", "helper", "store"):
            before.password = SECRET
        if "identity" in how:
            before.identity = IDENTITY
        given = {"Username": before.user, "Secret": SECRET}
        if how == "identity-helper":
            given = {"Username": "<token>", "Secret": IDENTITY}
        if how in ("helper", "store", "identity-helper"):
            answer = tmp_path / "answer"
            answer.write_text(json.dumps(given))
            log = tmp_path / "asked"
            search = helper(tmp_path, f'[ "$1" = get ] && cat >>{log} && echo >>{log} && cat {answer}')
        config = {
            "auth": {
                "auths": {
                    before.address: {"auth": base64.b64encode(f"{before.user}:{SECRET}".encode()).decode()}
                }
            },
            "username": {"auths": {before.address: {"username": before.user, "password": SECRET}}},
            "helper": {"credHelpers": {before.address: "ours"}, "credsStore": "absent"},
            "store": {"credsStore": "ours", "auths": {before.address: {}}},
            "identity": {"auths": {before.address: {"identitytoken": IDENTITY}}},
            "identity-helper": {"credHelpers": {before.address: "ours"}},
            "anonymous": {},
        }[how]
        async with engine((agent(tmp_path),), config=configured(tmp_path, **config), search=search) as making:
            made = await built(making, before, f"to/{how}")
            assert {one.how for one in made} == {ImageOutcome.MADE}
            assert_silent(made, making.notes, vars(making.registries), before.strayed)
        target = f"repository:to/{how}"
        asked = set(before.scopes)
        assert frozenset({"repository:base0:pull"}) in asked
        assert frozenset({f"{target}:pull,push"}) in asked
        assert frozenset({f"{target}:pull,push", "repository:base0:pull"}) in asked
        assert len(before.scopes) == len(asked)  # each once, however many waited for it
        if how in ("helper", "store", "identity-helper"):
            assert (tmp_path / "asked").read_text() == f"{before.address}\n"  # once for the run


async def test_a_registry_that_wants_a_password_gets_it(registry: RealRegistry, tmp_path: Path) -> None:
    async with front(registry) as before:
        config = login(before, tmp_path)
        before.auth = "basic"
        async with engine((agent(tmp_path),), config=config) as making:
            assert len(await built(making, before, "to/basic")) == BASES
        before.password = "another"
        async with engine((agent(tmp_path),), config=config) as making:
            with pytest.raises(ImageFailed, match="401 UNAUTHORIZED") as caught:
                await making.make(f"{before.address}/base0:1", f"{before.address}/to/basic")
    assert (caught.value.kind, caught.value.again) == ("denied", False)
    assert_silent(*chain(caught.value))


async def test_credentials_go_to_no_other_host(registry: RealRegistry, tmp_path: Path) -> None:
    async with front(registry) as before:
        config = login(before, tmp_path)
        before.auth = "bearer"
        before.redirects_blobs = before.uploads_elsewhere = before.refuses_mounts = True
        async with engine((agent(tmp_path),), config=config) as making:
            made = await built(making, before, "to/far")
        assert {one.how for one in made} == {ImageOutcome.MADE} and sum(one.downloaded for one in made) > 0
        assert before.seen["GET blob"] > BASES and before.strayed == []


async def test_a_token_that_expires_during_a_run_is_renewed_once_for_all(
    registry: RealRegistry, tmp_path: Path
) -> None:
    async with front(registry) as before:
        config = login(before, tmp_path)
        before.auth = "bearer"
        async with engine((agent(tmp_path),), config=config) as making:
            image = ImageTarget(
                name="i", base=f"{before.address}/base0:1", repository=f"{before.address}/to/mid"
            )
            await making.engine.foresee(image)
            before.expire()
            before.scopes.clear()
            before.seen.clear()
            client = making.registries.client_for(before.address)
            wanted = registry.digest("base0", "1")
            found = await run_concurrently(*(client.read_digest("base0", "1") for _ in range(50)))
            assert set(found) == {wanted}
            assert before.scopes == [frozenset({"repository:base0:pull"})]
            assert before.seen["HEAD manifest"] <= 100
            before.expire()
            assert (await built(making, before, "to/mid"))[0].how is ImageOutcome.MADE


async def test_a_token_is_replaced_before_it_expires(registry: RealRegistry, tmp_path: Path) -> None:
    async with front(registry) as before:
        config = login(before, tmp_path)
        before.auth, before.lifetime = "bearer", 1
        async with engine(config=config) as making:
            client = making.registries.client_for(before.address)
            until = time.monotonic() + 1.7
            while time.monotonic() < until:
                await client.read_digest("base0", "1")
            refusals = before.seen["HEAD manifest"] - len(before.tokens)
        assert 2 <= len(before.tokens) <= 4 and refusals > 10
        before.seen.clear()


async def test_a_secret_that_a_registry_repeats_is_not_repeated(
    registry: RealRegistry, tmp_path: Path
) -> None:
    async with front(registry) as before:
        config = login(before, tmp_path)
        before.auth = "basic"

        def fault(kind: str, request: Any) -> Any:
            return refused(403, f"denied to {request.headers['Authorization']} with {SECRET}")

        before.fault = fault
        async with engine((agent(tmp_path),), config=config) as making:
            with pytest.raises(ImageFailed, match=r"DENIED|403") as caught:
                await making.make(f"{before.address}/base0:1", f"{before.address}/to/echo")
            assert_silent(*chain(caught.value), making.notes)


async def test_an_answer_that_is_no_http_shows_nothing_of_what_was_asked(tmp_path: Path) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        signed = b"Authorization" in await reader.readuntil(b"\r\n\r\n")
        wanted = b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic\r\nContent-Length: 0\r\n\r\n"
        writer.write(b"HTTP/1.1 oh dear\r\n\r\n" if signed else wanted)
        writer.close()

    async with await asyncio.start_server(broken, "127.0.0.1", 0) as server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = configured(tmp_path, auths={place: {"username": "someone", "password": SECRET}})
        async with engine(config=config) as making:
            with pytest.raises(ImageFailed, match="invalid response") as caught:
                await making.make(f"{place}/a:1", f"{place}/b")
            assert_silent(*chain(caught.value), making.notes)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo broken; exit 3", "exit status 3"),
        (f"echo {SECRET}", "not in the format of docker's helpers"),
        ("sleep 60 & sleep 60", "no output within 0.5 s"),
        ("head -c 200000 /dev/zero", "more than 65536 bytes"),
    ],
)
async def test_a_helper_that_fails_is_named_without_what_it_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    monkeypatch.setattr(credentials, "HELPER_SECONDS", 0.5)
    config = configured(tmp_path, credHelpers={"ghcr.io": "ours"})
    with pytest.raises(ImageFailed, match=r"docker-credential-ours.*ghcr\.io") as caught:
        await RegistryCredentials(config, helper(tmp_path, script)).find_login("ghcr.io")
    assert why in caught.value.message
    assert_silent(*chain(caught.value))


async def test_a_helper_without_a_login_leaves_the_one_in_the_file(tmp_path: Path) -> None:
    search = helper(tmp_path, "echo 'credentials not found in native keychain'; exit 1")
    content = {
        "credsStore": "ours",
        "auths": {"https://index.docker.io/v1/": {"username": "me", "password": "pw"}},
    }
    known = RegistryCredentials(configured(tmp_path, **content), search)
    assert await known.find_login("ghcr.io") is None
    found = await known.find_login("docker.io")
    assert found is not None and (found.username, found.password) == ("me", "pw")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"auths": {"ghcr.io": {"auth": "' + SECRET, "not a JSON object"),
        ("[]", "not a JSON object"),
        ('{"auths": [1]}', "not an object"),
        (json.dumps({"auths": {"ghcr.io": SECRET}}), "invalid entry"),
        (json.dumps({"auths": {"ghcr.io": {"auth": SECRET}}}), "invalid `auth`"),
        ('{"auths": {"ghcr.io": {"auth": "aGVsbG8="}}}', "invalid `auth`"),
        ('{"credHelpers": {"ghcr.io": "absent"}}', "docker-credential-absent"),
        ('{"credsStore": "../../bin/sh"}', "does not exist"),
    ],
)
async def test_a_broken_configuration_is_bad_input_that_names_the_file(
    tmp_path: Path, content: str, why: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(BadInput, match=why) as caught:
        await RegistryCredentials(path, "/usr/bin").find_login("ghcr.io")
    assert str(path) in caught.value.message
    assert_silent(*chain(caught.value))


async def test_without_a_configuration_no_login_is_found(tmp_path: Path) -> None:
    assert await RegistryCredentials(None).find_login("ghcr.io") is None
    assert await RegistryCredentials(tmp_path / "absent.json").find_login("ghcr.io") is None
