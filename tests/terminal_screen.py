"""The command on a terminal of a given width: what a user sees, as plain rows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Mapping
from pathlib import Path

from tests.forked_command import ForkedCommand
from tests.wait_bounds import stretch

SOURCE = Path(__file__).parents[1] / "src"
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[=>]|\][^\x07]*\x07)")


class Screen:
    """Everything that a command wrote to its terminal, and its exit status."""

    def __init__(self, text: str, status: int) -> None:
        self.text = text
        self.status = status

    @property
    def rows(self) -> list[str]:
        return ESCAPES.sub("", self.text).replace("\r\n", "\n").splitlines()


def on_terminal(
    *words: str, columns: int, variables: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Screen:
    """Run `holdwater` to its end with a terminal for stdin, stdout and stderr."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm", "PAGER": "cat", **(variables or {})}
    process = ForkedCommand(words, terminal, terminal, stdin=terminal, env=env, cwd=cwd)
    os.close(terminal)
    try:
        text = _read(screen)
        return Screen(text, process.wait(stretch(60)))
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def _read(screen: int, seconds: float = 120.0) -> str:
    found = b""
    end = time.monotonic() + stretch(seconds)
    while True:
        assert time.monotonic() < end, f"not over: {found[-2000:]!r}"
        ready, _, _ = select.select([screen], [], [], 0.2)
        if not ready:
            continue
        try:
            piece = os.read(screen, 65536)
        except OSError:  # the last holder of the terminal is gone
            piece = b""
        if not piece:
            return found.decode(errors="replace")
        found += piece
