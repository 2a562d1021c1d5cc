"""Run the programs and the blocking functions that a build needs, until its caller is cancelled.

The output of programs goes to a bounded log. The kernel kills a program when this process dies.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ...core.errors import ImageFailed
from ...core.records import MiB
from ...dialect import list_key_variables
from ...ledger.durable_files import make_directory, open_private
from ...shielded_wait import wait_shielded

# The work calls it between its pieces; it raises `WorkAbandoned` once the caller is cancelled.
CancelCheck = Callable[[], None]
T = TypeVar("T")
CHUNK = 64 * 1024
KEPT_IN_LOG = 16 * MiB  # bytes of output of all programs of a build
KEPT_OUTPUT = 1 * MiB  # bytes of one program's output that the caller gets
TAIL = 20  # lines of a failed program's output that its error quotes
TAIL_BYTES = 2000
LINE = 500  # characters of a command in the log
KILL_SECONDS = 5.0  # time limit to wait for a killed program

# Execs a program that the kernel kills when this process dies. A function between fork and exec could do the
# same, but may hang in a process with threads.
TIED_LAUNCHER = """\
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
SECRET = re.compile(rb"(?<=://)[^/@\s]+(?=@)")  # in a URL: `https://user:key@index`


class WorkAbandoned(Exception):
    """The caller of this work was cancelled."""


async def run_in_thread(work: Callable[[CancelCheck], T]) -> T:
    """Return the result of `work`. A cancellation ends the work at its next `check`, and waits for that."""
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise WorkAbandoned

    with ThreadPoolExecutor(1, "layer") as thread:
        future = asyncio.get_running_loop().run_in_executor(thread, work, check)
        try:
            return await asyncio.shield(future)
        finally:
            stop.set()
            await wait_shielded(future)  # a first cancellation is already being raised
            future.exception()  # mark it as retrieved: a cancelled caller does not retrieve it


async def run_to_end(work: Callable[[], T]) -> T:
    """Run work that finishes in spite of a cancellation, such as a clean-up; return its result."""
    return await run_in_thread(lambda check: work())


class ProgramRunner:
    """Runs programs one after the other, for one build."""

    def __init__(self, log: Path, cwd: Path, keep: Sequence[int], env: Mapping[str, str]) -> None:
        self.log = log
        self._cwd = cwd
        self._keep = tuple(keep)  # file descriptors to inherit: locks of the directories written to
        self._env = env  # added to this process's environment
        make_directory(log.parent)

    async def run(self, argv: Sequence[str | Path], timeout: float, statuses: Sequence[int] = (0,)) -> str:
        """Run a program; return its output. Other statuses raise an `ImageFailed` with its last lines."""
        words = [str(word) for word in argv]
        self._write_log(f"$ {shlex.join(words)[:LINE]}\n".encode())
        process = await self._start(words)
        printed = bytearray()
        try:
            async with asyncio.timeout(timeout):
                await self._drain(process, printed)
                status = await process.wait()
        except TimeoutError:
            await _kill_program(process)
            raise self._program_error(words[0], f"took longer than {timeout:g} s", printed) from None
        except BaseException:  # boundary: the program is killed, then it is raised again
            await _kill_program(process)
            raise
        if status not in statuses:
            raise self._program_error(words[0], f"ended with status {status}", printed)
        return printed.decode(errors="replace")

    async def _start(self, words: list[str]) -> Process:
        # Programs inherit the operator's proxies and indexes, but no API keys: a package's build script could
        # read them.
        settings = [f"-u{name}" for name in sorted(list_key_variables())]
        settings += [f"{name}={value}" for name, value in self._env.items()]
        tied = [sys.executable, "-I", "-S", "-c", TIED_LAUNCHER, str(os.getpid()), "env", *settings, *words]
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
        line = b""  # a URL is only recognised as a whole
        while chunk := await process.stdout.read(CHUNK):
            printed += chunk
            del printed[:-KEPT_OUTPUT]
            line += chunk
            cut = line.rfind(b"\n") + 1 if len(line) < 2 * CHUNK else len(line)
            self._write_log(line[:cut])
            line = line[cut:]
        self._write_log(line)

    def _write_log(self, chunk: bytes) -> None:
        with open(self.log, "ab", opener=open_private) as file:
            if file.tell() < KEPT_IN_LOG:
                file.write(SECRET.sub(b"***", chunk))

    def _program_error(self, program: str, what: str, printed: bytearray) -> ImageFailed:
        lines = SECRET.sub(b"***", bytes(printed[-TAIL_BYTES:])).decode(errors="replace").splitlines()[-TAIL:]
        message = "\n".join([f"`{Path(program).name}` {what}; its output is in `{self.log}`:", *lines])
        return ImageFailed(message, kind="build", again=False)


async def _kill_program(process: Process) -> None:
    """Kill the program and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all processes are gone
    waiting = asyncio.ensure_future(process.wait())
    await wait_shielded(waiting, KILL_SECONDS)  # a first cancellation is already being raised
    waiting.cancel()  # a process that the kernel cannot end
