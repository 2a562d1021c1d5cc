"""Measures results with tokens: bytes a token on the wire, and the CPU time to build and to unpack them.

    python benchmarks/token_results.py [--quick] [--json]

One rollout of 100 turns with 64,000 tokens, each turn with the whole prompt in its reply, as vLLM returns it.
It measures; it asserts nothing.
"""

from __future__ import annotations

import array
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import table
from table import Row, at_most, say

from holdwater.conversation.nodes import build_nodes
from holdwater.conversation.trajectory import ExchangeTree
from holdwater.core.exchange import Exchange
from holdwater.core.serving_protocol import MessageNode
from holdwater.core.token_sequences import PackedSequence, SequencePacking, unpack_sequences
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog, segment_path

T = TypeVar("T")

TURNS, TOKENS = 100, 64_000
VOCABULARY = 150_000
LEAST_BYTES = 8  # of an id and a log probability


def main() -> None:
    options = table.options(__doc__ or "")
    turns = TURNS // 10 if options.quick else TURNS
    tokens = TOKENS * turns // TURNS
    with tempfile.TemporaryDirectory() as place:
        directory = RunDirectory.create(Path(place) / "run")
        say(f"{turns} turns of {tokens} tokens")
        as_sent = record(directory, turns, tokens)
        rows = measure(directory, tokens, as_sent)
    if options.peers:
        rows.append(Row("not run", "needs their servers", who="peers"))
    table.show(rows, json=options.json)


def record(directory: RunDirectory, turns: int, tokens: int) -> int:
    """Write the exchanges of one attempt; return the bytes of prompts and replies as ids and numbers."""
    chance, log = random.Random(0), AttemptLog(directory, 1)
    messages: list[dict[str, str]] = []
    ids: list[int] = []
    each, as_sent = tokens // (2 * turns), 0
    for turn in range(turns):
        ids += [chance.randrange(VOCABULARY) for _ in range(each)]
        reply = [chance.randrange(VOCABULARY) for _ in range(each)]
        logprobs = [array.array("f", [-chance.expovariate(1.0)])[0] for _ in reply]
        known = max(0, len(messages) - 1)  # the messages of the request before
        messages += [{"role": "user", "content": f"result {turn} " * 20}]
        answer = make_reply(turn, ids, reply, logprobs)
        as_sent += len(msgspec.msgpack.encode((ids, reply, logprobs)))
        log.append(
            Exchange(
                number=turn + 1,
                parent=turn or None,
                keep=known,
                append=tuple(msgspec.Raw(msgspec.json.encode(new)) for new in messages[known:]),
                head=None if turn else msgspec.Raw(b'{"model":"m"}'),
                reply=msgspec.Raw(msgspec.json.encode(answer)),
                status=200,
                version=str(turn // 10),
            )
        )
        messages += [answer["choices"][0]["message"]]
        ids += reply
    log.close()
    return as_sent


def make_reply(turn: int, prompt: list[int], reply: list[int], logprobs: list[float]) -> dict[str, Any]:
    content = [{"token": str(token), "logprob": value} for token, value in zip(reply, logprobs, strict=True)]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": f"call {turn} " * 20},
        "finish_reason": "stop",
        "token_ids": reply,
        "logprobs": {"content": content},
    }
    return {"object": "chat.completion", "prompt_token_ids": prompt, "choices": [choice]}


def measure(directory: RunDirectory, tokens: int, as_sent: int) -> list[Row]:
    tree = ExchangeTree(directory, 1)
    nodes, nodes_time = clock(lambda: list(build_nodes(tree)))
    packed, packing_time = clock(lambda: pack(nodes))
    wire = msgspec.msgpack.encode(packed)
    received = msgspec.msgpack.decode(wire, type=tuple[PackedSequence, ...])
    sequences, unpack_time = clock(lambda: unpack_sequences(received))
    assert sum(map(len, sequences)) == tokens
    return [
        at_most("bytes a token, packed, msgpack", len(wire) / tokens, 12, "bytes"),
        at_most("bytes a token, packed, JSON", len(msgspec.json.encode(packed)) / tokens, 12, "bytes"),
        Row("of these, ids and log probabilities at least", LEAST_BYTES / 2 + LEAST_BYTES / 4, "bytes"),
        Row("the packed result", round(len(wire) / 1e6, 2), "MB"),
        Row("nodes with deltas, with their texts", round(len(msgspec.msgpack.encode(nodes)) / 1e6, 2), "MB"),
        Row("ids with whole prompts, as replies have them", round(as_sent / 1e6, 1), "MB"),
        Row("the segment on disk", round(segment_path(directory, 1).stat().st_size / 1e6, 1), "MB"),
        Row("server: read the record and build nodes", round(1000 * nodes_time), "CPU ms"),
        Row("server: pack", round(1000 * packing_time, 1), "CPU ms"),
        Row("client: unpack", round(1000 * unpack_time, 1), "CPU ms"),
    ]


def pack(nodes: list[MessageNode]) -> tuple[PackedSequence, ...]:
    packing = SequencePacking()
    for node in nodes:
        packing.add(node)
    return packing.build()


def clock(work: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


if __name__ == "__main__":
    main()
