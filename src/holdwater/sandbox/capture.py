"""Captures a command's output in bounded memory: its beginning, its end, and a log file up to a limit.

`command.py` reads the pipes.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from typing import Protocol

from ..core.masking import KeyMask
from ..core.records import CommandResult
from ..ledger.durable_files import make_directory, open_private

KEPT = 32 * 1024  # bytes kept from each end of a stream
KEPT_IN_LOG = 16 * 1024 * 1024  # bytes of output of all commands of an attempt


class StreamCapture:
    """Keeps the first and the last `KEPT` bytes of one stream."""

    def __init__(self, log: CommandLog | None = None) -> None:
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()  # bound: 4 x KEPT, cut as it grows
        self._log = log
        self._mask = log.add_mask() if log is not None else None

    def feed(self, chunk: bytes) -> None:
        self.total += len(chunk)
        if self._log is not None and self._mask is not None:
            self._log.write(self._mask.feed(chunk))
        room = KEPT - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 3 * KEPT:
            del self._tail[:-KEPT]

    @property
    def truncated(self) -> bool:
        return self.total > 2 * KEPT

    def text(self) -> str:
        if not self.truncated:
            return (self._head + self._tail).decode(errors="replace")
        left_out = f"\n[... {self.total - 2 * KEPT} bytes left out ...]\n"
        return self._head.decode(errors="replace") + left_out + self._tail[-KEPT:].decode(errors="replace")


class FinishedCommand(Protocol):
    """A command that has ended."""

    stdout: StreamCapture
    stderr: StreamCapture
    seconds: float
    timed_out: bool


def build_result(command: FinishedCommand, code: int) -> CommandResult:
    """Return a command's exit status, times and captured output as a result."""
    return CommandResult(
        exit_code=code,
        stdout=command.stdout.text(),
        stderr=command.stderr.text(),
        seconds=command.seconds,
        timed_out=command.timed_out,
        truncated=command.stdout.truncated or command.stderr.truncated,
    )


class CommandLog:
    """A log file that takes a command's output up to `limit` bytes, then one note, then nothing more.

    Two streams write to the file, each through its own mask: a key may arrive in pieces.
    """

    def __init__(self, path: Path, limit: int = KEPT_IN_LOG) -> None:
        make_directory(path.parent)
        self.error: OSError | None = None  # kept until the command has ended: its pipes are drained first
        self._file = FileIO(path, "ab", opener=open_private)
        self._room = limit - self._file.tell()
        self._limit = limit
        self._masks: list[KeyMask] = []  # bound: the streams of a command
        self._full = self._room < 0  # an earlier command has filled the file and written the note

    def write(self, chunk: bytes) -> None:
        if self._full or self.error is not None:
            return
        try:
            self._put(chunk[: self._room])
            if len(chunk) > self._room:
                self._full = True
                self._put(f"\n[... cut: more than {self._limit} bytes ...]\n".encode())
        except OSError as e:
            self.error = e
        self._room -= len(chunk)

    def add_mask(self) -> KeyMask:
        """Return a new mask, through which one more stream goes before it is written."""
        self._masks.append(KeyMask())
        return self._masks[-1]

    def close(self) -> None:
        for mask in self._masks:
            self.write(mask.flush())
        self._file.close()

    def _put(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:
            view = view[self._file.write(view) or 0 :]
