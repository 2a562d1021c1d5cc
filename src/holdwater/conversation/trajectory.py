"""Reads the conversation of an attempt: which exchange continues which, and each exchange as a readable turn.

The tree holds a few numbers per exchange; contents stay on disk and are read one exchange at a time. The
parsers are in `dialect/`; the pages are in `view/transcript.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ..core.errors import BadInput, LedgerCorrupt
from ..core.exchange import Exchange
from ..core.policy import explain_not_kept
from ..core.records import ModelUsage, Record
from ..dialect import find_dialect, has_conversations
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
from ..ledger import segment
from ..ledger.blobs import BlobStore, resolve_references
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import decode_exchange, segment_path
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, InstanceRow


class ExchangeNode(NamedTuple):
    """An exchange without its contents."""

    at: int  # the byte in the segment
    parent: int | None
    keep: int
    total: int  # messages in the request
    has_head: bool
    depth: int  # length of the chain of exchanges that each continue the one before, up to this one
    weight: int  # bytes of the records in that chain
    converses: bool  # whether it is a turn of a conversation


class ExchangeThread(NamedTuple):
    """A chain of exchanges: each continues the one before."""

    place: int  # 0: the trajectory; 1, 2, ...: side threads, in the order in which they began
    numbers: tuple[int, ...]


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


class ExchangeTree:
    """The exchanges of one attempt that are on disk when the tree is created."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self.attempt = attempt
        self.blobs = BlobStore(directory.blobs)
        self._path = segment_path(directory, attempt)
        self._nodes: dict[int, ExchangeNode] = {}  # bound: the exchanges of one attempt
        self._head: tuple[int, dict[str, Any]] = (0, {})  # the head that was read last
        self._threads: list[ExchangeThread] = []
        for at, content in segment.read_with_offsets(self._path) if self._path.exists() else ():
            self._add(at, content)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def has_trajectory(self) -> bool:
        """Whether any exchange is a turn of a conversation."""
        return any(node.converses for node in self._nodes.values())

    def numbers(self) -> Iterator[int]:
        """Iterate over the numbers of the exchanges, in order."""
        return iter(self._nodes)

    def threads(self) -> list[ExchangeThread]:
        """Return the trajectory, which is the deepest chain of exchanges, and then the side threads.

        The trajectory is empty if no exchange is a turn of a conversation.
        """
        self._threads = self._threads or self._find_threads()
        return self._threads

    def _find_threads(self) -> list[ExchangeThread]:
        rank = {
            number: (node.converses, node.depth, node.weight, number) for number, node in self._nodes.items()
        }
        taken: set[int] = set()
        chains: list[tuple[int, ...]] = []
        for tip in sorted(rank, key=rank.__getitem__, reverse=True):
            chain: list[int] = []
            at: int | None = tip
            while at is not None and at not in taken:
                taken.add(at)
                chain.append(at)
                at = self._nodes[at].parent
            if chain:
                chains.append(tuple(reversed(chain)))
        if chains and not self._nodes[chains[0][0]].converses:
            chains.insert(0, ())
        ordered = [*chains[:1], *sorted(chains[1:])]
        return [ExchangeThread(place, numbers) for place, numbers in enumerate(ordered)]

    def find_thread(self, number: int) -> ExchangeThread:
        for thread in self.threads():
            if number in thread.numbers:
                return thread
        last = max(self._nodes, default=0)
        hint = f"turns 1 to {last} are in the record" if last else ""
        raise BadInput(f"the attempt has no turn {number}", hint)

    def exchange(self, number: int) -> Exchange:
        return decode_exchange(segment.read_record(self._path, self._node(number).at), self.attempt)

    def request(self, number: int) -> Iterator[tuple[str, msgspec.Raw]]:
        """Yield dialect and raw message for all messages of a request in order; one exchange in memory."""
        for at, count in sorted(self._find_parts(number).items()):
            exchange = self.exchange(at)
            for message in exchange.append[:count]:
                yield exchange.dialect, message

    def head(self, number: int) -> dict[str, Any]:
        """Return the decoded fields of a request other than its messages."""
        at = self._find_head(number)
        if self._head[0] != at:
            self._head = at, as_dict(decode_foreign(self.raw_head(at)))
        return self._head[1]

    def raw_head(self, number: int) -> bytes:
        """Return the fields of a request other than its messages as JSON, constants included."""
        raw = self.exchange(self._find_head(number)).head
        return b"{}" if raw is None else resolve_references(bytes(raw), self.blobs)

    def converses(self, number: int) -> bool:
        """Return whether an exchange is a turn of a conversation."""
        return self._node(number).converses

    def count_dropped(self, number: int) -> int:
        """Return the number of messages of its parent's request that an exchange leaves out."""
        node = self._node(number)
        return 0 if node.parent is None else self._nodes[node.parent].total - node.keep

    def _find_head(self, number: int) -> int:
        """Return the exchange that stores the head of this one: itself, or the nearest ancestor with one."""
        node = self._node(number)
        while not node.has_head and node.parent is not None:
            number, node = node.parent, self._nodes[node.parent]
        return number

    def _node(self, number: int) -> ExchangeNode:
        if number not in self._nodes:
            raise LedgerCorrupt(f"attempt {self.attempt} has no exchange {number}")
        return self._nodes[number]

    def _add(self, at: int, content: bytes) -> None:
        exchange = decode_exchange(content, self.attempt)
        parent = self._node(exchange.parent) if exchange.parent is not None else None
        if exchange.number in self._nodes or exchange.keep > (parent.total if parent else 0):
            raise LedgerCorrupt(
                f"exchange {exchange.number} of attempt {self.attempt} is duplicated"
                " or does not fit its parent"
            )
        # An exchange that rewrites the end of the history still continues it, but adds no depth.
        before = parent if parent is not None and 2 * exchange.keep > parent.total else None
        further = before is None or exchange.keep == before.total
        self._nodes[exchange.number] = ExchangeNode(
            at=at,
            parent=exchange.parent,
            keep=exchange.keep,
            total=exchange.keep + len(exchange.append),
            has_head=exchange.head is not None,
            depth=further + (before.depth if before else 0),
            weight=len(content) + (before.weight if before else 0),
            converses=has_conversations(exchange.dialect),
        )

    def _find_parts(self, number: int) -> dict[int, int]:
        """Return the exchanges that make up a request, each with the number of its own messages in it."""
        made: dict[int, int] = {}
        at: int | None = number
        count = self._node(number).total
        while at is not None and count > 0:
            node = self._nodes[at]
            made[at] = max(0, count - node.keep)
            count = min(count, node.keep)
            at = node.parent
        return made


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
    return find_dialect(exchange.dialect).parse_reply(as_dict(decode_referring(bytes(exchange.reply))))


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
    attempt = reader.acting_attempt(attempt)
    keep = reader.find_unrecorded_policy((attempt,))
    if keep is not None:
        raise BadInput(f"the exchanges of the attempt are {explain_not_kept(keep)}")
    return ExchangeTree(reader.directory, attempt)


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
    yield b"null" if exchange.reply is None else resolve_references(bytes(exchange.reply), tree.blobs)
    if exchange.original is not None:
        yield b',"original":' + resolve_references(bytes(exchange.original), tree.blobs)
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
        yield separator + key + resolve_references(bytes(message), tree.blobs)
        separator, opened = b",", True
    yield b"]}" if opened else b"}"


_encode = msgspec.json.Encoder().encode
