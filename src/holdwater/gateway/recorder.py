"""Finds the new part of a request, in O(new bytes): its parent exchange, the messages kept, those appended.

The state of a conversation is a digest per message and one for the bytes up to the last message, never the
messages. `request_parser.py` parses the body, and `sessions.py` writes the record. This module does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from blake3 import blake3
from msgspec import Raw

from ..core.exchange import Exchange, HeadChanges, RepeatedRequest
from ..core.masking import mask_bytes
from ..core.prices import ModelPrice, add_cost
from ..core.records import NO_USAGE, ModelUsage
from ..dialect import CHAT, find_dialect
from ..dialect.interface import VOLATILE_KEYS, ChainName, ChainRules, Dialect
from ..dialect.message import DECODE_ERRORS
from .request_parser import (
    DIGEST_SIZE,
    BodyMark,
    Buffer,
    KnownStart,
    MalformedRequest,
    ParsedRequest,
    digest,
    hash_start,
    parse_rest,
    parse_whole,
)

_SIZE = 16  # bytes of blake3
MOST_LINKS = 4096  # exchanges of one attempt that requests can name
MOST_TIPS = 32  # conversations kept for one attempt
BILLED_KINDS = frozenset(
    {"error", "garbage", "cut", "stall"}
)  # kinds of failure in which the upstream did answer


def identify_request(dialect: str, head: Mapping[str, Raw], names: bytes) -> str:
    """Return the identity of a request with the keys `head` and the message digests `names`."""
    asked = [(key, head[key]) for key in sorted(head.keys() - VOLATILE_KEYS)]
    return blake3(mask_bytes(msgspec.json.encode([dialect, asked])) + names).hexdigest(_SIZE)


def change_head(head: Mapping[str, Raw], changes: HeadChanges) -> dict[str, Raw]:
    """Return the keys of a request with some of them changed or removed."""
    changed: dict[str, Raw | None] = {**head, **changes}
    return {key: raw for key, raw in changed.items() if raw is not None}


def make_repeated_request(delta: RequestDelta, head: Mapping[str, Raw]) -> RepeatedRequest:
    """Return the form of a request with the keys `head` in which it is looked up in a record."""

    def identify(changes: HeadChanges) -> str:
        return identify_request(delta.dialect, change_head(head, changes), delta.names)

    messages = delta.keep + len(delta.append)
    return RepeatedRequest(delta.identity, delta.dialect, messages, head, identify)


class ChainLink(NamedTuple):
    """An exchange that a request can name, and the number of messages in its own request."""

    number: int
    messages: int


class ReplyChain:
    """The names of an attempt's exchanges in one dialect; `chaining` is None if the dialect has no names."""

    def __init__(self, chaining: ChainRules | None) -> None:
        self._chaining = chaining
        self._links: dict[str, ChainLink] = {}  # bound: MOST_LINKS
        self._items: dict[str, int] = {}  # message name -> exchange whose reply has it; bound: MOST_LINKS

    def find_name(self, head: Mapping[str, Raw]) -> ChainName | None:
        """Return the name that a request with this head continues."""
        return self._chaining.before(head) if self._chaining is not None else None

    def find(self, name: ChainName | None) -> ChainLink | None:
        """Return the exchange of that name, if it is recorded."""
        return self._links.get(name.name) if name is not None else None

    def read_messages(self, reply: bytes) -> list[bytes]:
        """Return the messages that a reply adds to the conversation."""
        return self._chaining.reply_messages(reply) if self._chaining is not None else []

    def add(self, link: ChainLink, before: ChainName | None, reply: bytes) -> None:
        """Add a recorded exchange: later requests may continue its reply, or its conversation."""
        if self._chaining is None:
            return
        lasting = before.name if before is not None and before.stays else ""
        for name in filter(None, (self._chaining.name(reply), lasting)):
            self._links.pop(name, None)
            self._links[name] = link
        for name in filter(None, map(self._chaining.item, self._chaining.reply_messages(reply))):
            self._items[name] = link.number
        for known in (self._links, self._items):
            while len(known) > MOST_LINKS:
                del known[next(iter(known))]

    def resolve(self, message: bytes, read: Callable[[int], bytes]) -> bytes:
        """Return the earlier message that `message` refers to, or `message` if it is no known reference.

        `read` returns the reply of an exchange.
        """
        name = self._chaining.reference(message) if self._chaining is not None else ""
        if self._chaining is None or name not in self._items:
            return message
        said = self._chaining.reply_messages(read(self._items[name]))
        return next((item for item in said if self._chaining.item(item) == name), message)


class ConversationTip(NamedTuple):
    """The end of a recorded conversation."""

    number: int
    digests: bytes
    head: bytes  # digest of all keys except the messages
    mark: BodyMark | None
    names: bytes  # like `digests`, without the generated parts of the messages


class RequestDelta(NamedTuple):
    """The new part of a request; holds no part of the body."""

    dialect: str
    parent: int | None
    keep: int
    append: list[bytes]
    head: bytes | None
    digests: bytes
    head_digest: bytes
    mark: BodyMark | None
    names: bytes
    identity: str = ""  # see `identify_request`
    chain: ChainName | None = None
    linked: bool = False  # the parent was found by `chain`; its reply comes before `append`


class ConversationRecorder:
    """An attempt's conversations in one dialect, at most `MOST_TIPS`: the least recent is dropped first."""

    def __init__(self, dialect: Dialect = CHAT) -> None:
        self._dialect = dialect
        # By first message, latest last, so that other conversations cost nothing; bound: `MOST_TIPS`.
        self._tips: dict[bytes, list[ConversationTip]] = {}
        self._count = 0
        self._chain = ReplyChain(dialect.chaining)

    def read(self, body: Buffer) -> ParsedRequest:
        """Parse `body`; of a continued conversation, parse only the new part."""
        known = self.find(body)
        reading = self.read_rest(body, known, large=True) if known is not None else None
        return self.read_whole(body, large=True) if reading is None else reading

    def find(self, body: Buffer) -> KnownStart | None:
        """Find the latest recorded conversation that `body` continues.

        If it continues several, the latest is as good as any: the part that it lacks is parsed.
        """
        for tips in reversed(self._tips.values()):
            for tip in reversed(tips):
                mark = tip.mark
                if mark is None or not body.startswith(mark.last, mark.end - len(mark.last)):
                    continue
                before = hash_start(body, mark.end)
                if before.digest() == mark.digest:
                    return KnownStart(tip.digests, mark, before)
        return None

    def read_rest(self, body: Buffer, known: KnownStart, *, large: bool) -> ParsedRequest | None:
        """Parse the part after a known start; return None if `body` must be parsed as a whole.

        A request with many messages raises `LargeRequest` unless `large` is set.
        """
        try:
            reading = parse_rest(body, known, self._dialect, large)
            chained = reading is not None and self._chain.find_name(reading.head) is not None
            return None if chained else reading
        except DECODE_ERRORS as error:
            raise MalformedRequest(str(error)) from None

    def read_whole(self, body: Buffer, *, large: bool) -> ParsedRequest:
        """Parse all of `body`."""
        try:
            return parse_whole(body, self._dialect, large)
        except DECODE_ERRORS as error:
            raise MalformedRequest(str(error)) from None

    def find_delta(self, reading: ParsedRequest, head: bytes) -> RequestDelta:
        """Return the new part of a request; `head` holds its other keys, as they go upstream."""
        head_digest = digest(head)
        chain = self._chain.find_name(reading.head)
        link = self._chain.find(chain)
        parent, keep = (None, 0) if chain is not None else self._find_parent(reading.digests, head_digest)
        append = [bytes(raw) for raw in reading.fresh[keep - reading.known :]]
        for part in (*append, head):
            if not part.isascii() and not _is_utf8(part):
                raise MalformedRequest("the body is not UTF-8")
        same = parent is not None and parent.head == head_digest
        before = link or parent
        return RequestDelta(
            dialect=self._dialect.name,
            parent=before.number if before else None,
            keep=link.messages if link else keep,
            append=append,
            head=None if same else head,
            digests=reading.digests,
            head_digest=head_digest,
            mark=reading.mark,
            names=self._name_messages(reading, parent, keep, append),
            chain=chain,
            linked=link is not None,
        )

    def read_reply_messages(self, before: Exchange) -> list[bytes]:
        """Return the messages that the reply of an exchange adds to the conversation."""
        return self._chain.read_messages(bytes(before.reply or b"null"))

    def resolve(self, message: bytes, read: Callable[[int], Exchange]) -> bytes:
        """Return `message`, or the message that it refers to if the record has that one."""
        return self._chain.resolve(message, lambda number: bytes(read(number).reply or b"null"))

    def _name_messages(
        self, reading: ParsedRequest, parent: ConversationTip | None, keep: int, append: list[bytes]
    ) -> bytes:
        if not self._dialect.has_generated:
            return reading.digests
        steady = self._dialect.strip_generated
        kept = parent.names[: keep * DIGEST_SIZE] if parent is not None else b""
        return kept + b"".join([digest(steady(message)) for message in append])

    def on_written(self, delta: RequestDelta, number: int, reply: bytes | None = None) -> None:
        """Add a recorded exchange: later requests may continue it, by name if it has a `reply`."""
        if reply is not None:
            link = ChainLink(number, delta.keep + len(delta.append))
            self._chain.add(link, delta.chain, reply)
        if delta.chain is not None:
            return  # its messages are not the start of the conversation
        digests = delta.digests
        # A tip that is a prefix of the new one is dropped.
        known = self._tips.pop(digests[:DIGEST_SIZE], ())
        others = [tip for tip in known if not digests.startswith(tip.digests)]
        others.append(ConversationTip(number, digests, delta.head_digest, delta.mark, delta.names))
        self._tips[digests[:DIGEST_SIZE]] = others
        self._count += len(others) - len(known)
        if self._count > MOST_TIPS:
            self._forget()

    def _forget(self) -> None:
        first = next(iter(self._tips))
        del self._tips[first][0]
        if not self._tips[first]:
            del self._tips[first]
        self._count -= 1

    def _find_parent(self, digests: bytes, head: bytes) -> tuple[ConversationTip | None, int]:
        best: tuple[int, bool, int] = (0, False, 0)
        parent = None
        for tip in self._tips.get(digests[:DIGEST_SIZE], ()):
            rank = (_count_shared(tip.digests, digests), tip.head == head, tip.number)
            if rank[0] and rank > best:
                best, parent = rank, tip
        return parent, best[0]


def _count_shared(a: bytes, b: bytes) -> int:
    """Return the number of leading digests that `a` and `b` have in common."""
    if b.startswith(a):  # a continued conversation
        return len(a) // DIGEST_SIZE
    low, high = 0, min(len(a), len(b)) // DIGEST_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if a[: middle * DIGEST_SIZE] == b[: middle * DIGEST_SIZE] else (low, middle - 1)
        )
    return low


def _is_utf8(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True


class CallEnding(NamedTuple):
    """How a call ended."""

    status: int  # sent to the client; 499 if nothing was sent
    reply: bytes | None = None  # JSON
    usage: ModelUsage = ModelUsage(requests=1)
    error: str = ""
    streamed: bool = False
    saved: ModelUsage | None = None  # replaces `usage`: the reply came from the record
    version: str = ""  # of the answering policy
    chunks: bytes | None = None  # as in `Exchange`
    original: bytes | None = None  # as in `Exchange`
    billed: bool = True  # False: refused by the upstream, or never sent, so it costs nothing
    unlimited: bool = False  # does not count against the limits of the attempt
    model: str | None = None  # as it went upstream

    def make_exchange(
        self, number: int, delta: RequestDelta, price: ModelPrice | None, started: float, by: str
    ) -> Exchange:
        """Return the exchange of a call that began at `started`; `price` is that of the run's model."""
        usage = NO_USAGE
        if self.saved is None:
            known = price if find_dialect(delta.dialect).uses_run_model else None
            usage = add_cost(self.usage, known, billed=self.billed)
        return Exchange(
            number=number,
            parent=delta.parent,
            keep=delta.keep,
            append=tuple(Raw(message) for message in delta.append),
            head=Raw(delta.head) if delta.head is not None else None,
            reply=Raw(self.reply) if self.reply is not None else None,
            status=self.status,
            dialect=delta.dialect,
            streamed=self.streamed,
            usage=usage,
            error=self.error,
            started=started,
            seconds=max(0.0, time.time() - started),
            identity=delta.identity,
            saved=self.saved or NO_USAGE,
            version=self.version,
            by=by,
            chunks=Raw(self.chunks) if self.chunks is not None else None,
            original=Raw(self.original) if self.original is not None else None,
        )
