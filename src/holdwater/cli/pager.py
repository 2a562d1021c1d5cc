"""Long text for a person: through a pager where stdout is a terminal, straight to stdout elsewhere.

`PAGER` names the pager, `less` is the default. `PAGER=cat`, or a machine without one, prints all at once.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, BinaryIO

from ..run.signals import disregard
from .console import Console, is_terminal

STDOUT = 1
PAGER = "less"
LESS = "FRX"  # end at once if it fits the screen, pass colours through, leave the text on the screen


@contextmanager
def paged() -> Iterator[BinaryIO | IO[bytes]]:
    """Where to write; the block ends when the reader has seen enough."""
    pager = start_pager() if is_terminal(STDOUT) else None
    if pager is None:
        with Console().stream() as out:
            yield out
        return
    assert pager.stdin is not None
    try:
        yield pager.stdin
    except (BrokenPipeError, KeyboardInterrupt):
        pass  # the reader has seen enough
    finally:
        close_pager(pager)


def start_pager() -> subprocess.Popen[bytes] | None:
    from ..run.config import environment

    variables = environment().inherited
    words = shlex.split(variables.get("PAGER", PAGER))
    if not words or words == ["cat"]:
        return None
    try:
        return subprocess.Popen(words, stdin=subprocess.PIPE, env={"LESS": LESS, **variables})
    except OSError:  # it is not installed
        return None


def close_pager(pager: subprocess.Popen[bytes]) -> None:
    """Wait for the reader, who may take hours. Ctrl-C belongs to the pager."""
    assert pager.stdin is not None
    before = signal.signal(signal.SIGINT, disregard)
    try:
        pager.stdin.close()
    except BrokenPipeError:
        pass  # the reader has seen enough
    finally:
        pager.wait()
        signal.signal(signal.SIGINT, before)
