"""However a body is cut on its way to the gateway, the upstream gets it whole."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
import pytest
from tests.gateway_harness import ask, scene

from holdwater.gateway import body_reader
from holdwater.testing.scripted_model import ScriptedReply, serve_raw


@pytest.mark.parametrize(
    ("size", "piece"),
    [
        (20_000, 7),  # crumbs
        (2_000_000, 100_000),
        (body_reader.LARGEST_JOINED + 100_000, 1_000_000),
    ],
)
async def test_a_body_in_pieces_arrives_whole(size: int, piece: int) -> None:
    seen: list[bytes] = []

    def script(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        seen.append(bytes(body))
        return ScriptedReply(text="so it is")

    async with serve_raw(script) as upstream, scene(upstream) as here:
        body = msgspec.json.encode(ask("x" * size))
        reader, writer = await asyncio.open_unix_connection(str(here.gateway.socket))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer %s\r\n"
            b"Content-Length: %d\r\n\r\n" % (here.session.key.encode(), len(body))
        )
        for at in range(0, len(body), piece):
            writer.write(body[at : at + piece])
            await asyncio.sleep(0)  # the gateway, in the same loop, reads what is there
        status = await reader.readline()
        writer.close()
        await writer.wait_closed()

    assert b" 200 " in status
    assert seen == [body]
