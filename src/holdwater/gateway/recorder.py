"""What is new in a request, in O(new bytes): the exchange it continues, how many messages it keeps, the rest.

The state of a conversation is a digest for each message and one for the bytes up to the last message, never
the messages. It neither talks to anyone nor writes; `sessions.py` does. The way back is in the ledger.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3
from msgspec import Raw
from xxhash import xxh3_128

from ..core.masking import mask_bytes
from ..core.records import Exchange
from .body import Part
from .json_members import decode_members, skip_blanks, skip_blanks_before
from .reply_chain import Chaining, ChainLink, ChainName, ReplyChain
from .value_count import LARGE, MANY, check_messages, check_values

Buffer = bytes | bytearray

DIGEST = 16  # bytes of blake3: collisions cannot be crafted
TIPS = 32  # conversations of an attempt that are remembered
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign JSON raises
_SEED = secrets.randbits(64)  # what is hashed with it never leaves the process: nobody can aim at it
_LAST = 32  # bytes before a mark that are compared before anything is hashed

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_ARRAY = msgspec.json.Decoder(list[Raw])


class Malformed(ValueError):
    """The body is not a request."""


class Form(NamedTuple):
    """Where in a request of a dialect the messages stand, and what of a message does not count."""

    dialect: str = "chat"
    key: str = "messages"
    optional: bool = False  # the key may be missing, or hold a text: that is one message of the user
    lasting: Callable[[bytes], bytes] | None = None  # a message without what comes and goes in it
    steady: Callable[[bytes], bytes] | None = None  # without what its client makes up anew at each start
    chaining: Chaining | None = None
    beside: bool = False  # its calls are no turns: they stand beside every conversation
    of: str = ""  # the dialect whose requests are counted in it

    @property
    def spoken(self) -> str:
        """The dialect that an upstream has to speak."""
        return self.of or self.dialect


class Mark(NamedTuple):
    """Where in a body the messages begin and the last lasting one ends, and a digest of all before it."""

    opening: int  # the first byte after `"messages":[`
    end: int
    known: int  # messages before that end
    digest: bytes
    last: bytes


class Tip(NamedTuple):
    """The end of a conversation that is in the record."""

    number: int
    digests: bytes
    head: bytes  # digest of all keys but the messages
    mark: Mark | None
    names: bytes  # as `digests`, of what is steady in the messages


class KnownStart(NamedTuple):
    """A body begins as one that is in the record, up to the mark."""

    tip: Tip
    mark: Mark
    before: xxh3_128  # of what is before the mark

    def count_new(self, body: Buffer) -> int:
        """Bytes of `body` that have to be parsed."""
        return len(body) - self.mark.end + self.mark.opening


class Slices(Protocol):
    """Messages of which some can be had, each by itself."""

    def __getitem__(self, part: slice, /) -> Sequence[Raw | bytes]: ...


class Reading(NamedTuple):
    """A request taken apart. `head` and `fresh` are views: they hold the body as long as they live.

    An empty array of messages stays in the head.
    """

    head: dict[str, Raw]
    fresh: Slices  # the messages after the first `known` ones
    known: int
    digests: bytes
    span: Part | None  # the array of messages, or a text in its place
    mark: Mark | None

    @property
    def is_large(self) -> bool:
        """Whether recording it would hold up the loop."""
        if not isinstance(self.fresh, list):  # a call from this process
            return False
        parts = (*self.head.values(), *self.fresh[:MANY])
        return len(self.fresh) > MANY or sum([len(memoryview(part)) for part in parts]) > LARGE


class Delta(NamedTuple):
    """What is new in a request; holds no part of the body."""

    dialect: str
    parent: int | None
    keep: int
    append: list[bytes]
    head: bytes | None
    digests: bytes
    head_digest: bytes
    mark: Mark | None
    names: bytes
    identity: str = ""  # see `identity.py`
    chain: ChainName | None = None
    linked: bool = False  # the parent is known by that name; its reply stands before `append`


class Recorder:
    """An attempt's conversations in one dialect: at most `TIPS`, what is not continued goes first."""

    def __init__(self, form: Form = Form()) -> None:  # noqa: B008 (a frozen record)
        self._form = form
        # By their first message, the latest last, so that what began otherwise costs nothing; bound: `TIPS`.
        self._tips: dict[bytes, list[Tip]] = {}
        self._count = 0
        self._chain = ReplyChain(form.chaining)

    def read(self, body: Buffer) -> Reading:
        """Take `body` apart; of a conversation that goes on, only what is new is parsed."""
        known = self.find(body)
        reading = self.read_rest(body, known, large=True) if known is not None else None
        return self.read_whole(body, large=True) if reading is None else reading

    def find(self, body: Buffer) -> KnownStart | None:
        """Of two conversations that it goes on with, the later is as good: what it lacks is parsed."""
        for tips in reversed(self._tips.values()):
            for tip in reversed(tips):
                mark = tip.mark
                if mark is None or not body.startswith(mark.last, mark.end - len(mark.last)):
                    continue
                before = xxh3_128(memoryview(body)[: mark.end], _SEED)
                if before.digest() == mark.digest:
                    return KnownStart(tip, mark, before)
        return None

    def read_rest(self, body: Buffer, known: KnownStart, *, large: bool) -> Reading | None:
        """Take apart what follows a known start; None: `body` is to be read as a whole.

        What turns out to be large though it is not said to be raises `LargeRequest`.
        """
        try:
            reading = _rest(body, known, self._form, large)
            chained = reading is not None and self._chain.before(reading.head) is not None
            return None if chained else reading
        except UNREADABLE as error:
            raise Malformed(str(error)) from None

    def read_whole(self, body: Buffer, *, large: bool) -> Reading:
        """Take all of `body` apart."""
        try:
            return _whole(body, self._form, large)
        except UNREADABLE as error:
            raise Malformed(str(error)) from None

    def delta(self, reading: Reading, head: bytes) -> Delta:
        """What is new in it, given `head`: its other keys, as they go upstream."""
        head_digest = digest(head)
        chain = self._chain.before(reading.head)
        link = self._chain.find(chain)
        parent, keep = (None, 0) if chain is not None else self._parent(reading.digests, head_digest)
        append = [bytes(raw) for raw in reading.fresh[keep - reading.known :]]
        for part in (*append, head):
            if not part.isascii() and not _is_utf8(part):
                raise Malformed("the body is not UTF-8")
        same = parent is not None and parent.head == head_digest
        before = link or parent
        return Delta(
            dialect=self._form.dialect,
            parent=before.number if before else None,
            keep=link.messages if link else keep,
            append=append,
            head=None if same else head,
            digests=reading.digests,
            head_digest=head_digest,
            mark=reading.mark,
            names=self._names(reading, parent, keep, append),
            chain=chain,
            linked=link is not None,
        )

    def said_in(self, before: Exchange) -> list[bytes]:
        """The messages that the reply of an exchange adds to the conversation."""
        return self._chain.said(bytes(before.reply or b"null"))

    def resolve(self, message: bytes, read: Callable[[int], Exchange]) -> bytes:
        """A message; in the place of a reference the one that it stands for, if the record has it."""
        return self._chain.resolve(message, lambda number: bytes(read(number).reply or b"null"))

    def _names(self, reading: Reading, parent: Tip | None, keep: int, append: list[bytes]) -> bytes:
        steady = self._form.steady
        if steady is None:
            return reading.digests
        kept = parent.names[: keep * DIGEST] if parent is not None else b""
        return kept + b"".join([digest(steady(message)) for message in append])

    def written(self, delta: Delta, number: int, reply: bytes | None = None) -> None:
        """The exchange is in the record: later requests may continue it, by name if it has a `reply`."""
        if reply is not None:
            link = ChainLink(number, delta.keep + len(delta.append))
            self._chain.add(link, delta.chain, reply)
        if delta.chain is not None:
            return  # its messages are not what the conversation begins with
        digests = delta.digests
        # What the new tip begins with needs no place of its own.
        known = self._tips.pop(digests[:DIGEST], ())
        others = [tip for tip in known if not digests.startswith(tip.digests)]
        others.append(Tip(number, digests, delta.head_digest, delta.mark, delta.names))
        self._tips[digests[:DIGEST]] = others
        self._count += len(others) - len(known)
        if self._count > TIPS:
            self._forget()

    def _forget(self) -> None:
        first = next(iter(self._tips))
        del self._tips[first][0]
        if not self._tips[first]:
            del self._tips[first]
        self._count -= 1

    def _parent(self, digests: bytes, head: bytes) -> tuple[Tip | None, int]:
        best: tuple[int, bool, int] = (0, False, 0)
        parent = None
        for tip in self._tips.get(digests[:DIGEST], ()):
            rank = (_shared(tip.digests, digests), tip.head == head, tip.number)
            if rank[0] and rank > best:
                best, parent = rank, tip
        return parent, best[0]


def _whole(body: Buffer, form: Form, large: bool) -> Reading:
    if large:
        check_values(body)
    head = decode_members(body)
    fresh = _fresh(head, form, large)
    if not fresh:
        return Reading(head, [], 0, b"", None, None)
    messages = head.pop(form.key)
    digests, steady = _identities(fresh, form)
    reading = Reading(head, fresh, 0, digests, memoryview(messages), None)
    if _is_text(messages):
        return reading
    return reading._replace(mark=_find_mark(body, reading, messages, steady, form.key))


def _rest(body: Buffer, known: KnownStart, form: Form, large: bool) -> Reading | None:
    """Parse what follows the mark, as if the messages before it were not there."""
    tip, mark = known.tip, known.mark
    before = known.before.copy()  # it may be read again
    view = memoryview(body)
    start = skip_blanks(body, mark.end)
    if body.startswith(b",", start):
        start = skip_blanks(body, start + 1)
        if body.startswith(b"]", start):  # a trailing comma
            return None
    elif not body.startswith(b"]", start):
        return None
    short = b"".join((view[: mark.opening], view[start:]))
    if large:
        check_values(short)
    head = decode_members(short)
    fresh = _fresh(head, form, large)
    messages = bytes(head.pop(form.key))
    if not short.startswith(messages, mark.opening - 1):
        return None  # a second `messages` key
    close = start + len(messages) - 1
    digests, steady = _identities(fresh, form)
    end = _end_before(body, close, fresh[steady:]) if steady else mark.end
    before.update(view[mark.end : end])
    return Reading(
        head,
        fresh,
        mark.known,
        tip.digests[: mark.known * DIGEST] + digests,
        view[mark.opening - 1 : close],
        _marked(body, mark.opening, end, mark.known + steady, before),
    )


def _fresh(head: dict[str, Raw], form: Form, large: bool) -> list[Raw]:
    messages = head.get(form.key)
    if messages is None:
        if form.optional:
            return []
        raise Malformed(f"`{form.key}` is missing")
    if form.optional and _is_text(messages):
        return [Raw(b'{"role":"user","content":%s}' % bytes(messages))]
    fresh = _ARRAY.decode(messages)
    check_messages(len(fresh), large=large)
    return fresh


def _is_text(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b'"'


def _identities(messages: list[Raw], form: Form) -> tuple[bytes, int]:
    """The digests of messages; how many come before the first that may be sent in other bytes next time."""
    if form.lasting is None:
        return b"".join([digest(raw) for raw in messages]), len(messages)
    digests: list[bytes] = []
    steady = len(messages)
    for place, raw in enumerate(messages):
        content = bytes(raw)
        lasting = form.lasting(content)
        digests.append(digest(lasting))
        if len(lasting) != len(content):
            steady = min(steady, place)
    return b"".join(digests), steady


def _find_mark(body: Buffer, reading: Reading, messages: Raw, steady: int, key: str) -> Mark | None:
    """Where the messages stand in the body; None where that is not certain: the next one is read whole."""
    view = memoryview(messages)
    start = body.find(bytes(view[:256]))
    close = start + len(view)
    # Views are compared item by item: too slow.
    if not steady or start < 0 or not body.startswith(bytes(view), start):
        return None
    without = bytes(memoryview(body)[: start + 1]) + bytes(memoryview(body)[close - 1 :])
    try:
        rest = _OBJECT.decode(without)
    except UNREADABLE:
        return None
    if bytes(rest.pop(key, b"")) != b"[]" or rest.keys() != reading.head.keys():
        return None
    end = _end_before(body, close, reading.fresh[steady:])
    return _marked(body, start + 1, end, steady, xxh3_128(memoryview(body)[:end], _SEED))


def _marked(body: Buffer, opening: int, end: int, count: int, before: xxh3_128) -> Mark:
    return Mark(opening, end, count, before.digest(), bytes(body[max(0, end - _LAST) : end]))


def _end_before(body: Buffer, close: int, later: Sequence[Raw | bytes]) -> int:
    """The end of the message before `later`, the last ones before the bracket that ends at `close`."""
    end = _end_of_last(body, close)
    for raw in reversed(later):
        end = _end_of_last(body, end - len(memoryview(raw)) + 1)  # now after the comma
        end = _end_of_last(body, end)
    return end


def _end_of_last(body: Buffer, close: int) -> int:
    """The end of what comes before the one byte that ends at `close`, blanks left out."""
    return skip_blanks_before(body, close - 1)


def digest(part: Raw | bytes) -> bytes:
    """What a message, or the other keys of a request, is known by, whatever the key of its attempt."""
    return blake3(mask_bytes(bytes(part))).digest(DIGEST)


def _shared(a: bytes, b: bytes) -> int:
    """How many digests the two begin with in common."""
    if b.startswith(a):  # a conversation that goes on
        return len(a) // DIGEST
    low, high = 0, min(len(a), len(b)) // DIGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[: middle * DIGEST] == b[: middle * DIGEST] else (low, middle - 1)
    return low


def _is_utf8(part: bytes) -> bool:
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True
