"""What a command says: data to stdout, everything else to stderr, and nobody else's prints to either.

It renders nothing of its own: pages come from `view/`. `run`, `resume` and `regrade` claim the console first.
"""

from __future__ import annotations

import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar

if TYPE_CHECKING:
    from rich.console import RenderableType

PLAIN_WIDTH = 100  # of pages that are not written to a terminal
TELL_EVERY = 2.0  # seconds
MOST_WAITING = 256 * 1024  # characters that wait for a slow reader of stderr; what does not fit is dropped


class Console:
    """The real stdout and stderr of the process. Only `data` and `page` can block or raise."""

    current: ClassVar[Console | None] = None  # who claimed the process's descriptors

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._out = out
        self._err = err
        self._voice = Voice(err)

    @classmethod
    def claim(cls) -> Console:
        """Keep stdout and stderr to ourselves: fd 1 and fd 2 now lead elsewhere, for C and children too."""
        occupy_standard_fds()
        flush_python()
        console = cls(os.dup(1), os.dup(2))  # CLOEXEC, as every fd that Python makes
        console.divert(Path(os.devnull))
        cls.current = console
        return console

    def divert(self, path: Path) -> None:
        """Let what anybody writes to fd 1 and fd 2 be appended to `path`."""
        flush_python()
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.dup2(target, 1, inheritable=True)
            os.dup2(target, 2, inheritable=True)
        finally:
            os.close(target)

    def data(self, value: Any) -> None:
        """Write `value` as one JSON document with a line end to the real stdout."""
        import msgspec

        self._put(msgspec.json.format(msgspec.json.encode(whole(value)), indent=2) + b"\n")

    def page(self, renderable: RenderableType) -> None:
        """Write a page that the user asked for to the real stdout."""
        self._put(render(renderable, self._out).encode(errors="replace"))

    @contextmanager
    def stream(self) -> Iterator[BinaryIO]:
        """The real stdout as a file, for more data than fits into memory."""
        raw = io.BufferedWriter(_Stdout(self._put), 256 * 1024)
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
        """Write a line to the real stderr, when its reader has time for it."""
        self._voice.say(text)

    def print(self, renderable: RenderableType) -> None:
        """As `say`, for a table or a page."""
        self.say(render(renderable, self._err).rstrip("\n"))

    @property
    def terminal(self) -> Voice | None:
        """The terminal behind stderr, for the live display; None where there is none."""
        return self._voice if is_terminal(self._err) else None

    @property
    def dropped(self) -> int:
        """How many lines nobody read in time."""
        return self._voice.dropped

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait until all that was said is written; False if it was not within `timeout` seconds."""
        return self._voice.flush(timeout)


class _Stdout(io.RawIOBase):
    """What `Console.stream` writes to."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._put(bytes(content))
        return len(content)


class Voice:
    """Writes lines, and a frame that stays below them, to an fd from a thread of its own.

    There is one writer, so lines never land inside the frame. Its callers never wait: a blocked reader costs
    the lines that do not fit, a closed one costs them all.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._changed = threading.Condition()
        self._lines: list[str] = []  # at most MOST_WAITING characters
        self._waiting = 0
        self._frame = ""
        self._drawn: list[int] = []  # the widths of the frame's lines on the screen
        self._busy = False
        self._stuck = False  # a flush timed out and nothing was written since: the next one does not wait too
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
        """Show `frame` below the lines in place of the one before; an empty one clears it."""
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
            # A daemon: a write that blocks for ever must not keep the process.
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
            except OSError:  # closed or gone: there is nobody left to tell
                continue

    def _compose(self, lines: list[str], frame: str) -> str:
        said = "".join(line + "\n" for line in lines)
        if not frame and not self._drawn:
            return said
        columns, rows = self.size
        up = sum(max(1, math.ceil(width / columns)) for width in self._drawn)
        drawn = frame.split("\n")[: rows - 1] if frame else []
        self._drawn = [cells(line) for line in drawn]
        back = f"\x1b[{up}A\r" if up else "\r"
        above = said.replace("\n", "\x1b[K\n")
        return back + above + "".join(line + "\x1b[K\n" for line in drawn) + "\x1b[J"


def teller(console: Console) -> Callable[[str], None]:
    """Says how far it is, now and then, to whom waits."""
    last = time.monotonic()

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_EVERY:
            last = time.monotonic()
            console.say(text)

    return tell


def occupy_standard_fds() -> None:
    """Open what our parent left closed: no file of ours may become fd 0, 1 or 2 and get strangers' prints."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, that is, `fd`
            os.set_inheritable(fd, True)
    # Python leaves None where a descriptor was closed, and `print` to None goes astray.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def flush_python() -> None:
    """Let what Python has buffered leave before the descriptors below it change."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, gone or full: it was lost before we came
            continue


def write_all(fd: int, content: bytes) -> None:
    """Write every byte, also to a descriptor that its other holders made non-blocking."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()


def render(renderable: RenderableType, fd: int) -> str:
    """What `renderable` looks like on `fd`: in colour and to its width on a terminal, plain elsewhere."""
    from rich.console import Console as Rich

    page = io.StringIO()
    terminal = is_terminal(fd)
    width = terminal_size(fd)[0] if terminal else PLAIN_WIDTH
    rich = Rich(file=page, force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False)
    rich.print(renderable)
    return "\n".join(line.rstrip() for line in page.getvalue().split("\n"))


def is_terminal(fd: int) -> bool:
    """Is `fd` a terminal that can move its cursor?"""
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


def cells(line: str) -> int:
    """How many columns a line of a frame takes on the screen."""
    from rich.text import Text

    return Text.from_ansi(line).cell_len


def whole(value: Any) -> Any:
    """`value` with every field of its records: on disk defaults are left out, in reports they are not."""
    import msgspec

    if isinstance(value, msgspec.Struct):
        return {name: whole(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole(item) for item in value]
    return str(value) if isinstance(value, Path) else value
