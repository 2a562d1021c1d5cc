"""The exchanges of an attempt: one segment each, `exchanges/<id // 1000>/<id>.seg`.

Written by the gateway through `AttemptLog`, read back one at a time: a trajectory is a query, never a list in
memory. Frames are in `segment.py`, media in `media.py`.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ..core.errors import AttemptOver, DiskFull, LedgerCorrupt, LedgerFailed, RunFailed
from ..core.masking import mask_bytes
from ..core.records import NO_USAGE, Exchange, Record, Usage
from . import segment
from .blobs import Blobs
from .directory import RunDirectory
from .media import resolve
from .reserve import PIECES, Reserve
from .segment import Segment

T = TypeVar("T")

MOST_UNSYNCED = 4096  # blobs that an attempt may refer to before they are synced


class AttemptLog:
    """A core `ExchangeLog`: one attempt's exchanges. The file is made with the first."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self.path = segment_path(directory, attempt)
        self._attempt = attempt
        self.count = 0
        self._blobs = Blobs(directory.blobs)
        self._reserve = Reserve(directory.reserve)
        self._segment: Segment | None = None
        self._places = array("Q")  # the byte where each exchange begins; bound: those of one attempt
        self._closed = False
        self._unsynced: set[str] = set()  # bound: MOST_UNSYNCED
        self._lock = threading.Lock()  # large media are written from a thread of the gateway's

    def append(self, exchange: Exchange) -> None:
        """Write it so that it survives kill -9; what cannot be written ends the attempt."""
        if self._closed:
            raise AttemptOver("the attempt has ended")
        try:
            self._with_room(self._append, mask_bytes(_encode(exchange)))
        except LedgerFailed as e:
            raise _unwritten(e) from e
        self.count += 1

    def blob(self, content: bytes) -> str:
        """Keep `content` once in the run; its hash."""
        try:
            name = self._with_room(self._blobs.put, mask_bytes(content))
            with self._lock:
                self._unsynced.add(name)  # also when it was there: its writer may not have synced it
                many = len(self._unsynced) >= MOST_UNSYNCED
            if many:
                self._sync_blobs()
        except LedgerFailed as e:
            raise _unwritten(e) from e
        return name

    def read(self, number: int) -> Exchange:
        """An exchange that was written, as it stands in the record."""
        return decode(segment.read_at(self.path, self._places[number - 1]), self._attempt)

    def sync(self) -> None:
        """Make all of it survive power loss. Blocks for as long as the disk takes: call it in a thread."""
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
        """Out of the reserve if need be, but of its first half alone: the rest is for verdicts."""
        while True:
            try:
                return write(content)
            except DiskFull:
                fits = len(content) <= self._reserve.bytes // 2
                if not (fits and self._reserve.give(keep=PIECES // 2)):
                    raise

    def _sync_blobs(self) -> None:
        with self._lock:
            names, self._unsynced = self._unsynced, set()
        self._blobs.sync(names)


def _unwritten(error: LedgerFailed) -> RunFailed:
    return RunFailed(error.message, error.hint, kind="disk" if isinstance(error, DiskFull) else "record")


class Spending(Record, frozen=True):
    """What the exchanges of an attempt on disk add up to."""

    exchanges: int = 0
    usage: Usage = NO_USAGE
    saved: Usage = NO_USAGE

    def plus(self, exchange: Exchange) -> Spending:
        return Spending(
            exchanges=self.exchanges + 1,
            usage=self.usage.plus(exchange.usage),
            saved=self.saved.plus(exchange.saved),
        )


def read_exchanges(directory: RunDirectory, attempt: int) -> Iterator[Exchange]:
    """The exchanges of an attempt in order, one in memory at a time; media stay references."""
    for content in read_frames(directory, attempt):
        yield decode(content, attempt)


def read_frames(directory: RunDirectory, attempt: int) -> Iterator[bytes]:
    """The exchanges of an attempt as they stand on disk."""
    path = segment_path(directory, attempt)
    if path.exists():
        yield from segment.read(path)


def spending(directory: RunDirectory, attempt: int) -> Spending:
    """What an attempt that can no longer say so itself has used."""
    spent = Spending()
    for exchange in read_exchanges(directory, attempt):
        spent = spent.plus(exchange)
    return spent


def conversation(directory: RunDirectory, attempt: int, number: int) -> list[msgspec.Raw]:
    """The messages of an exchange's request as they were sent, media resolved."""
    parts: dict[int, list[msgspec.Raw]] = {}  # bound: the messages of one request
    wanted = _wanted(directory, attempt, number)
    blobs = Blobs(directory.blobs)
    for exchange in read_exchanges(directory, attempt):
        if exchange.number in wanted:
            kept = exchange.append[: wanted[exchange.number]]
            parts[exchange.number] = [msgspec.Raw(resolve(bytes(message), blobs)) for message in kept]
    return [message for part in sorted(parts) for message in parts[part]]


def head_of(directory: RunDirectory, attempt: int, number: int) -> bytes:
    """The other keys of an exchange's request as they were sent, its constants in their places."""
    headed: dict[int, int] = {}  # exchange -> the one that has its head; bound: those of one attempt
    for exchange in read_exchanges(directory, attempt):
        inherits = exchange.head is None and exchange.parent is not None
        headed[exchange.number] = headed.get(exchange.parent or 0, 0) if inherits else exchange.number
    for exchange in read_exchanges(directory, attempt):
        if exchange.number == headed.get(number) and exchange.head is not None:
            return resolve(bytes(exchange.head), Blobs(directory.blobs))
    raise LedgerCorrupt(f"attempt {attempt} has no head for exchange {number}")


def segment_path(directory: RunDirectory, attempt: int) -> Path:
    return directory.exchanges / str(attempt // 1000) / f"{attempt}.seg"


def decode(content: bytes, attempt: int) -> Exchange:
    try:
        stored = _decoder.decode(content)
    except msgspec.MsgspecError as e:
        raise LedgerCorrupt(f"an exchange of attempt {attempt} is not one: {e}") from e
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
    for name in ("head", "reply", "chunks"):
        fields[name] = _present(fields[name])
    return Exchange(**fields)


def _wanted(directory: RunDirectory, attempt: int, number: int) -> dict[int, int]:
    """Which exchanges make up a request, and how many of each one's own messages."""
    shape: dict[int, tuple[int | None, int, int]] = {}  # bound: a few words for each exchange of one attempt
    for exchange in read_exchanges(directory, attempt):
        shape[exchange.number] = (exchange.parent, exchange.keep, len(exchange.append))
        if exchange.number == number:
            break
    wanted: dict[int, int] = {}
    at: int | None = number
    keep: int | None = None
    while keep is None or keep > 0:
        if at is None or at not in shape or at in wanted:
            raise LedgerCorrupt(f"attempt {attempt} has no exchange {at}")
        parent, kept, appended = shape[at]
        wanted[at] = appended if keep is None else max(0, keep - kept)
        if wanted[at] > appended:
            raise LedgerCorrupt(f"attempt {attempt} keeps more messages of exchange {at} than it has")
        keep = kept if keep is None else min(keep, kept)
        at = parent
    return wanted


class _Stored(Record, frozen=True):
    """An exchange as it is decoded: raw values cannot be optional."""

    number: int
    parent: int | None
    keep: int
    append: tuple[msgspec.Raw, ...]
    head: msgspec.Raw
    reply: msgspec.Raw
    status: int
    dialect: str = "chat"
    streamed: bool = False
    usage: Usage = NO_USAGE
    error: str = ""
    started: float = 0.0
    seconds: float = 0.0
    identity: str = ""
    saved: Usage = NO_USAGE
    version: str = ""
    by: str = ""
    chunks: msgspec.Raw = msgspec.Raw(b"null")


def _present(raw: msgspec.Raw) -> msgspec.Raw | None:
    return None if bytes(raw) == b"null" else raw


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(_Stored)
