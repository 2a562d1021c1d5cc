"""The journal of a worker: verdicts that it writes before it reports them, in case it or its conductor dies.

A journal is a segment of verdicts, `exchanges/worker-<token>-<worker>.journal`. `run/fleet/worker_remains.py`
reads the journal of a dead worker, `recovery.py` the journals that a dead conductor left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ..core.records import Verdict
from . import segment
from .directory import RunDirectory
from .record_encoding import encode_record
from .segment import Segment


class Journal:
    """The verdicts of one worker, in the order in which its attempts ended."""

    def __init__(self, directory: RunDirectory, worker: int, token: int) -> None:
        self.path = journal_path(directory, worker, token)
        self._segment: Segment | None = None

    def append(self, verdict: Verdict) -> None:
        """Write a verdict so that it survives kill -9."""
        if self._segment is None:
            self._segment = Segment.open(self.path)
        self._segment.append(encode_record(verdict))

    def sync(self) -> None:
        """Make all verdicts so far survive power loss. Blocks on the disk."""
        if self._segment is not None:
            self._segment.sync()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()

    def remove(self) -> None:
        """Remove the journal. All its verdicts must be committed."""
        self.close()
        self.path.unlink(missing_ok=True)


def journal_path(directory: RunDirectory, worker: int, token: int) -> Path:
    return directory.exchanges / f"worker-{token}-{worker}.journal"


def list_journals(directory: RunDirectory) -> list[Path]:
    return sorted(directory.exchanges.glob("worker-*.journal"))


def read_journal(path: Path, on_damage: Callable[[str], None]) -> Iterator[Verdict]:
    """Yield every valid verdict, committed or not; `on_damage` receives a sentence for each bad record."""

    def report(at: int) -> None:
        on_damage(f"the journal `{path}` is damaged at byte {at}")

    try:
        for content in segment.read_records(path, report):
            try:
                yield _decoder.decode(content)
            except msgspec.MsgspecError as e:
                on_damage(f"the journal `{path}` holds an invalid verdict: {e}")
    except FileNotFoundError:
        return  # the worker has written no verdict, or all its verdicts are committed


_decoder = msgspec.msgpack.Decoder(Verdict)
