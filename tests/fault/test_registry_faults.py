"""A registry that misbehaves: a build completes, or names image and cause; an error is never `missing`."""

from __future__ import annotations

import asyncio
import email.utils
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.registry_server import (
    QUICK,
    Front,
    RealRegistry,
    digest,
    engine,
    front,
    layer,
    real_registry,
    refused,
    tar,
)
from tests.wait_bounds import stretch

from holdwater.core.errors import ImageFailed
from holdwater.core.image import ImageOutcome, RegistryOptions
from holdwater.image.registry.host import RegistryRetryPolicy
from holdwater.image.registry.lookup import check_image, run_concurrently

SIZE = 3_000_000


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    with real_registry(tmp_path_factory.mktemp("registry") / "one") as made:
        made.push("base", "1", "oci", layers=[tar({"etc/": b"", "etc/big": os.urandom(SIZE)})])
        made.push("second", "1", "schema2")
        yield made


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return layer(tmp_path_factory.mktemp("agent") / "a.tar.gz", {"opt/agent/big": os.urandom(SIZE)})


def times(count: int, kind: str, answer: Any) -> Any:
    """A fault that hits requests of a kind so many times."""
    left = [count]

    def fault(seen: str, request: web.Request) -> web.StreamResponse | None:
        if not seen.startswith(kind) or not left[0]:
            return None
        left[0] -= 1
        return answer() if callable(answer) else answer

    return fault


async def made_well(before: Front, agent: Any, repository: str, **options: Any) -> Any:
    """An image that came out whole, in spite of it all."""
    async with engine((agent,), **options) as making:
        made = await making.make(f"{before.address}/base:1", f"{before.address}/{repository}")
        before.fault = lambda kind, request: None
        assert made.how is ImageOutcome.MADE and await check_image(making.registries, made) == ""
    stored = before.registry.manifest(repository, made.digest)
    for one in stored["layers"]:
        before.registry.blob(repository, one["digest"])
    return made


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("GET manifest", 500),
        ("GET blob", 503),
        ("mount", 502),
        ("begin", 503),
        ("PUT blob", 500),
        ("PUT manifest", 503),
        ("HEAD", 500),
    ],
)
async def test_what_the_server_gets_wrong_is_tried_again(
    registry: RealRegistry, agent: Any, kind: str, status: int
) -> None:
    async with front(registry) as before:
        before.refuses_mounts = kind in ("HEAD", "GET blob")
        before.fault = times(2, kind, lambda: refused(status))
        await made_well(before, agent, f"to/{kind.lower().replace(' ', '-')}-{status}")


@pytest.mark.parametrize("kind", ["GET manifest", "GET blob", "mount", "begin", "PUT blob", "PUT manifest"])
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (500, "UNKNOWN", "registry"),
        (401, "UNAUTHORIZED", "denied"),
        (403, "DENIED", "denied"),
        (429, "TOOMANYREQUESTS", "rate"),
    ],
)
async def test_a_registry_error_names_image_and_cause_and_is_never_missing(
    registry: RealRegistry, agent: Any, kind: str, status: int, code: str, expected: str
) -> None:
    impatient = RegistryRetryPolicy(tries=2, first=0.01, pause=0.5, waiting=0.02, stall=5)
    async with front(registry) as before, engine((agent,), patience=impatient) as making:
        before.fault = times(10_000, kind, lambda: refused(status, code))
        for doing in (making.make, making.foresee):
            if doing == making.foresee and kind not in ("GET manifest", "GET blob"):
                continue
            with pytest.raises(ImageFailed, match=f"{status} {code}|requires a pause") as caught:
                await doing(f"{before.address}/base:1", f"{before.address}/to/refused")
            assert caught.value.kind == expected and caught.value.again is (expected != "denied")
            assert f"{before.address}/base:1" in caught.value.message


async def test_a_page_that_is_not_found_is_no_missing_image(registry: RealRegistry, agent: Any) -> None:
    async with front(registry) as before, engine((agent,)) as making:
        lost = lambda: web.Response(status=404, text="<html>nginx</html>")  # noqa: E731
        before.fault = times(10_000, "GET manifest", lost)
        with pytest.raises(ImageFailed, match="404") as caught:
            await making.make(f"{before.address}/base:1", f"{before.address}/to/lost")
        assert (caught.value.kind, caught.value.again) == ("registry", True)
        before.fault = times(10_000, "GET blob", lost)
        client = making.registries.client_for(before.address)
        with pytest.raises(ImageFailed, match="404"):
            await client.has("base", digest(b"nothing"))
        before.fault = lambda kind, request: None
        assert await client.has("base", digest(b"nothing")) is False


async def test_mounts_that_are_refused_become_streams_in_the_upload_that_was_begun(
    registry: RealRegistry, agent: Any
) -> None:
    async with front(registry) as before:
        before.refuses_mounts = True
        made = await made_well(before, agent, "to/unmounted")
        assert made.mounted == 0 and made.downloaded >= SIZE
        assert before.seen["mount"] == 1
        assert before.seen["begin"] == 2  # of the layer and the configuration alone
        assert before.up == made.uploaded


async def test_blobs_are_fetched_from_and_sent_to_other_hosts(registry: RealRegistry, agent: Any) -> None:
    async with front(registry) as before:
        before.refuses_mounts = before.redirects_blobs = before.uploads_elsewhere = True
        made = await made_well(before, agent, "to/elsewhere")
        assert made.downloaded >= SIZE


async def test_another_host_that_denies_is_trouble_of_the_registry(
    registry: RealRegistry, agent: Any
) -> None:
    async with front(registry) as before, engine((agent,)) as making:
        before.redirects_blobs = True

        def fault(kind: str, request: web.Request) -> web.Response | None:
            return web.Response(status=403) if request.host == before.elsewhere else None

        before.fault = fault
        with pytest.raises(ImageFailed, match="answered 403") as caught:
            await making.make(f"{before.address}/base:1", f"{before.address}/to/denied")
        assert (caught.value.kind, caught.value.again) == ("registry", True)


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_a_rate_limit_is_waited_for_by_everyone(registry: RealRegistry, form: str) -> None:
    async with front(registry) as before, engine() as making:
        began: list[float] = []
        early: list[str] = []

        def fault(kind: str, request: web.Request) -> web.Response | None:
            if not began:
                began.append(time.monotonic())
                date = email.utils.formatdate(time.time() + 2, usegmt=True)
                return refused(429, "TOOMANYREQUESTS", Retry_After="1" if form == "seconds" else date)
            if time.monotonic() < began[0] + 0.9:
                early.append(kind)
            return None

        paused = asyncio.Event()

        def noted(kind: str, message: str) -> None:
            assert kind == "registry.rate" and "429" in message
            paused.set()

        client = making.registries.client_for(before.address)
        client.host.note = noted
        before.fault = fault

        async def late() -> None:
            await paused.wait()
            await client.read_digest("second", "1")

        await run_concurrently(client.read_digest("base", "1"), *(late() for _ in range(5)))
        assert early == [] and time.monotonic() >= began[0] + 0.9 and before.seen["HEAD manifest"] == 7


async def test_a_registry_that_asks_for_a_long_wait_refuses_all_at_once(
    registry: RealRegistry, agent: Any
) -> None:
    async with front(registry) as before, engine((agent,)) as making:
        before.fault = times(1, "GET manifest", lambda: refused(429, "TOOMANYREQUESTS", Retry_After="3600"))
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(ImageFailed) as caught:
                await making.make(f"{before.address}/base:1", f"{before.address}/to/limited")
            assert caught.value.kind == "rate" and 3500 < caught.value.after <= 3600
        assert time.monotonic() - began < stretch(2) and before.seen["GET manifest"] == 1


async def test_a_rate_of_our_own_is_kept(registry: RealRegistry) -> None:
    async with front(registry) as before:
        settings = {before.address: RegistryOptions(requests_a_minute=1200)}
        async with engine(settings=settings) as making:
            client = making.registries.client_for(before.address)
            began = time.monotonic()
            await run_concurrently(*(client.read_digest("base", "1") for _ in range(60)))
            assert time.monotonic() - began >= (60 - 40) / 20 - 0.1  # all but two seconds' worth


@pytest.mark.parametrize("tells", [True, False])
async def test_a_cut_upload_continues_where_the_registry_says_or_starts_over(
    registry: RealRegistry, agent: Any, tells: bool
) -> None:
    async with front(registry) as before, engine() as making:
        before.cuts, before.tells = 3, tells
        client = making.registries.client_for(before.address)
        await client.upload_file(f"cut/{tells}".lower(), agent.digest, agent.size, Path(agent.path))
        assert before.registry.blob(f"cut/{tells}".lower(), agent.digest) == Path(agent.path).read_bytes()
        assert before.seen["status"] == 3
        assert before.seen["begin"] == (1 if tells else 4)
        assert before.up == agent.size  # not a byte that had arrived was sent again, where it was kept


async def test_images_are_whole_although_uploads_and_downloads_are_cut(
    registry: RealRegistry, agent: Any
) -> None:
    async with front(registry) as before:
        before.cuts, before.cuts_downloads, before.refuses_mounts = 3, 2, True
        await made_well(before, agent, "to/cut")


async def test_bytes_that_are_not_what_was_asked_for_are_never_passed_on(
    registry: RealRegistry, agent: Any
) -> None:
    blob = registry.manifest("base", "1")["layers"][0]["digest"]
    async with front(registry) as before, engine((agent,)) as making:
        before.refuses_mounts, before.spoils = True, blob
        with pytest.raises(ImageFailed, match=f"{blob}.*cannot be read") as caught:
            await making.make(f"{before.address}/base:1", f"{before.address}/to/spoiled")
        assert (caught.value.kind, caught.value.again) == ("digest", True)
        assert registry.tags("to/spoiled") == []
        before.spoils = registry.digest("base", "1")
        with pytest.raises(ImageFailed, match="does not match the digest") as caught:
            await making.make(f"{before.address}/base@{before.spoils}", f"{before.address}/to/spoiled")
        assert caught.value.kind == "digest"
        before.fault = times(
            10_000, "GET manifest", lambda: web.Response(body=b"{}", headers={"Docker-Content-Digest": blob})
        )
        with pytest.raises(ImageFailed, match="does not match the digest") as caught:
            await making.make(f"{before.address}/base:1", f"{before.address}/to/spoiled")
        assert caught.value.kind == "digest"


async def test_a_layer_file_that_changed_is_not_uploaded(
    registry: RealRegistry, agent: Any, tmp_path: Path
) -> None:
    changed = tmp_path / "changed.tar.gz"
    changed.write_bytes(Path(agent.path).read_bytes()[:-1] + b"x")
    async with engine() as making:
        client = making.registries.client_for(registry.address)
        for path, kind in ((changed, "digest"), (tmp_path / "absent", "layer")):
            with pytest.raises(ImageFailed, match="cannot be uploaded") as caught:
                await client.upload_file("to/changed", agent.digest, agent.size, path)
            assert caught.value.kind == kind
        assert not await client.has("to/changed", agent.digest)


async def test_schema1_is_named(registry: RealRegistry, agent: Any) -> None:
    async with front(registry) as before, engine((agent,)) as making:
        kind = "application/vnd.docker.distribution.manifest.v1+prettyjws"
        answer = lambda: web.Response(body=b'{"schemaVersion":1}', content_type=kind)  # noqa: E731
        before.fault = times(1, "GET manifest", answer)
        with pytest.raises(ImageFailed, match="schema1") as caught:
            await making.make(f"{before.address}/base:1", f"{before.address}/to/schema1")
        assert (caught.value.kind, caught.value.again) == ("unsupported", False)


async def test_a_registry_that_is_not_there_is_named() -> None:
    async with engine() as making:
        with pytest.raises(ImageFailed, match=r"127\.0\.0\.1:1/a:1.*Cannot connect") as caught:
            await making.make("127.0.0.1:1/a:1", "127.0.0.1:1/b")
    assert (caught.value.kind, caught.value.again) == ("registry", True)


async def test_a_registry_that_takes_nothing_any_more_is_left(agent: Any) -> None:
    """It reads the headers and then nothing: without a limit, sending would never end."""
    seen = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            writer.write(
                b"HTTP/1.1 202 Accepted\r\nLocation: /v2/a/blobs/uploads/1\r\nContent-Length: 0\r\n\r\n"
            )
        await seen.wait()
        writer.close()

    server = await asyncio.start_server(stuck, "127.0.0.1", 0, limit=1024)
    port = server.sockets[0].getsockname()[1]
    impatient = RegistryRetryPolicy(tries=1, stall=0.3)
    async with server:
        async with engine(patience=impatient) as making:
            client = making.registries.client_for(f"127.0.0.1:{port}")
            with pytest.raises(ImageFailed, match=r"sent no data for 0\.3 s"):
                await client.upload_file("a", agent.digest, agent.size, Path(agent.path))
        seen.set()


async def test_a_build_that_is_cancelled_anywhere_is_made_whole_by_the_next(
    registry: RealRegistry, agent: Any
) -> None:
    kinds = ("GET manifest", "mount", "begin", "PUT blob", "PUT manifest")
    async with front(registry) as before:
        before.refuses_mounts = True
        for number, kind in enumerate(kinds):
            async with engine((agent,)) as making:
                reached = asyncio.Event()

                def fault(
                    seen: str, request: web.Request, kind: str = kind, reached: asyncio.Event = reached
                ) -> web.Response | None:
                    if seen == kind:
                        reached.set()
                        raise web.HTTPServiceUnavailable(headers={"Retry-After": "2"})
                    return None

                before.fault = fault
                base, place = f"{before.address}/base:1", f"{before.address}/to/cancelled{number}"
                making_one = asyncio.ensure_future(making.make(base, place))
                await reached.wait()
                making_one.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await making_one
                before.fault = lambda kind, request: None
            assert QUICK.pause > 2
            made = await made_well(before, agent, f"to/cancelled{number}")
            assert made.how is ImageOutcome.MADE
