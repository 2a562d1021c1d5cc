"""Shows long text: through a pager if stdout is a terminal, directly on stdout otherwise.

`PAGER` names the pager; the default is `less`. With `PAGER=cat`, or without a pager, all text is printed at
once.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

from ..api.process import disregard, read_variables
from .console import CommandConsole, is_terminal

STDOUT = 1
PAGER = "less"
LESS = "FRX"  # quit if the text fits the screen, pass colours through, leave the text on the screen


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
