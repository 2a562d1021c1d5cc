"""Reads the exchanges of an attempt as readable turns: the new messages of a request, and the reply.

`exchange_tree.py` finds which exchange continues which. The parsers are in `dialect/`; the pages are in
`view/transcript.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..core.errors import BadInput
from ..core.exchange import Exchange
from ..core.policy import explain_not_kept
from ..core.records import ModelUsage, Record
from ..dialect import CHAT, find_dialect
from ..dialect.message import (
    CallPairing,
    CommonMessage,
    ModelReply,
    ReplyTokens,
    as_dict,
    as_string,
    decode_foreign,
    decode_referring,
    says_same,
)
from ..ledger.blobs import write_resolved
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, InstanceRow
from .exchange_tree import ExchangeThread as ExchangeThread
from .exchange_tree import ExchangeTree as ExchangeTree


class Turn(Record, frozen=True):
    """One exchange: the new messages of the request, and the reply."""

    number: int
    thread: int  # 0: the trajectory; 1, 2, ...: a side thread
    parent: int | None
    kept: int  # messages of the parent's request that precede the new messages
    dropped: int  # messages of the parent's request that this request leaves out
    dialect: str
    model: str
    status: int
    streamed: bool
    started: float
    seconds: float
    usage: ModelUsage  # of a replayed reply: the usage of the original call
    new: tuple[CommonMessage, ...]  # without the preceding reply, if the client only sends it back
    reply: CommonMessage | None
    others: tuple[CommonMessage, ...] = ()  # choices after the first
    finish: str = ""
    error: str = ""
    tokens: ReplyTokens = ReplyTokens()
    recorded: bool = False  # the reply is replayed from an earlier attempt


def read_turns(tree: ExchangeTree) -> Iterator[Turn]:
    """Yield the turns of the trajectory, then of each side thread."""
    for thread in tree.threads():
        yield from read_thread_turns(tree, thread)


def read_thread_turns(tree: ExchangeTree, thread: ExchangeThread, only: int | None = None) -> Iterator[Turn]:
    """Yield the turns of a thread, or one of them; one exchange and the preceding reply are in memory."""
    pairing = CallPairing()
    before: tuple[int, ModelReply] | None = None
    for number in thread.numbers:
        if only is None or number == only:
            turn, reply = _read_turn(tree, thread, number, before)
            new = tuple(pairing.pair_message(message) for message in turn.new)
            said = pairing.pair_message(turn.reply) if turn.reply else None
            yield msgspec.structs.replace(turn, new=new, reply=said)
            before = number, reply


def _read_turn(
    tree: ExchangeTree, thread: ExchangeThread, number: int, before: tuple[int, ModelReply] | None
) -> tuple[Turn, ModelReply]:
    exchange = tree.exchange(number)
    name = exchange.dialect
    dropped = tree.count_dropped(number)
    new = find_dialect(name).parse_messages([decode_referring(bytes(raw)) for raw in exchange.append])
    if exchange.parent is not None and not dropped and new and new[0].role == "assistant":
        known = before is not None and before[0] == exchange.parent
        last = before[1] if before is not None and known else parse_reply(tree.exchange(exchange.parent))
        if last.message is not None and says_same(new[0], last.message):
            new = new[1:]  # clients repeat the last reply to continue a conversation
    reply = parse_reply(exchange)
    turn = Turn(
        number=number,
        thread=thread.place,
        parent=exchange.parent,
        kept=exchange.keep,
        dropped=dropped,
        dialect=name,
        model=reply.model or as_string(tree.head(number).get("model")),
        status=exchange.status,
        streamed=exchange.streamed,
        started=exchange.started,
        seconds=exchange.seconds,
        usage=exchange.usage.plus(exchange.saved),
        new=(*_find_new_system(tree, exchange), *new),
        reply=reply.message,
        others=reply.others,
        finish=reply.finish,
        error=exchange.error,
        tokens=reply.tokens,
        recorded=exchange.saved.requests > 0,
    )
    return turn, reply


def parse_reply(exchange: Exchange) -> ModelReply:
    """Return the reply of an exchange, as far as it was received."""
    if exchange.reply is None:
        return ModelReply()
    reply = find_dialect(exchange.dialect).parse_reply(as_dict(decode_referring(bytes(exchange.reply))))
    for tokens in read_original_tokens(exchange)[:1]:
        reply = msgspec.structs.replace(reply, tokens=tokens)
    return reply


def read_original_tokens(exchange: Exchange) -> list[ReplyTokens]:
    """Return the tokens of each choice of a reply that was translated; the agent's side may lack them."""
    if exchange.original is None:
        return []
    original = as_dict(decode_foreign(bytes(exchange.original)))
    return [CHAT.parse_reply(one).tokens for _, one in CHAT.split_choices(original)]


def _find_new_system(tree: ExchangeTree, exchange: Exchange) -> list[CommonMessage]:
    """Return the prompts outside the message list, unless the preceding request has the same."""
    if exchange.head is None:
        return []
    system = find_dialect(exchange.dialect).parse_system
    own = list(system(tree.head(exchange.number)))
    if own and exchange.parent is not None and own == list(system(tree.head(exchange.parent))):
        return []
    return own


def find_attempt(reader: LedgerReader, instance: InstanceRow, sample: int, number: int | None) -> AttemptRow:
    """Return an attempt by its number within the sample; without a number, the chosen or the last one."""
    chosen = reader.rows(
        "SELECT attempt FROM outcome WHERE instance = ? AND sample = ?", (instance.id, sample)
    )
    wanted: int | None = chosen[0][0] if chosen else None
    found: AttemptRow | None = None
    for row in reader.attempts(instance.id):
        if row.sample == sample and (row.number == number if number else wanted in (None, row.attempt)):
            found = row
    if found is None:
        asked = f"attempt {number} at" if number else "attempt at"
        raise BadInput(f"no {asked} sample {sample} of `{instance.name}`", "`holdwater show` lists them")
    return found


def open_conversation(reader: LedgerReader, attempt: int) -> ExchangeTree:
    """Return the exchanges behind an attempt; raise if they are not kept."""
    return ExchangeTree(reader.directory, find_recorded_attempt(reader, attempt))


def find_recorded_attempt(reader: LedgerReader, attempt: int) -> int:
    """Return the attempt that has the exchanges behind an attempt; raise if they are not kept."""
    attempt = reader.acting_attempt(attempt)
    keep = reader.find_unrecorded_policy((attempt,))
    if keep is not None:
        raise BadInput(f"the exchanges of the attempt are {explain_not_kept(keep)}")
    return attempt


def render_raw_turn(tree: ExchangeTree, number: int) -> Iterator[bytes]:
    """Yield one JSON document: `{"turn", "dialect", "status", "error", "streamed", "request", "reply"}`.

    Request and reply are as they were sent and received, media included, but for the order of keys. If the
    reply was translated, `original` is the one of the upstream.
    """
    exchange = tree.exchange(number)
    about = {
        "turn": number,
        "dialect": exchange.dialect,
        "status": exchange.status,
        "error": exchange.error,
        "streamed": exchange.streamed,
    }
    yield _encode(about)[:-1] + b',"request":'
    yield from _render_request(tree, number)
    yield b',"reply":'
    yield from write_resolved(bytes(exchange.reply or b"null"), tree.blobs)
    if exchange.original is not None:
        yield b',"original":'
        yield from write_resolved(bytes(exchange.original), tree.blobs)
    yield b"}\n"


def _render_request(tree: ExchangeTree, number: int) -> Iterator[bytes]:
    head = msgspec.json.decode(tree.raw_head(number), type=dict[str, msgspec.Raw])
    dialect = find_dialect(tree.exchange(number).dialect)
    if dialect.model_in_path:
        head.pop("model", None)  # it is not part of the request body
    yield _encode(head)[:-1]
    separator = b"," if head else b""
    opened = False
    for _, message in tree.request(number):
        key = b"" if opened else b"%s:[" % _encode(dialect.key)
        yield separator + key
        yield from write_resolved(bytes(message), tree.blobs)
        separator, opened = b",", True
    yield b"]}" if opened else b"}"


_encode = msgspec.json.Encoder().encode
