"""The upstream for servers that understand one dialect alone: it translates the calls of the others.

Requests are converted whole, replies as they arrive: no stream waits for its end. The dialects know how;
`http.py` sends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import MiB
from ...dialect import CHAT, DIALECTS, list_conversations
from ...dialect.conversion import ReplyContext
from ...dialect.interface import Dialect, ReplyFormat, know_headers
from ...dialect.message import DECODE_ERRORS, SHAPE_ERRORS, as_list
from . import Upstream, UpstreamAnswer, UpstreamCall
from .complete_reply import CompleteReply, content_type, read_context, render_reply
from .request_conversion import ReadConversation, convert_request
from .retry import failure_inside, parse_error

LARGEST_REPLY = 64 * MiB
_COMMON_HEADERS = know_headers(set()).names


class TranslatedUpstream:
    """Implements `Upstream`: sends the calls of the dialects that `inner` supports unchanged."""

    def __init__(self, inner: Upstream, target: Dialect, read_conversation: ReadConversation) -> None:
        self._inner = inner
        self._target = target
        self._read_conversation = read_conversation
        self.dialects = inner.dialects | list_conversations()
        self.counting = inner.counting

    @asynccontextmanager
    async def send(self, call: UpstreamCall) -> AsyncIterator[UpstreamAnswer]:
        if call.dialect in self._inner.dialects:
            async with self._inner.send(call) as answer:
                yield answer
            return
        wanted = read_context(call)
        request = await convert_request(call, wanted, self._read_conversation)
        request.pop("stream_options", None)
        request["stream"] = call.reply_format is ReplyFormat.EVENTS or None
        call.body.replace((self._render_request(request),))
        target = self._target
        headers = {name: value for name, value in call.headers.items() if name.lower() in _COMMON_HEADERS}
        headers |= target.own_headers
        translated = call._replace(path=target.path, headers=headers, dialect=target.name)
        async with self._inner.send(translated) as answer:
            yield TranslatedAnswer(answer, target, DIALECTS[call.dialect], call.reply_format, wanted)

    def _render_request(self, request: dict[str, Any]) -> bytes:
        messages = [] if self._target is CHAT else CHAT.parse_messages(as_list(request.get("messages")))
        try:
            made = self._target.request_from_chat(request, messages)
        except SHAPE_ERRORS as error:
            message = f"the request cannot be translated to `{self._target.name}`: {error}"
            raise ModelFailed(message, kind="invalid", again=False) from None
        return msgspec.json.encode({key: value for key, value in made.items() if value is not None})


class TranslatedAnswer:
    """Implements `UpstreamAnswer`: the answer of a server, in the dialect of the agent."""

    def __init__(
        self,
        answer: UpstreamAnswer,
        target: Dialect,
        dialect: Dialect,
        manner: ReplyFormat,
        wanted: ReplyContext,
    ) -> None:
        self._answer = answer
        self._target = target
        self._dialect = dialect
        self._manner = manner
        self._wanted = wanted
        self.original: bytes | None = None
        self.status = answer.status
        self.failure = answer.failure
        self.version = answer.version
        self.waits = answer.waits
        self._streamed = manner is ReplyFormat.EVENTS and _is_stream(answer)
        kind = content_type(manner if answer.status < 300 else ReplyFormat.WHOLE)
        kept = [item for item in answer.headers.items() if item[0].lower() not in ("content-type", "etag")]
        self.headers = CIMultiDict([*kept, ("Content-Type", kind)])

    async def pieces(self) -> AsyncIterator[bytes]:
        if self._streamed:
            async for piece in self._translate_stream():
                yield piece
            return
        body = b"".join([piece async for piece in _bound_size(self._answer)])
        if self.status >= 300:
            error = parse_error(body)
            yield self._dialect.error_body(self.status, error.message or "no message", error.code or None)
            return
        translated = self._translate_whole(body)
        self.original, self.version = body, self._answer.version
        async for piece in translated.pieces():
            yield piece

    def _translate_whole(self, body: bytes) -> CompleteReply:
        try:
            error_inside = self._target.read_reply(body).error
            reply = self._target.reply_to_chat(body)
        except DECODE_ERRORS as error:
            raise ModelFailed(f"the upstream's reply is not valid JSON: {error}", kind="garbage") from None
        _check_error(error_inside)
        return CompleteReply(render_reply(reply, self._dialect, self._wanted), self._dialect, self._manner)

    async def _translate_stream(self) -> AsyncIterator[bytes]:
        stream = self._target.open_chunks()
        writer = self._dialect.write_stream(self._wanted)
        try:
            async for piece in _bound_size(self._answer):
                if events := [event for chunk in stream.read(piece) for event in writer.write(chunk)]:
                    yield b"".join(events)
                _check_error(stream.error)
                if stream.done:
                    break
            if not stream.ended:
                raise ModelFailed("the upstream's stream ended early", kind="cut")
            self.original, self.version = stream.reply(), self._answer.version
            yield b"".join(writer.finish(self._target.reply_to_chat(self.original)))
        except SHAPE_ERRORS as error:
            raise ModelFailed(
                f"the upstream's stream cannot be translated: {error}", kind="garbage"
            ) from None


def _is_stream(answer: UpstreamAnswer) -> bool:
    return answer.headers.get("Content-Type", "").lower().startswith("text/event-stream")


def _check_error(error: Any) -> None:
    """Raise `ModelFailed` for an error inside a 200."""
    if error is not None:
        found = failure_inside(error)
        failed = ModelFailed(found.message, found.hint, kind=found.kind, again=found.again, after=found.after)
        failed.where = found.where
        raise failed


async def _bound_size(answer: UpstreamAnswer) -> AsyncIterator[bytes]:
    size = 0
    async for piece in answer.pieces():
        size += len(piece)
        if size > LARGEST_REPLY:
            message = f"the upstream's reply is larger than {LARGEST_REPLY} bytes"
            raise ModelFailed(message, kind="garbage")
        yield piece
