"""The upstream that asks a server for token ids and log probabilities, in the way that the server has.

The request changes on its way to the server only: the record keeps that of the agent. Only calls in Chat
Completions can ask; `translation.py` makes those of other dialects. `dialect/reply_tokens.py` reads replies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from ...core.errors import ModelFailed
from ...core.records import MiB
from ...core.token_sequences import TokenServer
from ...dialect import CHAT
from ...dialect.interface import ReplyFormat
from ...dialect.message import DECODE_ERRORS
from . import Upstream, UpstreamAnswer, UpstreamCall
from .complete_reply import CompleteReply

REFUSED = frozenset({400, 422})  # statuses of a request with fields that the server does not accept
LARGEST_REPLY = 64 * MiB
_VLLM = {"logprobs": True, "return_token_ids": True}
_SGLANG = {"logprobs": True, "return_prompt_token_ids": True, "return_meta_info": True}


class TokenRequest(NamedTuple):
    """A way to ask for token ids."""

    fields: Mapping[str, Any]
    streams: bool = True  # the server returns ids in a stream, too


# The ways of each kind of server. `auto` takes the first that the server does not refuse: servers of models
# ignore the fields of others, and providers refuse them.
_WAYS: Mapping[TokenServer, tuple[TokenRequest, ...]] = MappingProxyType(
    {
        TokenServer.VLLM: (TokenRequest(_VLLM),),
        TokenServer.SGLANG: (TokenRequest(_SGLANG, streams=False),),
        TokenServer.NEMO: (TokenRequest({**_VLLM, "return_tokens_as_token_ids": True}),),
        TokenServer.AUTO: (
            TokenRequest({**_VLLM, **_SGLANG}),
            TokenRequest({**_VLLM, **_SGLANG}, streams=False),
            TokenRequest({}),
        ),
    }
)


class TokenUpstream:
    """Implements `Upstream`: adds the fields to the calls in Chat Completions."""

    def __init__(self, inner: Upstream, server: TokenServer) -> None:
        self._inner = inner
        self._ways = _WAYS[server]
        # By whether the call streams: the way that the server has accepted; bound: 2.
        self._chosen: dict[bool, TokenRequest] = {}
        self.dialects = inner.dialects

    @property
    def counting(self) -> frozenset[str]:
        return self._inner.counting

    @asynccontextmanager
    async def send(self, call: UpstreamCall) -> AsyncIterator[UpstreamAnswer]:
        if call.dialect != CHAT.name:
            async with self._inner.send(call) as answer:
                yield answer
            return
        body, streams = _read_body(call), call.reply_format is ReplyFormat.EVENTS
        for way in self._list_ways(streams):
            call.body.replace((_render_body(body, way, streams),))
            async with self._inner.send(call) as answer:
                if answer.status in REFUSED and way is not self._list_ways(streams)[-1]:
                    continue  # nothing was sampled
                if answer.failure is None:
                    self._chosen[streams] = way
                yield await _render_stream(answer) if streams and not way.streams else answer
                return

    def _list_ways(self, streams: bool) -> tuple[TokenRequest, ...]:
        if streams in self._chosen:
            return (self._chosen[streams],)
        # Two ways that differ only for streams are one for a whole reply.
        fields = [way.fields for way in self._ways]
        return tuple(w for n, w in enumerate(self._ways) if streams or w.fields not in fields[:n])


def _read_body(call: UpstreamCall) -> dict[str, Raw]:
    try:
        return msgspec.json.decode(call.body.to_bytes(), type=dict[str, Raw])
    except DECODE_ERRORS as error:
        raise ModelFailed(f"the request cannot be read: {error}", kind="invalid", again=False) from None


def _render_body(body: Mapping[str, Raw], way: TokenRequest, streams: bool) -> bytes:
    changed: dict[str, Any] = {**body, **way.fields}
    if streams and not way.streams:
        changed["stream"] = False
        changed.pop("stream_options", None)
    return msgspec.json.encode(changed)


async def _render_stream(answer: UpstreamAnswer) -> UpstreamAnswer:
    """Return the answer to a call that asks for a stream, which the server has answered whole."""
    if answer.failure is not None or answer.status >= 300:
        return answer
    body = bytearray()
    async for piece in answer.pieces():
        body += piece
        if len(body) > LARGEST_REPLY:
            message = f"the upstream's reply is larger than {LARGEST_REPLY} bytes"
            raise ModelFailed(message, kind="garbage")
    return CompleteReply(bytes(body), CHAT, ReplyFormat.EVENTS, answer.version)
