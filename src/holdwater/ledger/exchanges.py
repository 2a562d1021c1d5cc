"""The exchanges of an attempt, in one segment: `exchanges/<id // 1000>/<id>.seg`.

The gateway writes them through `AttemptLog`; readers hold one at a time: a trajectory is a query, never a
list in memory. Frames are in `segment.py`, media in `blobs.py`.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ..core.errors import AttemptOver, DiskFull, LedgerCorrupt, LedgerFailed, RunFailed
from ..core.exchange import Exchange
from ..core.masking import mask_bytes
from ..core.records import NO_USAGE, ModelUsage, Record
from . import segment
from .blobs import BlobStore
from .directory import RunDirectory
from .disk_reserve import PIECES, DiskReserve
from .segment import Segment

T = TypeVar("T")

MOST_UNSYNCED = 4096  # unsynced blobs of an attempt; at this number they are synced


class AttemptLog:
    """Implements the core's `ExchangeLog` for one attempt. The first exchange creates the file."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self.path = segment_path(directory, attempt)
        self._attempt = attempt
        self.count = 0
        self._blobs = BlobStore(directory.blobs)
        self._reserve = DiskReserve(directory.reserve)
        self._segment: Segment | None = None
        self._places = array("Q")  # the byte where each exchange begins; bound: the exchanges of one attempt
        self._closed = False
        self._unsynced: set[str] = set()  # bound: MOST_UNSYNCED
        self._lock = threading.Lock()  # the gateway writes large media from a thread

    def append(self, exchange: Exchange) -> None:
        """Write an exchange so that it survives kill -9; a failed write ends the attempt."""
        if self._closed:
            raise AttemptOver("the attempt has ended")
        try:
            self._with_room(self._append, mask_bytes(_encode(exchange)))
        except LedgerFailed as e:
            raise _to_run_failure(e) from e
        self.count += 1

    def blob(self, content: bytes) -> str:
        """Store `content` once in the run; return its hash."""
        try:
            name = self._with_room(self._blobs.put, mask_bytes(content))
            with self._lock:
                self._unsynced.add(name)  # also if it existed: its writer may not have synced it
                many = len(self._unsynced) >= MOST_UNSYNCED
            if many:
                self._sync_blobs()
        except LedgerFailed as e:
            raise _to_run_failure(e) from e
        return name

    def read(self, number: int) -> Exchange:
        """Read back an exchange that was written; its media are references."""
        return decode_exchange(segment.read_record(self.path, self._places[number - 1]), self._attempt)

    def sync(self) -> None:
        """Make all exchanges so far survive power loss. Blocks on the disk: call it in a thread."""
        self._sync_blobs()
        if self._segment is not None:
            self._segment.sync()

    def close(self) -> None:
        self._closed = True
        if self._segment is not None:
            self._segment.close()

    def _append(self, content: bytes) -> None:
        if self._segment is None:
            self._segment = Segment.open(self.path)
        at = self._segment.size
        self._segment.append(content)
        self._places.append(at)

    def _with_room(self, write: Callable[[bytes], T], content: bytes) -> T:
        """On a full disk, retry with space from the first half of the reserve: the rest is for verdicts."""
        while True:
            try:
                return write(content)
            except DiskFull:
                fits = len(content) <= self._reserve.bytes // 2
                if not (fits and self._reserve.release_piece(keep=PIECES // 2)):
                    raise

    def _sync_blobs(self) -> None:
        with self._lock:
            names, self._unsynced = self._unsynced, set()
        self._blobs.sync(names)


def _to_run_failure(error: LedgerFailed) -> RunFailed:
    return RunFailed(error.message, error.hint, kind="disk" if isinstance(error, DiskFull) else "record")


class AttemptSpending(Record, frozen=True):
    """The number of exchanges and the usage of an attempt, summed from its segment."""

    exchanges: int = 0
    usage: ModelUsage = NO_USAGE
    replayed_usage: ModelUsage = NO_USAGE

    def plus(self, exchange: Exchange) -> AttemptSpending:
        return AttemptSpending(
            exchanges=self.exchanges + 1,
            usage=self.usage.plus(exchange.usage),
            replayed_usage=self.replayed_usage.plus(exchange.saved),
        )


def read_exchanges(directory: RunDirectory, attempt: int) -> Iterator[Exchange]:
    """Yield the exchanges of an attempt in order, one in memory at a time; media stay references."""
    for content in read_frames(directory, attempt):
        yield decode_exchange(content, attempt)


def read_frames(directory: RunDirectory, attempt: int) -> Iterator[bytes]:
    """Yield the encoded exchanges of an attempt; none if it has no segment."""
    path = segment_path(directory, attempt)
    if path.exists():
        yield from segment.read_records(path)


def sum_spending(directory: RunDirectory, attempt: int) -> AttemptSpending:
    """Sum the usage of an attempt from its segment, if the attempt can no longer report it."""
    spent = AttemptSpending()
    for exchange in read_exchanges(directory, attempt):
        spent = spent.plus(exchange)
    return spent


def segment_path(directory: RunDirectory, attempt: int) -> Path:
    return directory.exchanges / str(attempt // 1000) / f"{attempt}.seg"


def decode_exchange(content: bytes, attempt: int) -> Exchange:
    try:
        stored = _decoder.decode(content)
    except msgspec.MsgspecError as e:
        raise LedgerCorrupt(f"invalid exchange record in attempt {attempt}: {e}") from e
    fields = msgspec.structs.asdict(stored)
    for name in ("head", "reply", "chunks", "original"):
        fields[name] = None if bytes(fields[name]) == b"null" else fields[name]
    return Exchange(**fields)


class _StoredExchange(Record, frozen=True):
    """The decoded form of an exchange: msgspec has no optional raw values."""

    number: int
    parent: int | None
    keep: int
    append: tuple[msgspec.Raw, ...]
    head: msgspec.Raw
    reply: msgspec.Raw
    status: int
    dialect: str = "chat"
    streamed: bool = False
    usage: ModelUsage = NO_USAGE
    error: str = ""
    started: float = 0.0
    seconds: float = 0.0
    identity: str = ""
    saved: ModelUsage = NO_USAGE
    version: str = ""
    by: str = ""
    chunks: msgspec.Raw = msgspec.Raw(b"null")
    original: msgspec.Raw = msgspec.Raw(b"null")


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_StoredExchange)
