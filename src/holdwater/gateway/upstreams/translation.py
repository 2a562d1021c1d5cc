"""The upstream for servers that understand one dialect alone: it translates the calls of the others.

Requests are converted whole, replies as they arrive: no stream waits for its end. The dialects know how;
`http.py` sends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import msgspec
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import MiB
from ...core.summary import LEFT_OUT
from ...dialect import CHAT, DIALECTS, list_conversations, list_server_dialects
from ...dialect.conversion import ReplyContext
from ...dialect.interface import Dialect, ReplyFormat, know_headers
from ...dialect.message import DECODE_ERRORS, SHAPE_ERRORS, as_dict, as_list
from ...dialect.untranslated_fields import find_untranslated
from . import Upstream, UpstreamAnswer, UpstreamCall
from .complete_reply import CompleteReply, content_type, render_reply
from .kept_thoughts import KeptThoughts, ReadReplies
from .request_conversion import ReadConversation, convert_request
from .retry import failure_inside, parse_error

LARGEST_REPLY = 64 * MiB
_COMMON_HEADERS = know_headers(set()).names
NoteEvent = Callable[[str, str], None]
"""Receives the kind of an event and a sentence about it."""


class TranslationTerms(NamedTuple):
    """What a translation needs beside the server: the record of an attempt, and a place for its events."""

    read_conversation: ReadConversation
    read_replies: ReadReplies
    note: NoteEvent


class TranslatedUpstream:
    """Implements `Upstream`: sends the calls that a server of `target` understands unchanged."""

    def __init__(self, inner: Upstream, target: Dialect, terms: TranslationTerms) -> None:
        self._inner = inner
        self._thoughts = KeptThoughts(target, terms.read_replies)
        self._note = terms.note
        self._noted: set[tuple[str, str]] = set()  # dialect and field; bound: the rules
        self._target = target
        self._read_conversation = terms.read_conversation
        self._understood = list_server_dialects(target.name) & inner.dialects
        self.dialects = self._understood | (list_conversations() if self._understood else frozenset())
        self.counting = inner.counting & self._understood

    def send(self, call: UpstreamCall) -> AbstractAsyncContextManager[UpstreamAnswer]:
        return self._inner.send(call) if call.dialect in self._understood else self.translate(call)

    @asynccontextmanager
    async def translate(self, call: UpstreamCall) -> AsyncIterator[UpstreamAnswer]:
        """Send a call in the server's dialect."""
        check = TranslationCheck(DIALECTS[call.dialect], self._target.name)
        request, wanted = await convert_request(call, self._read_conversation, check)
        check.check_choice(request)
        self._note_left_out(check)
        await self._thoughts.restore(call.attempt, as_list(request.get("messages")))
        request.pop("stream_options", None)
        request["stream"] = call.reply_format is ReplyFormat.EVENTS or None
        call.body.replace((self._render_request(request, check.extensions),))
        target = self._target
        headers = {name: value for name, value in call.headers.items() if name.lower() in _COMMON_HEADERS}
        headers |= target.own_headers
        translated = call._replace(path=target.path, headers=headers, dialect=target.name)
        async with self._inner.send(translated) as answer:
            take = partial(self._thoughts.take, call.attempt)
            yield TranslatedAnswer(answer, target, DIALECTS[call.dialect], call.reply_format, wanted, take)

    def _note_left_out(self, check: TranslationCheck) -> None:
        """Note the fields that are left out of calls, each once."""
        name = check.dialect.name
        fields = [field for field in check.left_out if (name, field) not in self._noted]
        if fields:
            self._noted.update((name, field) for field in fields)
            listed = ", ".join(f"`{field}`" for field in fields)
            self._note(
                LEFT_OUT, f"calls in `{name}` go to the server as `{self._target.name}` without {listed}"
            )

    def _render_request(self, request: dict[str, Any], extensions: dict[str, Any]) -> bytes:
        messages = [] if self._target is CHAT else CHAT.parse_messages(as_list(request.get("messages")))
        try:
            made = self._target.request_from_chat(request, messages)
        except SHAPE_ERRORS as error:
            message = f"the request cannot be translated to `{self._target.name}`: {error}"
            raise ModelFailed(message, kind="invalid", again=False) from None
        whole = {**extensions, **made}
        return msgspec.json.encode({key: value for key, value in whole.items() if value is not None})


class TranslationCheck:
    """Checks one request: refuses it, or collects what is left out. Call it with the agent's request."""

    def __init__(self, dialect: Dialect, server: str) -> None:
        self.dialect = dialect
        self._server = server
        self.left_out: dict[str, None] = {}  # fields, in order
        self.extensions: dict[
            str, Any
        ] = {}  # options that the dialect does not have: they may be the server's

    def __call__(self, request: dict[str, Any]) -> None:
        for rule in find_untranslated(request, self.dialect.untranslated, self._server):
            if rule.refused:
                self._refuse(rule.field)
            self.left_out[rule.field] = None
        self.extensions = self.dialect.pick_extensions(request)

    def check_choice(self, request: dict[str, Any]) -> None:
        """Refuse the choice of a tool that the converted request does not have."""
        choice = request.get("tool_choice")
        tools = [as_dict(as_dict(tool).get("function")).get("name") for tool in as_list(request.get("tools"))]
        if choice == "required" and not tools:
            self._refuse(self.dialect.choice_key)
        if isinstance(choice, dict) and as_dict(choice.get("function")).get("name") not in tools:
            self._refuse(self.dialect.choice_key)

    def _refuse(self, field: str) -> NoReturn:
        message = f"`{field}` cannot be translated for the server, whose dialect is `{self._server}`"
        raise ModelFailed(message, kind="invalid", again=False)


class TranslatedAnswer:
    """Implements `UpstreamAnswer`: the answer of a server, in the dialect of the agent."""

    def __init__(
        self,
        answer: UpstreamAnswer,
        target: Dialect,
        dialect: Dialect,
        manner: ReplyFormat,
        wanted: ReplyContext,
        take_thoughts: Callable[[dict[str, Any]], None],
    ) -> None:
        self._answer = answer
        self._target = target
        self._dialect = dialect
        self._manner = manner
        self._wanted = wanted
        self._take_thoughts = take_thoughts
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
        self._take_thoughts(reply)
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
            reply = self._target.reply_to_chat(self.original)
            self._take_thoughts(reply)
            yield b"".join(writer.finish(reply))
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
