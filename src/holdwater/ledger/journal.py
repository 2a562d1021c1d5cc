"""The verdicts that a worker writes down before it reports them, in case it or its conductor dies first.

`exchanges/worker-<token>-<worker>.journal`, a segment of verdicts. `run/remains.py` reads the journal of a
dead worker, `recovery.py` those that a dead conductor left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ..core.records import Verdict
from . import segment
from .directory import RunDirectory
from .segment import Segment
from .text import encode


class Journal:
    """One worker's verdicts, in the order in which its attempts ended."""

    def __init__(self, directory: RunDirectory, worker: int, token: int) -> None:
        self.path = journal_path(directory, worker, token)
        self._segment: Segment | None = None

    def append(self, verdict: Verdict) -> None:
        """Write it so that it survives kill -9."""
        if self._segment is None:
            self._segment = Segment.open(self.path)
        self._segment.append(encode(verdict))

    def sync(self) -> None:
        """Make all verdicts so far survive power loss. Blocks for as long as the disk takes."""
        if self._segment is not None:
            self._segment.sync()

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()

    def remove(self) -> None:
        """All its verdicts are committed."""
        self.close()
        self.path.unlink(missing_ok=True)


def journal_path(directory: RunDirectory, worker: int, token: int) -> Path:
    return directory.exchanges / f"worker-{token}-{worker}.journal"


def journals(directory: RunDirectory) -> list[Path]:
    return sorted(directory.exchanges.glob("worker-*.journal"))


def read_journal(path: Path, on_damage: Callable[[str], None]) -> Iterator[Verdict]:
    """Every good verdict of a journal, committed or not; `on_damage` gets a sentence for each bad record."""

    def report(at: int) -> None:
        on_damage(f"the journal `{path}` is damaged at byte {at}")

    try:
        for content in segment.read(path, report):
            try:
                yield _decoder.decode(content)
            except msgspec.MsgspecError as e:
                on_damage(f"the journal `{path}` holds a record that is no verdict: {e}")
    except FileNotFoundError:
        return  # the worker has not come to a verdict, or all of its verdicts are committed


_decoder = msgspec.msgpack.Decoder(Verdict)
