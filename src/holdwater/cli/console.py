"""Writes a command's output: data to stdout, everything else to stderr. Other code's prints go to neither.

It renders no pages: they come from `view/`. `run`, `resume` and `regrade` claim the console first. Long text
goes through a pager if stdout is a terminal. `PAGER` names the pager; the default is `less`. With
`PAGER=cat`, or without a pager, all text is printed at once.
"""

from __future__ import annotations

import io
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, ClassVar

from ..api.process import disregard, read_variables

if TYPE_CHECKING:
    import subprocess

    from rich.console import RenderableType

PLAIN_WIDTH = 100  # columns of pages that are not written to a terminal
PROGRESS_SECONDS = 2.0
MOST_WAITING = 256 * 1024  # characters that wait for a slow reader of stderr; further lines are dropped
STDOUT = 1
PAGER = "less"
LESS = "FRX"  # quit if the text fits the screen, pass colours through, leave the text on the screen


class CommandConsole:
    """The real stdout and stderr of the process. Only writes to stdout can block or raise."""

    current: ClassVar[CommandConsole | None] = None  # the instance that claimed the process's descriptors

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._out = out
        self._err = err
        self._writer = TerminalWriter(err)

    @classmethod
    def claim(cls) -> CommandConsole:
        """Reserve stdout and stderr: redirect fd 1 and fd 2, also for C code and child processes."""
        occupy_standard_fds()
        flush_python()
        console = cls(os.dup(1), os.dup(2))  # CLOEXEC, like every fd that Python opens
        console.divert(Path(os.devnull))
        cls.current = console
        return console

    def divert(self, path: Path) -> None:
        """Append all other writes to fd 1 and fd 2 to `path`."""
        flush_python()
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.dup2(target, 1, inheritable=True)
            os.dup2(target, 2, inheritable=True)
        finally:
            os.close(target)

    def write_json(self, value: Any) -> None:
        """Write `value` to the real stdout as one JSON document with a final newline."""
        import msgspec

        self._put(msgspec.json.format(msgspec.json.encode(expand_defaults(value)), indent=2) + b"\n")

    def write_line(self, value: Any) -> None:
        """Write `value` to the real stdout as one line of JSON."""
        import msgspec

        self._put(msgspec.json.encode(expand_defaults(value)) + b"\n")

    def write_text(self, text: str) -> None:
        """Write a line of text to the real stdout, of any length."""
        self._put(text.encode(errors="replace") + b"\n")

    def write_page(self, renderable: RenderableType) -> None:
        """Write a page that the user requested to the real stdout."""
        self._put(render_text(renderable, self._out).encode(errors="replace"))

    def write_result(self, data: Any, page: Callable[[], RenderableType], *, json: bool) -> None:
        """Write `data` as JSON, or a page for people."""
        if json:
            self.write_json(data)
        else:
            self.write_page(page())

    @contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """Yield the real stdout as a file, for data that does not fit into memory."""
        raw = io.BufferedWriter(_StdoutFile(self._put), 256 * 1024)
        yield raw
        raw.flush()

    def _put(self, content: bytes) -> None:
        from ..core.errors import HoldwaterError

        try:
            write_all(self._out, content)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise HoldwaterError(f"cannot write to stdout: {error.strerror}") from None

    def say(self, text: str) -> None:
        """Queue a line for the real stderr; never wait for its reader."""
        self._writer.say(text)

    def print(self, renderable: RenderableType) -> None:
        """Like `say`, for a table or a page."""
        self.say(render_text(renderable, self._err).rstrip("\n"))

    @property
    def terminal(self) -> TerminalWriter | None:
        """The terminal behind stderr, for the live display; None if stderr is not one."""
        return self._writer if is_terminal(self._err) else None

    @property
    def dropped(self) -> int:
        """The number of lines dropped because stderr was read too slowly."""
        return self._writer.dropped

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait until every queued line is written; return False after `timeout` seconds."""
        return self._writer.flush(timeout)


class _StdoutFile(io.RawIOBase):
    """The raw file behind `CommandConsole.stream`."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._put(bytes(content))
        return len(content)


class TerminalWriter:
    """Writes lines, and a frame that stays below them, to an fd from its own thread.

    There is only one writer, so lines never land inside the frame. Callers never wait: if the reader is
    blocked, lines that do not fit are dropped; if it is closed, all are.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._lines: list[str] = []  # at most MOST_WAITING characters
        self._waiting = 0
        self._frame = ""
        self._drawn: list[int] = []  # the widths of the frame's lines on the screen
        self._busy = False
        self._stuck = False  # a flush timed out and nothing was written since: the next flush does not wait
        self._redraw = False
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def say(self, text: str) -> None:
        with self._changed:
            if self._waiting + len(text) > MOST_WAITING:
                self.dropped += 1
                return
            self._lines.append(text)
            self._waiting += len(text)
            self._wake()

    def draw(self, frame: str) -> None:
        """Show `frame` below the lines in place of the previous one; an empty frame clears it."""
        with self._changed:
            self._frame = frame
            self._redraw = True
            self._wake()

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        return terminal_size(self._fd)

    def flush(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._lines or self._redraw or self._busy:
                left = deadline - time.monotonic()
                if left <= 0 or self._stuck:
                    self._stuck = True
                    return False
                self._changed.wait(left)
        return True

    def _wake(self) -> None:
        if self._thread is None:
            # A daemon thread: a write that blocks forever must not keep the process alive.
            self._thread = threading.Thread(target=self._write, name="holdwater-voice", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._busy = self._stuck = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._redraw)
                lines, self._lines, self._waiting = self._lines, [], 0
                frame, self._redraw, self._busy = self._frame, False, True
            try:
                write_all(self._fd, self._compose(lines, frame).encode(errors="replace"))
            except OSError:  # closed: there is no reader left
                continue

    def _compose(self, lines: list[str], frame: str) -> str:
        said = "".join(line + "\n" for line in lines)
        if not frame and not self._drawn:
            return said
        columns, rows = self.size
        up = sum(max(1, math.ceil(width / columns)) for width in self._drawn)
        drawn = frame.split("\n")[: rows - 1] if frame else []
        self._drawn = [count_cells(line) for line in drawn]
        back = f"\x1b[{up}A\r" if up else "\r"
        above = said.replace("\n", "\x1b[K\n")
        return back + above + "".join(line + "\x1b[K\n" for line in drawn) + "\x1b[J"


def make_progress_printer(console: CommandConsole) -> Callable[[str], None]:
    """Return a function that prints progress, at most every PROGRESS_SECONDS."""
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            console.say(text)

    return tell


def occupy_standard_fds() -> None:
    """Open fds 0, 1 and 2 if they are closed: otherwise a file of ours could receive other code's prints."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens the lowest free number, which is `fd`
            os.set_inheritable(fd, True)
    # Python sets a closed stream to None, and `print` to None loses its text.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def flush_python() -> None:
    """Flush Python's buffers before the descriptors below them change."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed or full: the text was lost before
            continue


def write_all(fd: int, content: bytes) -> None:
    """Write every byte, even if another process made the descriptor non-blocking."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()


def render_text(renderable: RenderableType, fd: int) -> str:
    """Render a page for `fd`: in colour and to its width on a terminal, as plain text otherwise."""
    from rich.console import Console as Rich

    page = io.StringIO()
    terminal = is_terminal(fd)
    width = terminal_size(fd)[0] if terminal else PLAIN_WIDTH
    rich = Rich(file=page, force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False)
    rich.print(renderable)
    return "\n".join(line.rstrip() for line in page.getvalue().split("\n"))


def is_terminal(fd: int) -> bool:
    """Return whether `fd` is a terminal that can move its cursor."""
    if not os.isatty(fd):
        return False
    from rich.console import Console as Rich

    return not Rich(file=io.StringIO(), force_terminal=True).is_dumb_terminal


def terminal_size(fd: int) -> tuple[int, int]:
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns, rows = 0, 0
    return columns or 80, rows or 24


def count_cells(line: str) -> int:
    """Return the number of columns that a line of a frame takes on the screen."""
    from rich.text import Text

    return Text.from_ansi(line).cell_len


def expand_defaults(value: Any) -> Any:
    """Return `value` with every field of its records: files leave out default values, reports do not."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return {name: expand_defaults(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: expand_defaults(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [expand_defaults(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@contextmanager
def open_pager() -> Iterator[BinaryIO | IO[bytes]]:
    """Yield the file to write to; the block ends when the user quits the pager."""
    pager = start_pager() if is_terminal(STDOUT) else None
    if pager is None:
        with CommandConsole().stream() as out:
            yield out
        return
    assert pager.stdin is not None
    try:
        yield pager.stdin
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the user quit the pager
    finally:
        close_pager(pager)


def start_pager() -> subprocess.Popen[bytes] | None:
    import shlex  # `holdwater --help` needs neither
    import subprocess

    variables = read_variables()
    words = shlex.split(variables.get("PAGER", PAGER))
    if not words or words == ["cat"]:
        return None
    try:
        return subprocess.Popen(words, stdin=subprocess.PIPE, env={"LESS": LESS, **variables})
    except OSError:  # not installed
        return None


def close_pager(pager: subprocess.Popen[bytes]) -> None:
    """Wait until the user quits the pager, which may take hours. Ctrl-C goes to the pager."""
    assert pager.stdin is not None
    before = signal.signal(signal.SIGINT, disregard)
    try:
        pager.stdin.close()
    except BrokenPipeError:
        pass  # the user quit the pager
    finally:
        pager.wait()
        signal.signal(signal.SIGINT, before)
