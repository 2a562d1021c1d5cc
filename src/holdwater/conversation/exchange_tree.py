"""The exchanges of an attempt as a tree: which exchange continues which, and where each is on disk.

The tree holds a few numbers per exchange; contents stay on disk and are read one exchange at a time.
`trajectory.py` reads an exchange as a turn.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ..core.errors import BadInput, LedgerCorrupt
from ..core.exchange import Exchange
from ..dialect import has_conversations
from ..dialect.message import as_dict, decode_foreign
from ..ledger import segment
from ..ledger.blobs import BlobStore, resolve_references
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import decode_exchange, segment_path


class RecordSource(Protocol):
    """The records of one attempt: in full, or with their long texts cut (`long_texts.py`)."""

    def scan(self, at: int) -> Iterator[segment.SegmentRecord]:
        """Yield the records from byte `at` on."""

    def read(self, at: int) -> bytes:
        """Return the record that begins at byte `at`."""

    def resolve(self, raw: bytes) -> bytes:
        """Return JSON with its references replaced."""


class WholeRecords:
    """Reads records in full."""

    def __init__(self, path: Path, blobs: BlobStore) -> None:
        self._path = path
        self._blobs = blobs

    def scan(self, at: int) -> Iterator[segment.SegmentRecord]:
        return segment.scan_bounded(self._path, sys.maxsize, at) if self._path.exists() else iter(())

    def read(self, at: int) -> bytes:
        return segment.read_record(self._path, at)

    def resolve(self, raw: bytes) -> bytes:
        return resolve_references(raw, self._blobs)


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
    by: str  # the child attempt that made the call


class ExchangeThread(NamedTuple):
    """A chain of exchanges: each continues the one before."""

    place: int  # 0: the trajectory; 1, 2, ...: side threads, in the order in which they began
    numbers: tuple[int, ...]


class ExchangeTree:
    """The exchanges of one attempt that are on disk when the tree is created."""

    def __init__(self, directory: RunDirectory, attempt: int, records: RecordSource | None = None) -> None:
        self.attempt = attempt
        self.blobs = BlobStore(directory.blobs)
        self.records = records or WholeRecords(segment_path(directory, attempt), self.blobs)
        self._nodes: dict[int, ExchangeNode] = {}  # bound: the exchanges of one attempt
        self._end = 0  # of the records that were read
        self._threads: list[ExchangeThread] | None = None
        self._head: tuple[int, dict[str, Any]] = (0, {})  # the head that was read last
        self._read_records()

    def extend(self) -> ExchangeTree:
        """Return a tree that also has the exchanges that were written since."""
        tree = copy(self)
        tree._nodes, tree._threads = dict(self._nodes), None
        tree._read_records()
        return tree

    def _read_records(self) -> None:
        for record in self.records.scan(self._end):
            assert record.content is not None
            self._add(record.at, record.content)
            self._end = record.end

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
        if self._threads is None:
            self._threads = self._find_threads()
        return self._threads

    def _find_threads(self) -> list[ExchangeThread]:
        def rank(number: int) -> tuple[bool, int, int, int]:
            node = self._nodes[number]
            return node.converses, node.depth, node.weight, number

        taken: set[int] = set()
        chains: list[tuple[int, ...]] = []
        for tip in sorted(self._nodes, key=rank, reverse=True):
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
        return decode_exchange(self.read_raw(number), self.attempt)

    def read_raw(self, number: int) -> bytes:
        """Return the record of an exchange."""
        return self.records.read(self.node(number).at)

    def request(self, number: int, start: int = 0) -> Iterator[tuple[str, msgspec.Raw]]:
        """Yield dialect and raw message for the messages of a request in order, from message `start` on.

        One exchange is in memory at a time.
        """
        for at, count in sorted(self._find_parts(number, start).items()):
            exchange = self.exchange(at)
            for message in exchange.append[max(0, start - self._nodes[at].keep) : count]:
                yield exchange.dialect, message

    def head(self, number: int) -> dict[str, Any]:
        """Return the decoded fields of a request other than its messages."""
        at = self._find_head(number)
        known = self._head  # several threads may share the tree
        if known[0] != at:
            self._head = known = at, as_dict(decode_foreign(self.raw_head(at)))
        return known[1]

    def raw_head(self, number: int) -> bytes:
        """Return the fields of a request other than its messages as JSON, constants included."""
        raw = self.exchange(self._find_head(number)).head
        return b"{}" if raw is None else self.records.resolve(bytes(raw))

    def converses(self, number: int) -> bool:
        """Return whether an exchange is a turn of a conversation."""
        return self.node(number).converses

    def node(self, number: int) -> ExchangeNode:
        """Return an exchange without its contents."""
        if number not in self._nodes:
            raise LedgerCorrupt(f"attempt {self.attempt} has no exchange {number}")
        return self._nodes[number]

    def count_dropped(self, number: int) -> int:
        """Return the number of messages of its parent's request that an exchange leaves out."""
        node = self.node(number)
        return 0 if node.parent is None else self._nodes[node.parent].total - node.keep

    def _find_head(self, number: int) -> int:
        """Return the exchange that stores the head of this one: itself, or the nearest ancestor with one."""
        node = self.node(number)
        while not node.has_head and node.parent is not None:
            number, node = node.parent, self._nodes[node.parent]
        return number

    def _add(self, at: int, content: bytes) -> None:
        exchange = decode_exchange(content, self.attempt)
        parent = self.node(exchange.parent) if exchange.parent is not None else None
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
            by=sys.intern(exchange.by),
        )

    def _find_parts(self, number: int, start: int) -> dict[int, int]:
        """Return the exchanges with a request's messages, each with the number of its own messages in it."""
        made: dict[int, int] = {}
        at: int | None = number
        count = self.node(number).total
        while at is not None and count > start:
            node = self._nodes[at]
            made[at] = max(0, count - node.keep)
            count = min(count, node.keep)
            at = node.parent
        return made
