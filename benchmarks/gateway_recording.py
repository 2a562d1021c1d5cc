"""Measures the cost of recording a turn alone: a long conversation that grows, as agents send it.

The timed work is the gateway's work between the last byte of a request and its call, and before the last byte
of the reply: `ConversationRecorder.read`, the head, the delta, and the exchange on disk. No socket is
involved.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from content import text
from gateway_load import Talk, Workload
from xxhash import xxh3_128

from holdwater.core.records import ModelUsage
from holdwater.dialect import DIALECTS
from holdwater.gateway.recorder import CallEnding
from holdwater.gateway.server import Gateway
from holdwater.gateway.sessions import Session
from holdwater.gateway.upstreams.http import HttpUpstream
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog

PIECE = 64 * 1024  # approximate bytes per read from a socket
SMALL = 2_000  # bytes of another agent's request
TOOLS = 20_000  # bytes of the constants after the messages
REPLY = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"%s"}}]}' % (b"word " * 100)


async def recording(size: int, turns: int, place: Path) -> float:
    """Return the median seconds to record a turn of a conversation of `size` bytes, over `turns` turns."""
    talk = Talk("recorded", Workload("", size, alone=1, at_once=1, each=1))
    other = Talk("another", Workload("", SMALL, alone=1, at_once=1, each=1))
    tools = b',"tools":["%s"]}' % text("tools", TOOLS).encode()
    logs = [AttemptLog(RunDirectory(place), attempt) for attempt in (1, 2)]
    gateway = Gateway(HttpUpstream("http://127.0.0.1:9"), place / "unused")  # it never listens
    took: list[float] = []  # bound: the turns
    async with gateway.open_session(1, logs[0]) as session, gateway.open_session(2, logs[1]) as beside:
        for _ in range(turns + 1):
            content = talk.body()[:-1] + tools
            # A worker serves other agents between two large calls; making the body is not part of its work.
            await _record(beside, bytearray(other.body()))
            body = _arrived(content)
            begun = time.perf_counter()
            await _record(session, body)
            took.append(time.perf_counter() - begun)
    for log in logs:
        log.close()
    return median(took[1:])  # in the first turn everything is new


async def _record(session: Session, body: bytearray) -> None:
    """Record an exchange as `relay.py` does."""
    form = DIALECTS["chat"]
    reading = await session.read(form, body)
    delta = await session.find_delta(form, reading, reading.head, reading.head)
    call = session.threads.begin(session.threads.tick(), delta, len(body), has_tools=False)
    session.write(delta, CallEnding(200, REPLY, ModelUsage(requests=1, output_tokens=100)), time.time(), call)


def hashing(size: int, turns: int) -> float:
    """Return the seconds of one pass of the recorder's hash over `size` bytes, to compare machines."""
    content = text("hashed", size).encode()
    took: list[float] = []  # bound: the turns
    for _ in range(turns):
        body = _arrived(content)
        begun = time.perf_counter()
        xxh3_128(body).digest()
        took.append(time.perf_counter() - begun)
    return median(took)


def _arrived(content: bytes) -> bytearray:
    """Return a body as the gateway reads it: in pieces from a socket, each copied into place."""
    pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    body = bytearray(len(content))
    at = 0
    for piece in pieces:
        body[at : at + len(piece)] = piece
        at += len(piece)
    return body
