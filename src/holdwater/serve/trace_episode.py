"""The messages of the verifiers protocol: decodes requests to orders, and encodes rollouts as episodes.

It does no I/O: `verifiers_server.py` receives and sends, `conversation/trace_graph.py` reads conversations.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ..conversation.trace_graph import TraceGraph
from ..core.errors import RequestRefused
from ..core.input_checks import find_url_problem
from ..core.records import FailureOrigin, Instance, MiB
from ..core.serving_protocol import LONGEST_KEY, ModelChoice, ModelSource, Order, Rollout, TrajectoryForm
from ..version import __version__

KEY_PREFIX = "verifiers."  # of the keys of orders that came by this protocol
TRAIN = "train"  # the kind of client that samples tokens to train on
# A trainer needs them, and its own client would tokenize and ask for them by itself.
TOKEN_OPTIONS = {"logprobs": True, "return_token_ids": True}

REPLY, DELTA = b"reply", b"delta"  # the kinds of messages to a client
PIECE = 1 * MiB  # of a trace; larger only if one message is
TIMEOUT = "timeout"
_STOPS = {"requests": "max_turns", "tokens": "max_total_tokens", "output_tokens": "max_output_tokens"}

_ERROR_TYPES = {  # the names that the package has for the origin of a failure
    FailureOrigin.AGENT: "HarnessError",
    FailureOrigin.LIMIT: "HarnessError",
    FailureOrigin.MODEL: "ProviderError",
    FailureOrigin.SANDBOX: "SandboxError",
    FailureOrigin.RESOURCE: "SandboxError",
    FailureOrigin.IMAGE: "SandboxError",
    FailureOrigin.GRADE: "TaskError",
}


class EndpointConfig(msgspec.Struct):
    """The model server that the client names for a rollout."""

    base_url: str
    type: str = "eval"
    api_key_var: str = ""
    headers: dict[str, str] = {}
    headers_from_env: dict[str, str] = {}


class RunRequest(msgspec.Struct):
    """One rollout of one task."""

    task_data: dict[str, Any]
    client: EndpointConfig
    model: str
    sampling: dict[str, Any] = {}


class CancelRequest(msgspec.Struct):
    request_id: str


def decode_request(payload: bytes, kind: type[Any]) -> Any:
    """Decode a request; raise `RequestRefused`, which names the invalid field."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (ValueError, OverflowError, RecursionError) as error:  # includes msgspec's own errors
        raise RequestRefused("invalid", f"the request cannot be read: {error}") from None


def name_order(request_id: str) -> str:
    """Return the key of the order for a request; raise `RequestRefused` if the id cannot be a key."""
    key = KEY_PREFIX + request_id
    if not request_id or len(key) > LONGEST_KEY or not request_id.isprintable():
        raise RequestRefused("invalid", f"the request's id cannot be a key: {request_id[:80]!r}")
    return key


def make_order(key: str, request: RunRequest, instance: str | Instance) -> Order:
    """Return the order for a request; raise `RequestRefused` for parts that cannot be kept."""
    endpoint = request.client
    if problem := find_url_problem(endpoint.base_url):
        raise RequestRefused("invalid", f"`client.base_url` {problem}")
    if headers := {**endpoint.headers, **endpoint.headers_from_env}:
        names = ", ".join(sorted(headers))
        raise RequestRefused("invalid", f"`client.headers` are not passed on: {names[:200]}")
    sampling = {name: value for name, value in request.sampling.items() if value is not None}
    beyond = sampling.pop("extra_body", {})
    if not isinstance(beyond, dict):
        raise RequestRefused("invalid", "`sampling.extra_body` is not an object")
    return Order(
        key=key,
        instance=instance,
        model=ModelChoice(source=ModelSource.ENDPOINT, url=endpoint.base_url, name=request.model),
        sampling={**beyond, **sampling, **(TOKEN_OPTIONS if endpoint.type == TRAIN else {})},
        trajectory=TrajectoryForm.REFERENCE,
    )


def encode_reply(**fields: Any) -> bytes:
    return _encode({"success": True, "error": None, **fields})


def encode_refusal(message: str) -> bytes:
    """Return the reply that raises an exception with this message in the client."""
    return _encode({"success": False, "error": message})


def encode_episode(
    task: dict[str, Any], rollout: Rollout, graphs: Sequence[TraceGraph], context: dict[str, Any]
) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of the messages with a rollout: its traces in pieces, and the reply at last.

    `context` has the names that are the same for all rollouts of a server, and under `scores` the trace of
    the agent as a suite of verifiers has scored it. A client puts the pieces of a trace together by its id,
    which is new each time: pieces that were sent before a kill do no harm.
    """
    described = {**describe_task(task), **_pick(context["scores"].get("task", {}), "type", "key", "hash")}
    summaries: list[dict[str, Any]] = []
    for graph in graphs:
        trace = uuid.uuid4().hex
        summaries.append({"id": trace, "nodes": len(graph.nodes), "calls": len(graph.calls)})
        head = {"version": 1, "id": trace, "verifiers": {"version": f"holdwater {__version__}"}}
        opening = {"trace": trace, "open": {**head, "task": described}, "calls": graph.calls}
        yield DELTA, _encode({**opening, "set": _describe_trace(rollout, graph, context)})
        for piece in _cut_pieces(graph.nodes):
            yield DELTA, b"\x82" + _encode("trace") + _encode(trace) + _encode("nodes") + piece
    failed = rollout.reward is None and rollout.failure is not None
    episode = {
        "env": {"id": context["suite"]},
        "task": described,
        "ok": rollout.reward is not None,
        "errors": [_describe_failure(rollout)] if failed else [],
    }
    yield REPLY, encode_reply(head=episode, traces=summaries)


def _cut_pieces(nodes: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    """Yield lists of nodes as msgpack, each of about `PIECE` bytes."""
    piece: list[bytes] = []  # bound: PIECE, and one node
    for node in nodes:
        piece.append(_encode(node))
        if sum(map(len, piece)) >= PIECE:
            yield _join_list(piece)
            piece = []
    if piece:
        yield _join_list(piece)


def _join_list(items: Sequence[bytes]) -> bytes:
    return b"\xdd" + len(items).to_bytes(4, "big") + b"".join(items)


def describe_task(task: dict[str, Any]) -> dict[str, Any]:
    """Return the task as a trace has it. Trainers compare key and hash with those of their own task."""
    digest = hashlib.sha256(json.dumps(_drop_missing(task), sort_keys=True).encode()).hexdigest()
    return {"type": "Task", "data": task, "key": digest, "hash": digest}


def _drop_missing(value: Any) -> Any:
    """Return the data without fields that are None, as the package does before it hashes them."""
    if isinstance(value, dict):
        return {name: _drop_missing(item) for name, item in value.items() if item is not None}
    return [_drop_missing(item) for item in value] if isinstance(value, list) else value


def _describe_trace(rollout: Rollout, graph: TraceGraph, context: dict[str, Any]) -> dict[str, Any]:
    own = not graph.name  # of the agent itself, not of a child attempt
    scores = context["scores"] if own else {}
    origin = {
        "run": context["run"],
        "instance": rollout.instance,
        "attempt": rollout.attempt,
        "outcome": rollout.outcome,
        "detail": rollout.detail,
    }
    scored = rollout.reward is not None
    failure = rollout.failure
    return {
        "agent": {
            "config": {"harness": {"id": context["agent"]}, "runtime": {"type": "subprocess"}},
            "name": graph.name or "agent",
            "trainable": own,
        },
        "tools": graph.tools,
        "rewards": {"reward": {"score": rollout.reward, "weight": 1.0}} if own and scored else {},
        "metrics": dict(rollout.metrics) if own else {},
        "info": {**scores.get("info", {}), "holdwater": origin},
        **_pick(scores, "rewards", "metrics"),
        "is_completed": True,
        "ok": scored,
        "stop_condition": _name_stop(rollout),
        "is_timeout": failure is not None and failure.kind == TIMEOUT,
        "errors": [] if scored or failure is None else [_describe_failure(rollout)],
        "timing": _describe_times(rollout),
    }


def _pick(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: record[name] for name in names if name in record}


def _name_stop(rollout: Rollout) -> str:
    failure = rollout.failure
    if failure is None:
        return "agent_completed"
    if failure.kind == TIMEOUT:
        return "agent_timeout"
    if rollout.reward is None:
        return f"{_ERROR_TYPES.get(failure.where, '').removesuffix('Error').lower()}_error".removeprefix("_")
    return _STOPS.get(failure.kind, f"{failure.where}_{failure.kind}")


def _describe_failure(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    assert failure is not None
    message = f"{failure.message}; {failure.hint}" if failure.hint else failure.message
    return {"type": _ERROR_TYPES.get(failure.where, "RolloutError"), "message": message}


def _describe_times(rollout: Rollout) -> dict[str, Any]:
    """Return the phases as spans that end now: their lengths are measured, their places are not."""
    times = rollout.times
    end = time.time()
    scoring = end - times.grading
    agent = scoring - times.acting
    setup = agent - times.setup
    return {
        "start": setup,
        "setup": {"start": setup, "end": agent},
        "agent": {"start": agent, "end": scoring},
        "scoring": {"start": scoring, "end": end},
    }


_encode = msgspec.msgpack.Encoder().encode
