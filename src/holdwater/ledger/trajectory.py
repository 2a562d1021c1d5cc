"""The conversation of an attempt: which exchange continues which, and each as a turn that people can read.

The tree is a few words an exchange; what was said stays on disk and is read an exchange at a time. What the
dialects mean is in `dialects.py`; the pages are in `view/transcript.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ..core.errors import BadInput, LedgerCorrupt
from ..core.policy import not_kept
from ..core.records import Exchange, Record, Usage
from . import dialects, segment
from .blobs import Blobs
from .dialects import Reply, Tokens
from .directory import RunDirectory
from .exchanges import decode, segment_path
from .media import resolve
from .message import Message, Pairing, decoded, fields, referring, same, string
from .reader import AttemptRow, InstanceRow, Reader


class Node(NamedTuple):
    """An exchange without what was said in it."""

    at: int  # the byte in the segment
    parent: int | None
    keep: int
    total: int  # messages in the request
    has_head: bool
    depth: int  # exchanges that each continue the whole of the one before, up to this one
    weight: int  # bytes of their records
    converses: bool  # False: no turn of a conversation


class Thread(NamedTuple):
    """Exchanges of which each follows the one before."""

    place: int  # 0: the trajectory; 1, 2, ...: beside it, in the order in which they began
    numbers: tuple[int, ...]


class Turn(Record, frozen=True):
    """One exchange: what was new in the request, and what came back."""

    number: int
    thread: int  # 0: the trajectory; 1, 2, ...: a side root or a branch
    parent: int | None
    kept: int  # messages of the parent's request that stand before the new ones
    dropped: int  # messages of the parent's request that do not
    dialect: str
    model: str
    status: int
    streamed: bool
    started: float
    seconds: float
    usage: Usage  # of an answer from the record: what it used when it was made
    new: tuple[Message, ...]  # without the reply before, where it is only sent back
    reply: Message | None
    others: tuple[Message, ...] = ()  # choices beside the first
    finish: str = ""
    error: str = ""
    tokens: Tokens = Tokens()
    recorded: bool = False  # answered from the record of an earlier attempt


class Tree:
    """The exchanges of one attempt that are on disk now."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self.attempt = attempt
        self.blobs = Blobs(directory.blobs)
        self._path = segment_path(directory, attempt)
        self._nodes: dict[int, Node] = {}  # bound: the exchanges of one attempt
        self._head: tuple[int, dict[str, Any]] = (0, {})  # the last one that was asked for
        for at, content in segment.places(self._path) if self._path.exists() else ():
            self._add(at, content)

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def has_trajectory(self) -> bool:
        """Whether any call was a turn of a conversation."""
        return any(node.converses for node in self._nodes.values())

    def numbers(self) -> Iterator[int]:
        """The exchanges in their order."""
        return iter(self._nodes)

    def threads(self) -> list[Thread]:
        """The trajectory, the chain to where most exchanges continue each other; then what is beside it.

        The trajectory has no exchanges where no call was a turn of a conversation.
        """
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
        return [Thread(place, numbers) for place, numbers in enumerate(ordered)]

    def thread_of(self, number: int) -> Thread:
        for thread in self.threads():
            if number in thread.numbers:
                return thread
        last = max(self._nodes, default=0)
        hint = f"turns 1 to {last} are in the record" if last else ""
        raise BadInput(f"the attempt has no turn {number}", hint)

    def exchange(self, number: int) -> Exchange:
        return decode(segment.read_at(self._path, self._node(number).at), self.attempt)

    def request(self, number: int) -> Iterator[tuple[str, msgspec.Raw]]:
        """The dialect and the raw message, for all messages of a request in order; one exchange in memory."""
        for at, count in sorted(self._made_of(number).items()):
            exchange = self.exchange(at)
            for message in exchange.append[:count]:
                yield exchange.dialect, message

    def head(self, number: int) -> dict[str, Any]:
        """All keys of a request but its messages, decoded."""
        at = self._headed(number)
        if self._head[0] != at:
            self._head = at, fields(decoded(self.raw_head(at)))
        return self._head[1]

    def raw_head(self, number: int) -> bytes:
        """The same as JSON, its constants in their places."""
        raw = self.exchange(self._headed(number)).head
        return b"{}" if raw is None else resolve(bytes(raw), self.blobs)

    def converses(self, number: int) -> bool:
        """Whether an exchange is a turn of a conversation."""
        return self._node(number).converses

    def dropped(self, number: int) -> int:
        """How many messages of its parent's request an exchange leaves out."""
        node = self._node(number)
        return 0 if node.parent is None else self._nodes[node.parent].total - node.keep

    def _headed(self, number: int) -> int:
        """The exchange that has the head of this one: itself, or the nearest before it that differs."""
        node = self._node(number)
        while not node.has_head and node.parent is not None:
            number, node = node.parent, self._nodes[node.parent]
        return number

    def _node(self, number: int) -> Node:
        if number not in self._nodes:
            raise LedgerCorrupt(f"attempt {self.attempt} has no exchange {number}")
        return self._nodes[number]

    def _add(self, at: int, content: bytes) -> None:
        exchange = decode(content, self.attempt)
        parent = self._node(exchange.parent) if exchange.parent is not None else None
        if exchange.number in self._nodes or exchange.keep > (parent.total if parent else 0):
            raise LedgerCorrupt(f"exchange {exchange.number} of attempt {self.attempt} fits no other")
        # One that rewrites the end of what was said still goes on with it, if it is no step further.
        before = parent if parent is not None and 2 * exchange.keep > parent.total else None
        further = before is None or exchange.keep == before.total
        self._nodes[exchange.number] = Node(
            at=at,
            parent=exchange.parent,
            keep=exchange.keep,
            total=exchange.keep + len(exchange.append),
            has_head=exchange.head is not None,
            depth=further + (before.depth if before else 0),
            weight=len(content) + (before.weight if before else 0),
            converses=dialects.has_conversations(exchange.dialect),
        )

    def _made_of(self, number: int) -> dict[int, int]:
        """Which exchanges make up a request, and how many of each one's own messages."""
        made: dict[int, int] = {}
        at: int | None = number
        count = self._node(number).total
        while at is not None and count > 0:
            node = self._nodes[at]
            made[at] = max(0, count - node.keep)
            count = min(count, node.keep)
            at = node.parent
        return made


def turns(tree: Tree) -> Iterator[Turn]:
    """The trajectory, then each thread beside it."""
    for thread in tree.threads():
        yield from thread_turns(tree, thread)


def thread_turns(tree: Tree, thread: Thread, only: int | None = None) -> Iterator[Turn]:
    """The turns of a thread, or one of them; one exchange is in memory, and the reply before it."""
    pairing = Pairing()
    before: tuple[int, Reply] | None = None
    for number in thread.numbers:
        if only is None or number == only:
            turn, reply = _turn(tree, thread, number, before)
            new = tuple(pairing.named(message) for message in turn.new)
            said = pairing.named(turn.reply) if turn.reply else None
            yield msgspec.structs.replace(turn, new=new, reply=said)
            before = number, reply


def _turn(tree: Tree, thread: Thread, number: int, before: tuple[int, Reply] | None) -> tuple[Turn, Reply]:
    exchange = tree.exchange(number)
    name = exchange.dialect
    dropped = tree.dropped(number)
    new = dialects.messages(name, [referring(bytes(raw)) for raw in exchange.append])
    if exchange.parent is not None and not dropped and new and new[0].role == "assistant":
        new = _without_echo(new, _reply_before(tree, exchange.parent, before))
    reply = reply_of(exchange)
    turn = Turn(
        number=number,
        thread=thread.place,
        parent=exchange.parent,
        kept=exchange.keep,
        dropped=dropped,
        dialect=name,
        model=reply.model or string(tree.head(number).get("model")),
        status=exchange.status,
        streamed=exchange.streamed,
        started=exchange.started,
        seconds=exchange.seconds,
        usage=exchange.usage.plus(exchange.saved),
        new=(*_new_system(tree, exchange), *new),
        reply=reply.message,
        others=reply.others,
        finish=reply.finish,
        error=exchange.error,
        tokens=reply.tokens,
        recorded=exchange.saved.requests > 0,
    )
    return turn, reply


def reply_of(exchange: Exchange) -> Reply:
    """What the model said in an exchange, as far as it came."""
    if exchange.reply is None:
        return Reply()
    return dialects.dialect(exchange.dialect).reply(fields(referring(bytes(exchange.reply))))


def _reply_before(tree: Tree, parent: int, before: tuple[int, Reply] | None) -> Reply:
    return before[1] if before is not None and before[0] == parent else reply_of(tree.exchange(parent))


def _without_echo(new: list[Message], before: Reply) -> list[Message]:
    """A conversation goes on by sending the last reply back: that is not new. A changed one is."""
    return new[1:] if before.message is not None and same(new[0], before.message) else new


def _new_system(tree: Tree, exchange: Exchange) -> list[Message]:
    """What stands beside the messages, unless the request before had the same."""
    if exchange.head is None:
        return []
    system = dialects.dialect(exchange.dialect).system
    own = list(system(tree.head(exchange.number)))
    if own and exchange.parent is not None and own == list(system(tree.head(exchange.parent))):
        return []
    return own


def find_attempt(reader: Reader, instance: InstanceRow, sample: int, number: int | None) -> AttemptRow:
    """An attempt by its number within the sample; the one that the outcome was chosen from, or the last."""
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


def conversation_of(reader: Reader, attempt: int) -> Tree:
    """The exchanges behind an attempt; an error if they are not kept."""
    attempt = reader.acting_attempt(attempt)
    keep = reader.unrecorded((attempt,))
    if keep is not None:
        raise BadInput(f"the exchanges of the attempt are {not_kept(keep)}")
    return Tree(reader.directory, attempt)
