"""What a worker notes of its verdicts before it reports them, for the case that nobody is left to hear it.

`exchanges/worker-<token>-<worker>.journal`, a segment of verdicts. Read by `recovery.py` on resume.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..core.errors import LedgerCorrupt
from ..core.records import Verdict
from . import segment
from .directory import RunDirectory
from .segment import Segment
from .text import encode


class Journal:
    """One worker's verdicts, in the order in which its attempts ended."""

    def __init__(self, directory: RunDirectory, worker: int, token: int) -> None:
        self.path = directory.exchanges / f"worker-{token}-{worker}.journal"
        self._segment: Segment | None = None

    def append(self, verdict: Verdict) -> None:
        """Write it so that it survives kill -9."""
        if self._segment is None:
            self._segment = Segment.open(self.path)
        self._segment.append(encode(verdict))

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()

    def remove(self) -> None:
        """All its verdicts are committed."""
        self.close()
        self.path.unlink(missing_ok=True)


def journals(directory: RunDirectory) -> list[Path]:
    return sorted(directory.exchanges.glob("worker-*.journal"))


def read_journals(directory: RunDirectory) -> Iterator[Verdict]:
    """Every verdict that a worker of this run noted, committed or not."""
    for path in journals(directory):
        for content in segment.read(path):
            try:
                yield _decoder.decode(content)
            except msgspec.MsgspecError as e:
                raise LedgerCorrupt(f"`{path}` holds something that is no verdict: {e}") from e


_decoder = msgspec.msgpack.Decoder(Verdict)
