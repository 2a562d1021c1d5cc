"""Logs lines that belong to no attempt, to the caller and to the run's `run.log`, from any thread.

Each attempt has its own log file: see `rollout/logs.py`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from ...ledger.durable_files import cannot_write, is_disk_full, open_private

MOST_KEPT = 64 * 1024  # bytes of lines that wait for room on the disk; the oldest are dropped first


class RunLog:
    """Unbuffered, so that a kill loses no logged line."""

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._lock = threading.Lock()
        self._error: OSError | None = None
        self._kept = b""  # bound: MOST_KEPT
        try:
            self._file = FileIO(path, "ab", opener=open_private)
        except OSError as error:
            raise cannot_write(path, error) from error

    def say(self, line: str) -> None:
        """Log a line. A failed write does not raise here; `check` raises it for the run."""
        self._say(line)
        with self._lock:
            if not self._file.closed:
                self._write(line.encode("utf-8", "backslashreplace"))

    def _write(self, content: bytes) -> None:
        content = self._kept + content
        try:
            self._kept = content[self._file.write(content) :]
        except OSError as error:
            self._kept = content[-MOST_KEPT:]
            if not is_disk_full(error) or len(content) > MOST_KEPT:
                self._error = self._error or error

    def check(self) -> None:
        """Raise if a line could not be written: a failed write is an error, never a warning."""
        with self._lock:
            self._write(b"")
            if self._kept:
                self._error = self._error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._error is not None:
            raise cannot_write(self._path, self._error)

    def close(self) -> None:
        with self._lock:
            self._file.close()
