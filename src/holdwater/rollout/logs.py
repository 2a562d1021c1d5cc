"""Routes log records and prints to one log file per attempt, by the current context, in threads too.

A record outside of all attempts goes to `elsewhere`. Output of a thread whose attempt is closed is dropped.
`RunLog` logs lines that belong to no attempt, to the caller and to the run's `run.log`, from any thread.
"""

from __future__ import annotations

import contextvars
import errno
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, TextIO

from ..core.masking import mask_text
from ..ledger.durable_files import cannot_write, is_disk_full, open_private

LONGEST_LOG = 64 * 1024 * 1024
FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
MOST_KEPT = 64 * 1024  # bytes of lines that wait for room on the disk; the oldest are dropped first


class LogSink:
    """An attempt's log file, created with the first line."""

    def __init__(self, path: Callable[[], Path]) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._written = 0
        self.error: OSError | None = None  # a failed write; the code that prints does not get it

    def write(self, text: str) -> None:
        data = mask_text(text).encode("utf-8", "backslashreplace")
        with self._lock:
            if self._closed or self._written > LONGEST_LOG:
                return
            self._written += len(data)
            if self._written > LONGEST_LOG:
                data = b"\n[the log ends here: it is longer than is kept]\n"
            try:
                if self._file is None:
                    self._file = io.FileIO(self._path(), "ab", opener=open_private)
                self._file.write(data)
            except OSError as error:
                self.error = error

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()
                self._file = None


_sink: contextvars.ContextVar[LogSink | None] = contextvars.ContextVar("holdwater_attempt_log", default=None)


@contextmanager
def open_attempt_log(path: Callable[[], Path]) -> Iterator[LogSink]:
    """Send the output of this context and its threads to the file at `path` until the block ends."""
    sink = LogSink(path)
    token = _sink.set(sink)
    try:
        yield sink
    finally:
        _sink.reset(token)
        sink.close()


@contextmanager
def route_output(elsewhere: Callable[[str], None]) -> Iterator[None]:
    """Route log records and prints by context; lines outside of all attempts go to `elsewhere`."""
    handler = _SinkHandler(elsewhere)
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    before = root.level, sys.stdout, sys.stderr, threading.Thread.start, ThreadPoolExecutor.submit
    root.addHandler(handler)
    root.setLevel(min(root.level, logging.INFO))
    sys.stdout, sys.stderr = _RoutedStream(sys.stdout), _RoutedStream(sys.stderr)
    threading.Thread.start = _start_in_context(before[3])  # type: ignore[method-assign, assignment]
    ThreadPoolExecutor.submit = _submit_in_context(before[4])  # type: ignore[method-assign]
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before[0])
        sys.stdout, sys.stderr = before[1], before[2]
        threading.Thread.start = before[3]  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = before[4]  # type: ignore[method-assign]


class _SinkHandler(logging.Handler):
    def __init__(self, elsewhere: Callable[[str], None]) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except Exception as error:  # boundary: an unformattable record is logged too  # noqa: BLE001
            line = f"{record.levelname} {record.name} unformattable record: {error}\n"
        sink = _sink.get()
        (sink.write if sink is not None else self._elsewhere)(line)


class _RoutedStream(io.TextIOBase):
    """Replaces `sys.stdout` and `sys.stderr`."""

    def __init__(self, original: TextIO) -> None:
        self._original = original

    def write(self, text: str) -> int:
        sink = _sink.get()
        if sink is not None:
            sink.write(text)
        elif self._original is not None:
            self._original.write(text)
        return len(text)

    def flush(self) -> None:
        if _sink.get() is None and self._original is not None:
            self._original.flush()

    def close(self) -> None:
        """Do nothing: the original stream is not ours to close. The garbage collector calls this, too."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> io.RawIOBase:
        return _RoutedBytes(self)


class _RoutedBytes(io.RawIOBase):
    """The bytes below a `_RoutedStream`, for code that writes to `sys.stdout.buffer`."""

    def __init__(self, stream: _RoutedStream) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._stream.write(content.decode("utf-8", "backslashreplace"))
        return len(content)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: the original stream is not ours to close."""

    def writable(self) -> bool:
        return True


def _start_in_context(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def start_thread(self: threading.Thread) -> None:
        if _sink.get() is not None:
            context = contextvars.copy_context()
            own = {name: value for name, value in self.__dict__.items() if name == "run"}

            def run() -> None:
                del self.__dict__["run"]  # else the thread and this function are a reference cycle
                self.__dict__.update(own)
                context.run(self.run)

            self.run = run  # type: ignore[method-assign]
        start(self)

    return start_thread


def _submit_in_context(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    def submit_call(
        self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if _sink.get() is None:
            return submit(self, function, *args, **kwargs)
        return submit(self, contextvars.copy_context().run, function, *args, **kwargs)

    return submit_call


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
