"""Requests that strangers send to a server: a web page, a rebound name, another user. None is obeyed.

Each request is one that a browser would send, byte by byte. A request is obeyed if its answer is no refusal,
or if anything of the server is another afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
from tests.server_harness import Server, eventually, server
from tests.wait_bounds import stretch

from holdwater.client import AccessRefused, AsyncClient, Client
from holdwater.core.records import MiB
from holdwater.core.serving_protocol import ProblemDetails
from holdwater.gateway.request_heads import LONGEST_HEAD
from holdwater.ledger.reader import LedgerReader
from holdwater.serve.rollout_server import ROUTES

ORDER = {
    "key": "evil",
    "instance": {"id": "evil", "instruction": "x", "setup": "touch {mark}"},
    "detached": True,
}
BODIES = {  # of the routes that read one
    "/v1/orders": ORDER,
    "/v1/orders/([^/]+)/answers": {"call": "1.1", "text": "evil"},
    "/v1/model": {"url": "http://127.0.0.1:1/v1"},
}
REQUESTS = [(method, pattern) for pattern, methods in ROUTES.items() for method in methods]
JSON, PLAIN = "application/json", "text/plain;charset=UTF-8"


class Attack(NamedTuple):
    """A request that should not be obeyed: `{host}` stands for the server's own address."""

    status: int
    headers: dict[str, str]
    kind: str = JSON
    key: str | None = ""  # empty: the right one
    bodies_only: bool = False  # it says something about the body


PAGE = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
KEYS = {
    "no key": Attack(401, {}, key=None),
    "wrong key": Attack(401, {}, key="guessed"),
    "no key from a page": Attack(403, PAGE, key=None),
}
VISITS = {
    "foreign origin": Attack(403, {"Origin": "https://evil.example"}),
    "hidden origin": Attack(403, {"Origin": "null"}),
    "origin of another port": Attack(403, {"Origin": "http://127.0.0.1:1"}),
    "cross-site": Attack(403, {"Sec-Fetch-Site": "cross-site"}),
    "same-site": Attack(403, {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:3000"}),
    "two origins": Attack(403, {"Origin": "http://{host}", "origin": "https://evil.example"}),
    "rebound name": Attack(421, {"Host": "evil.example:8400"}),
    "rebound name of one's own": Attack(
        421, {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    ),
    "any address": Attack(421, {"Host": "0.0.0.0:8400"}),
    "name in front": Attack(421, {"Host": "localhost.evil.example"}),
    "user in front": Attack(421, {"Host": "localhost:8400@evil.example"}),
    "two hosts": Attack(400, {"Host": "{host}", "host": "evil.example"}),
    "no host": Attack(421, {"Host": ""}),
    "plain text": Attack(415, {}, kind=PLAIN, bodies_only=True),
    "form": Attack(415, {}, kind="application/x-www-form-urlencoded", bodies_only=True),
    "no type": Attack(415, {}, kind="", bodies_only=True),
    "page with plain text": Attack(403, PAGE, kind=PLAIN),
}


class Scene(NamedTuple):
    serve: Server
    attacks: dict[str, Attack]
    mark: Path  # made by the order's set-up, if it is ever obeyed

    @property
    def host(self) -> str:
        return self.serve.url.removeprefix("http://")

    def bytes_of(self, attack: Attack, method: str, pattern: str) -> bytes:
        path = pattern.replace("([^/]+)", "mine")
        body = json.dumps(BODIES[pattern]).replace("{mark}", str(self.mark)) if pattern in BODIES else ""
        headers = {"Host": "{host}", **attack.headers}
        lines = [f"{method} {path} HTTP/1.1", "Connection: close"]
        lines += [f"{name}: {value.replace('{host}', self.host)}" for name, value in headers.items()]
        if attack.kind and body:
            lines.append(f"Content-Type: {attack.kind}")
        if attack.key is not None and (self.serve.out / "token").exists():
            lines.append(f"Authorization: Bearer {attack.key or self.serve.token}")
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", body]).encode()

    async def send(self, content: bytes) -> tuple[int, dict[str, str], bytes]:
        host, port = self.host.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(content)
            async with asyncio.timeout(stretch(20)):
                answer = await reader.read()
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, body


@pytest.fixture(scope="module", params=["token", "no-key"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    place = tmp_path_factory.mktemp("visited")
    token = request.param == "token"
    with server(place, "--workers", "1", *([] if token else ["--no-key"])) as serve:
        yield Scene(serve, {**KEYS, **VISITS} if token else VISITS, place / "obeyed")


async def test_no_route_obeys_a_stranger(scene: Scene) -> None:
    async with scene.serve.client() as client:
        await scene.serve.ready(client)
    obeyed, count = [], 0
    for name, attack in scene.attacks.items():
        for method, pattern in REQUESTS:
            if attack.bodies_only and pattern not in BODIES:
                continue
            status, headers, body = await scene.send(scene.bytes_of(attack, method, pattern))
            count += 1
            refused = status == attack.status and "access-control-allow-origin" not in headers
            if not refused or not msgspec.json.decode(body, type=ProblemDetails).message:
                obeyed.append((name, method, pattern, status, body[:200]))

    assert obeyed == []
    assert count > 100
    async with scene.serve.client() as client:
        assert await client.health() and (await client.health()).ok  # it was not drained
        assert (await client.stats()).orders.get("accepted", 0) == 0
    assert not scene.mark.exists()
    with LedgerReader(scene.serve.out) as reader:
        assert "model.steered" not in {event.kind for event in reader.events()}


async def test_the_same_request_without_the_attack_is_obeyed(scene: Scene) -> None:
    """The attacks fail by what is wrong with them, and not by how they are written."""
    async with scene.serve.client() as client:
        await scene.serve.ready(client)
    fine = Attack(200, {})
    own = {"Origin": "http://{host}", "Sec-Fetch-Site": "same-origin"}
    for attack in (fine, fine._replace(headers=own), fine._replace(headers={"Sec-Fetch-Site": "none"})):
        for path in ("/v1/health", "/v1/stats", "/metrics"):
            status, headers, _ = await scene.send(scene.bytes_of(attack, "GET", path))
            assert (status, headers["x-content-type-options"]) == (200, "nosniff")
    status, _, body = await scene.send(scene.bytes_of(fine, "POST", "/v1/orders/([^/]+)/answers"))
    assert (status, msgspec.json.decode(body, type=ProblemDetails).code) == (404, "unknown")


async def test_a_preflight_request_of_a_page_is_refused(scene: Scene) -> None:
    ask = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for _, pattern in REQUESTS:
        request = scene.bytes_of(Attack(403, ask, key=None), "OPTIONS", pattern)
        status, headers, _ = await scene.send(request)
        assert status == 403
        assert not [name for name in headers if name.startswith("access-control-")]


async def test_heads_of_strangers_do_not_fill_the_memory(tmp_path: Path) -> None:
    with server(tmp_path, "--workers", "1") as serve:
        async with serve.client() as client:
            await serve.ready(client)
            assert serve.process is not None
            process = psutil.Process(serve.process.pid)
            before = process.memory_info().rss
            host, port = serve.url.removeprefix("http://").split(":")
            connections = []
            for _ in range(200):
                reader, writer = await asyncio.open_connection(host, int(port))
                connections.append((reader, writer))
                writer.write(b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n")
                with suppress(ConnectionError):
                    for number in range(40):
                        writer.write(b"X-%d: %s\r\n" % (number, b"a" * 60_000))
                        await writer.drain()
            async with asyncio.timeout(stretch(30)):
                for reader, writer in connections:
                    with suppress(ConnectionError):
                        await reader.read()  # until it is closed
                    writer.close()
            assert (await client.health()).ok
            grown = process.memory_info().rss - before
    assert grown < 64 * MiB


async def test_a_large_head_is_read_and_a_larger_one_refused(scene: Scene) -> None:
    async with scene.serve.client() as client:
        await scene.serve.ready(client)
    headers = {f"X-{number}": "a" * 60_000 for number in range(3)}
    larger = scene.bytes_of(Attack(431, headers), "GET", "/v1/health")[: LONGEST_HEAD + 1]
    assert (await scene.send(larger))[0] == 431
    del headers["X-2"]
    assert (await scene.send(scene.bytes_of(Attack(200, headers), "GET", "/v1/health")))[0] == 200


@asynccontextmanager
async def elsewhere(monkeypatch: pytest.MonkeyPatch, **variables: str) -> AsyncIterator[None]:
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


async def test_clients_of_the_same_user_need_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(tmp_path, "--workers", "1") as serve:
        async with serve.client() as client:
            await serve.ready(client)
            renamed = serve.url.replace("127.0.0.1", "localhost")
            async with AsyncClient(renamed) as other:
                assert (await other.health()).ok
        with Client(serve.url) as plain:
            assert plain.health().ok
        async with (
            elsewhere(monkeypatch, HOLDWATER_CACHE=str(tmp_path / "other")),
            AsyncClient(serve.url) as other,
        ):
            with pytest.raises(AccessRefused, match="missing API key"):
                await other.health()
        token = serve.out / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert serve.token not in serve.said

        serve.kill()
        serve.start()
        async with serve.client() as client:
            await serve.ready(client)
        serve.stop()
        assert not token.exists()


async def test_a_client_outlives_a_server_that_makes_a_new_token(tmp_path: Path) -> None:
    with server(tmp_path, "--workers", "1") as serve:
        async with serve.client() as client:
            await serve.ready(client)
            first = serve.token
            serve.stop()
            serve.start()
            await eventually((serve.out / "token").exists, 20.0, lambda: serve.said)
            assert (await client.stats()).uptime > 0
            assert serve.token != first


async def test_a_unix_socket_wants_the_token_too(tmp_path: Path) -> None:
    serve = Server(tmp_path, "--workers", "1")
    serve.url = serve.words[serve.words.index("--listen") + 1] = f"unix:{tmp_path / 'door'}"
    serve.start()
    try:
        async with serve.client() as client:
            await serve.ready(client)
        async with AsyncClient(serve.url, "wrong") as stranger:
            with pytest.raises(AccessRefused, match="invalid API key"):
                await stranger.health()
    finally:
        serve.stop()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs another user")
async def test_another_user_of_the_machine_cannot_read_the_token(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents[:-1]):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o055)
    with server(tmp_path, "--workers", "1") as serve:
        async with serve.client() as client:
            await serve.ready(client)
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        for path in (serve.out / "token", serve.out / "run.json"):
            done = subprocess.run(
                [*nobody, "cat", str(path)], capture_output=True, text=True, timeout=stretch(60), check=False
            )
            assert done.returncode != 0 and done.stdout == ""


def test_without_a_key_the_command_says_who_is_obeyed(tmp_path: Path) -> None:
    serve = Server(tmp_path, "--workers", "1", "--no-key")
    serve.start()
    try:
        asyncio.run(eventually(lambda: "serving: " in serve.said, 20.0, lambda: serve.said))
        assert "without a key: every user of this machine has access" in serve.said
        assert not (serve.out / "token").exists()
    finally:
        serve.stop()
