"""The display as a person at a terminal sees it: the command in a pseudo-terminal, its frames read back."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from tests.wait_bounds import stretch


def seen_on_a_terminal(words: list[str], columns: int) -> str:
    """Everything that the command writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "holdwater", *words],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert process.wait(stretch(30)) == 0
    return seen.decode(errors="replace")


def test_frames_are_drawn_during_a_run_and_the_page_at_its_end(tmp_path: Path) -> None:
    seen = seen_on_a_terminal(["run", "demo", "--limit", "4", "--out", str(tmp_path / "run")], columns=90)

    frames, _, page = seen.rpartition("outcome")
    assert "of 4" in frames and "running" in frames and "memory" in frames, seen
    assert "holdwater audit" in page
    assert "ended early" not in seen
