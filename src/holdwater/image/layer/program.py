"""Programs that a build needs: what they print goes to its log, bounded; they end with us, whoever kills us.

Which programs those are is the builders' part.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.errors import BadInput, ImageFailed
from ...core.helper_environment import KEY_VARIABLES
from ...core.records import MiB
from ...ledger.private import make_directory, open_private

CHUNK = 64 * 1024
KEPT_IN_LOG = 16 * MiB  # bytes of all that a build's programs print
KEPT = 1 * MiB  # bytes of what one prints, for whoever asked
TAIL = 20  # lines of a failed program that its error quotes
TAIL_BYTES = 2000
LINE = 500  # characters of a command in the log
PATIENCE = 5.0  # seconds for a killed program to be gone

# Execs a program that the kernel kills when we die. A function between fork and exec could do the same, but
# may hang in a process with threads.
TIE = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
SECRET = re.compile(rb"(?<=://)[^/@\s]+(?=@)")  # of an address: `https://user:key@index`


class Programs:
    """Runs programs one after the other, for one build."""

    def __init__(self, log: Path, cwd: Path, keep: Sequence[int], env: Mapping[str, str]) -> None:
        self.log = log
        self._cwd = cwd
        self._keep = tuple(keep)  # file descriptors that they inherit: locks of what they write to
        self._env = env  # on top of ours
        make_directory(log.parent)

    async def run(self, argv: Sequence[str | Path], timeout: float, statuses: Sequence[int] = (0,)) -> str:
        """What the program prints. Any other status is an `ImageFailed` that quotes its last lines."""
        words = [str(word) for word in argv]
        self._write(f"$ {shlex.join(words)[:LINE]}\n".encode())
        process = await self._start(words)
        printed = bytearray()
        try:
            async with asyncio.timeout(timeout):
                await self._drain(process, printed)
                status = await process.wait()
        except TimeoutError:
            await _end(process)
            raise self._failed(words[0], f"took longer than {timeout:g} s", printed) from None
        except BaseException:  # boundary: given back, then raised again
            await _end(process)
            raise
        if status not in statuses:
            raise self._failed(words[0], f"ended with status {status}", printed)
        return printed.decode(errors="replace")

    async def _start(self, words: list[str]) -> Process:
        # The operator's settings of proxies and indexes count here; keys are for no package's build script.
        settings = [f"-u{name}" for name in sorted(KEY_VARIABLES)]
        settings += [f"{name}={value}" for name, value in self._env.items()]
        tied = [sys.executable, "-I", "-S", "-c", TIE, str(os.getpid()), "env", *settings, *words]
        return await asyncio.create_subprocess_exec(
            *tied,
            cwd=self._cwd,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            pass_fds=self._keep,
        )

    async def _drain(self, process: Process, printed: bytearray) -> None:
        assert process.stdout is not None
        line = b""  # an address is only known whole
        while chunk := await process.stdout.read(CHUNK):
            printed += chunk
            del printed[:-KEPT]
            line += chunk
            cut = line.rfind(b"\n") + 1 if len(line) < 2 * CHUNK else len(line)
            self._write(line[:cut])
            line = line[cut:]
        self._write(line)

    def _write(self, chunk: bytes) -> None:
        with open(self.log, "ab", opener=open_private) as file:
            if file.tell() < KEPT_IN_LOG:
                file.write(SECRET.sub(b"***", chunk))

    def _failed(self, program: str, what: str, printed: bytearray) -> ImageFailed:
        lines = SECRET.sub(b"***", bytes(printed[-TAIL_BYTES:])).decode(errors="replace").splitlines()[-TAIL:]
        message = "\n".join(
            [f"`{Path(program).name}` {what}, all that it printed is in `{self.log}`:", *lines]
        )
        return ImageFailed(message, kind="build", again=False)


def needed(program: str, found: str | None, hint: str) -> str:
    """The program's path; without it nothing can be built."""
    if found is None:
        raise BadInput(f"a program is missing: `{program}`", hint)
    return found


async def _end(process: Process) -> None:
    """Kill what is left of the program and of those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them are gone
    deadline = time.monotonic() + PATIENCE
    waiting = asyncio.ensure_future(process.wait())
    while not waiting.done() and time.monotonic() < deadline:
        try:
            await asyncio.wait([waiting], timeout=PATIENCE)
        except asyncio.CancelledError:
            continue  # the first one is on its way already
    waiting.cancel()  # of a process that the kernel does not let go
