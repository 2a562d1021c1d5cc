"""The interface of a dialect: one class that has all knowledge about an API in which models are called.

A dialect interprets bytes; it neither sends nor records. A new dialect is one module with a subclass of
`Dialect`, and one line in the table of `dialect/__init__.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from ..core.records import ModelUsage
from .conversion import (
    CompletionContent,
    ReplyContext,
    convert_messages,
    convert_tools,
    list_text_tools,
    make_completion,
    pick_token_fields,
)
from .message import CommonMessage, ModelReply, as_list, merge_messages, to_part
from .sse import ChunkStream, EventStream
from .stream_writer import StreamWriter
from .untranslated_fields import FieldRule, pick_extensions

T = TypeVar("T", bound=msgspec.Struct)

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
# Keys that a client fills anew at each start, or that change the form of the answer and not its content.
VOLATILE_KEYS = frozenset(
    {"client_metadata", "metadata", "prompt_cache_key", "safety_identifier", "user"}
    | {"stream", "stream_options"}
)
_STAINLESS = "x-stainless-"  # the providers' client libraries describe themselves in these
_ALWAYS = {"accept", "content-type", "user-agent", "idempotency-key", "x-request-id", "x-client-request-id"}


class RequestTarget(NamedTuple):
    """The address of a call: the path below the upstream's base URL, and the query without a key."""

    path: str
    query: str = ""

    @property
    def path_and_query(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


class PathMatch(NamedTuple):
    """A path of a dialect."""

    path: str  # below the upstream's base URL
    counts: bool = False  # the call counts the tokens of a request


class ReplyFormat(StrEnum):
    """The form in which a reply is sent."""

    WHOLE = "whole"
    EVENTS = "events"
    ARRAY = "array"  # Google's chunks, without server-sent events


class AdaptedRequest(NamedTuple):
    """The parts of a request that decide how it is forwarded."""

    place: RequestTarget
    changes: dict[str, Raw]  # the keys that change on the way upstream
    recorded_keys: Mapping[str, Raw] = MappingProxyType({})  # keys for the record that the body does not have
    wants_usage: bool = True


class ParsedReply(NamedTuple):
    """A reply in one piece."""

    usage: ModelUsage
    error: Any  # an error inside a 200, if any
    reply: bytes | None = None  # for the record, if it differs from the body
    chunks: bytes | None = None  # the original body, if it is a JSON array of chunks


class ChainName(NamedTuple):
    """The name of the reply or conversation that a request continues."""

    name: str
    stays: bool  # later requests use the same name


class ChainRules(NamedTuple):
    """How a dialect names the reply or conversation that a request continues."""

    before: Callable[[Mapping[str, Raw]], ChainName | None]
    name: Callable[[bytes], str]  # the name of a reply; empty: it has none
    reply_messages: Callable[[bytes], list[bytes]]  # the messages that a reply adds to the conversation
    item: Callable[[bytes], str]  # the name of a message; empty: it has none
    reference: Callable[[bytes], str]  # the name of the earlier message that a message refers to; or empty
    key: str = ""  # of a request: the name of the reply that it continues
    reference_mark: bytes = b""  # bytes that a request with such references contains


class KnownHeaders(NamedTuple):
    """The client headers that go upstream: names in lower case, and prefixes of further names."""

    names: frozenset[str]
    beginnings: tuple[str, ...]


def know_headers(names: set[str], *beginnings: str) -> KnownHeaders:
    """Return the headers of all dialects and those given."""
    return KnownHeaders(frozenset(_ALWAYS | names), (_STAINLESS, *beginnings))


class ProviderVariables(NamedTuple):
    """The maker of a dialect, and the environment variables from which its clients take URL and key."""

    default_url: str
    url: str
    keys: tuple[str, ...]
    bearer: str = ""  # the variable of a key that is sent as a bearer token
    other_urls: tuple[str, ...] = ()
    versioned: bool = False  # its clients take a base URL that ends in `/v1`


class Dialect:
    """One API dialect. It is stateless; its streams are not.

    The methods that raise `NotImplementedError` are the ones that each dialect must have. `head` is a request
    without its messages.
    """

    name: str
    path: str  # of a call, below the upstream's base URL
    provider: ProviderVariables
    known_headers: KnownHeaders
    key_header: str | None = None  # None: the key is a bearer token
    keep_alive: bytes = KEEP_ALIVE_COMMENT  # a stream event without meaning

    key: str = "messages"  # of the messages in a request
    optional: bool = False  # the key may be missing, or hold a text, which is one user message
    auxiliary: bool = False  # its calls are not turns and belong to no conversation
    counted_dialect: str = ""  # the dialect of the requests whose tokens it counts
    model_in_path: bool = False  # requests name the model in their path
    uses_run_model: bool = True  # False: requests keep their own model, which has another price
    merges_items: bool = False  # adjacent assistant messages of a request are parts of one
    system_keys: tuple[str, ...] = ()  # the keys of prompts outside the list of messages
    reply_key: str = "choices"  # only replies of this dialect have it, not those of Chat Completions
    count_key: str = "input_tokens"  # in the reply to a token count
    chaining: ChainRules | None = None
    choice_key: str = "tool_choice"  # where a request chooses a tool
    known_keys: frozenset[str] = frozenset()  # of a request, beside those in `untranslated`
    untranslated: tuple[FieldRule, ...] = ()  # what a server of another dialect cannot get

    @property
    def upstream_dialect(self) -> str:  # that an upstream must support
        return self.counted_dialect or self.name

    # Requests on their way upstream

    def match_path(self, path: str) -> PathMatch | None:
        """Return the match if `path` is one of this dialect; one `/v1` too many or too few still works."""
        return PathMatch(self.path) if re.fullmatch(rf"(?:/v1)*/{re.escape(self.path)}", path) else None

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        """Return whether a request with an unknown path comes from a client of this dialect."""
        return False

    def strip_transient(self, message: bytes) -> bytes:
        """Return a message without the parts that come and go while it stays the same."""
        return message

    def strip_generated(self, message: bytes) -> bytes:
        """Return a message without the parts that a client generates anew at each start."""
        return message

    @property
    def has_transient(self) -> bool:
        return type(self).strip_transient is not Dialect.strip_transient

    @property
    def has_generated(self) -> bool:
        return type(self).strip_generated is not Dialect.strip_generated

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        """Return the request as forwarded, with `model` imposed if set; raise `msgspec.MsgspecError`."""
        return AdaptedRequest(place, impose_model(head, model))

    def read_model(self, head: Mapping[str, Raw], place: RequestTarget) -> str:
        """Return the model that a request names; empty if it names none. It raises nothing."""
        try:
            return msgspec.json.decode(head.get("model", b'""'), type=str)
        except msgspec.MsgspecError:
            return ""

    def impose_sampling(self, head: Mapping[str, Raw], sampling: Mapping[str, Any]) -> dict[str, Raw]:
        """Return the keys of a request that change.

        Common names are those of Chat Completions: `temperature`, `top_p`, `top_k`, `max_tokens`, `seed`. Any
        other key goes into the request unchanged.
        """
        named = {
            self.name_parameter(head, key): msgspec.json.encode(value) for key, value in sampling.items()
        }
        return {key: Raw(raw) for key, raw in named.items() if bytes(head.get(key, b"")) != raw}

    def name_parameter(self, head: Mapping[str, Raw], key: str) -> str:
        """Return the dialect's own name of a sampling parameter."""
        return key

    def read_format(self, head: Mapping[str, Raw], place: RequestTarget) -> ReplyFormat:
        """Return the reply format that a request asks for."""
        return ReplyFormat.EVENTS if bytes(head.get("stream", b"")) == b"true" else ReplyFormat.WHOLE

    def read_context(self, body: bytes, path: str) -> ReplyContext:
        """Return the parts of a request that its reply depends on; raise one of `DECODE_ERRORS`."""
        shape = msgspec.json.decode(body, type=_RequestShape)
        return self.make_context({"model": shape.model, "tools": shape.tools}, path)

    def make_context(self, request: Mapping[str, Any], path: str) -> ReplyContext:
        """Return the parts of a decoded request that its reply depends on."""
        model = request.get("model")
        return ReplyContext(model if isinstance(model, str) else "", list_text_tools(request.get("tools")))

    # Replies on their way to the client

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        raise NotImplementedError

    def read_reply(self, body: bytes) -> ParsedReply:
        """Parse a reply; raise one of `DECODE_ERRORS` if it is invalid."""
        check_utf8(body)
        reply = msgspec.json.decode(body, type=_ReplyShape)
        return ParsedReply(self.count_usage(reply.usage), reply.error)

    def recognizes_reply(self, body: bytes) -> bool:
        """Whether a reply in one piece can be of this dialect. Decoding it would cost more than the rest."""
        return self.auxiliary or f'"{self.reply_key}"'.encode() in body

    def count_usage(self, counts: Any) -> ModelUsage:
        """Return the usage that the `usage` of a reply reports."""
        raise NotImplementedError

    def stream(self, asked: AdaptedRequest) -> EventStream:
        raise NotImplementedError

    def render_stream(self, reply: bytes) -> list[bytes]:
        """Return the events of a stream equal to `reply`; raise one of `SHAPE_ERRORS`.

        Each text comes in one piece, between the events that the provider itself puts around it. Values are
        copied as bytes, so that unknown fields survive.
        """
        raise NotImplementedError

    def render_model(self, model: str) -> dict[str, Any]:
        """Return the description of a model."""
        return {"id": model, "object": "model", "created": 0, "owned_by": "upstream"}

    def render_models(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the list of models, each from `render_model`."""
        return {"object": "list", "data": models}

    # Recorded requests and replies, decoded. Unknown content is rendered as JSON and raises nothing.

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        """Parse one message of a request; it may be several common messages."""
        raise NotImplementedError

    def parse_system(self, head: dict[str, Any]) -> Iterator[CommonMessage]:
        """Parse the prompts outside the list of messages."""
        return iter(())

    def parse_tools(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the tools in the Chat Completions format."""
        return iter(())

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        raise NotImplementedError

    def split_choices(self, reply: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each choice: its message as a client sends it back, and a reply with this choice alone."""
        raise NotImplementedError

    def parse_messages(self, items: list[Any]) -> list[CommonMessage]:
        """Parse the messages of a request."""
        messages: list[CommonMessage] = []
        for item in items:
            if isinstance(item, dict):
                messages += self.parse_message(item)
            else:
                messages.append(CommonMessage(role="unknown", parts=(to_part(item),)))
        return list(merge_messages(messages)) if self.merges_items else messages

    # Conversion from and to Chat Completions, the form that policies and trainers use

    def request_to_chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a request in Chat Completions; parts without an equivalent are left out."""
        messages = [*self.parse_system(request), *self.parse_messages(as_list(request.get(self.key)))]
        converted = {
            "model": request.get("model"),
            "messages": convert_messages(messages),
            "tools": convert_tools(request, self.parse_tools),
            **self.convert_options(request),
        }
        return {key: value for key, value in converted.items() if value is not None and value != []}

    def convert_options(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request in Chat Completions; None: not set."""
        return {}

    def pick_extensions(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request that the dialect does not have, such as those of one server."""
        return pick_extensions(request, self.known_keys, self.untranslated)

    def reply_from_chat(self, completion: dict[str, Any], context: ReplyContext) -> bytes:
        """Return a `chat.completion` as a reply. Missing ids are generated.

        Other dialects have no field for token ids, log probabilities and the policy's version. These go to
        the top of the reply, under their Chat Completions names: see `reply_tokens.parse_tokens`.
        """
        content = CompletionContent(completion, context)
        return msgspec.json.encode({**self.render_completion(content), **pick_token_fields(completion)})

    def render_completion(self, content: CompletionContent) -> dict[str, Any]:
        raise NotImplementedError

    def write_stream(self, context: ReplyContext) -> StreamWriter:
        """Return the writer of a stream whose content arrives in Chat Completions."""
        raise NotImplementedError

    # The dialect of a server to which requests of other dialects are translated

    translates: bool = False  # it has the methods below
    own_headers: Mapping[str, str] = MappingProxyType({})  # that its requests need
    # Fields of an assistant's message in Chat Completions, which the server gets back as they are.
    thought_fields: tuple[str, ...] = ()
    hidden_thoughts: tuple[str, ...] = ()  # the ones among them that no agent can read

    def request_from_chat(self, request: dict[str, Any], messages: list[CommonMessage]) -> dict[str, Any]:
        """Return a request of Chat Completions, whose parsed messages these are."""
        raise NotImplementedError

    def reply_to_chat(self, body: bytes) -> dict[str, Any]:
        """Return a reply as a `chat.completion`; raise one of `DECODE_ERRORS`."""
        reply, usage = self.parse_reply(msgspec.json.decode(body)), self.read_reply(body).usage
        return make_completion(reply, usage)

    def open_chunks(self) -> ChunkStream:
        """Return the reader of a stream whose content goes on in Chat Completions."""
        raise NotImplementedError

    def append_text(self, reply: dict[str, Any], text: str) -> None:
        """Add a text to a decoded reply of the model, whose calls and other parts stay as they are."""
        raise NotImplementedError


class _RequestShape(msgspec.Struct):
    model: Any = None
    tools: Any = None


class _ReplyShape(msgspec.Struct):
    usage: Any = None
    error: Any = None


def check_utf8(body: bytes) -> None:
    """Raise `UnicodeDecodeError` if `body` is not UTF-8: msgspec skips strings that it does not decode."""
    if not body.isascii():
        body.decode()


def read_counts(counts: Any, shape: type[T]) -> T:
    """Return the token counts of a reply; if they are missing or not in this dialect, they are unknown."""
    try:
        return msgspec.convert(counts, shape)
    except msgspec.ValidationError:
        return shape()


def impose_model(head: dict[str, Raw], model: str | None) -> dict[str, Raw]:
    """Return the change that imposes `model`, if one is needed."""
    if model is None:
        return {}
    name = msgspec.json.encode(model)
    return {} if bytes(head.get("model", b"")) == name else {"model": Raw(name)}
