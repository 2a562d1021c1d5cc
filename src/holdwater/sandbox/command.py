"""Runs one command in a sandbox, from its start to the end of its whole process tree.

The event loop waits on a pidfd and reads the pipes: there is no thread per child, and a child cannot block it
by keeping a pipe open. `process.py` decides what the command may see and use.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from ..core.environment import build_environment
from ..core.errors import AttemptError, SandboxFailed
from ..shielded_wait import wait_shielded
from . import process_marks
from .bubblewrap import PAUSES, is_mount_trouble
from .capture import CommandLog, StreamCapture
from .launcher import ENTRY_FAILED, DescriptorHandover

CHUNK = 64 * 1024  # bytes read from one stream per turn of the event loop, however much is printed
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
LINGER = 1.0  # seconds for the last output of an ended command
GONE = 5.0  # seconds for killed processes to disappear
PR_SET_CHILD_SUBREAPER = 36  # from `linux/prctl.h`


class ProcessLaunch(msgspec.Struct, frozen=True):
    """How a command is started.

    `argv` puts content that the launcher reads from a descriptor into the handover.
    """

    argv: Callable[[DescriptorHandover], list[str]]
    marks: Mapping[str, str]  # in the launcher's environment, which is otherwise clean
    confined: bool  # in bubblewrap: the tree ends with it
    count_output: Callable[
        [int], AttemptError | None
    ]  # takes a number of new bytes; returns an error above the limit
    population: Callable[[], int]  # returns the number of processes in the sandbox
    # Takes a held command's pidfd before it starts; returns a function to call at its end, or None if the
    # command has to be started in another way.
    prepare: Callable[[int], Awaitable[Callable[[], None] | None]]


def adopt_orphans() -> None:
    """Make this process reap the orphans of bubblewrap, which count as processes of the sandbox until then.

    Otherwise the init process of the machine or container has to reap them, and many do so late or never.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class ProcessCommand:
    def __init__(self, launch: ProcessLaunch, log: CommandLog | None, threads: Executor) -> None:
        self.stdout = StreamCapture(log)
        self.stderr = StreamCapture(log)
        self.timed_out = False
        self.stopped: AttemptError | None = None  # why the command was stopped early
        self.left = 0  # processes in the sandbox when the command exited, unless the kernel was faster
        self.seconds = 0.0
        self._launch = launch
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._over = asyncio.Event()  # the command exited or was stopped
        self._silent = asyncio.Event()  # both pipes are closed
        self._gone = asyncio.Event()  # the pid namespace has ended; set from the start if there is none
        self._open: set[int] = set()  # two pipes, two pidfds, the status, and the release
        self._pipes: set[int] = set()
        self._ended = False  # no descriptor is watched any more
        self._init: int | None = None  # pidfd of the namespace's first process
        self._report = -1  # pipe on which bubblewrap reports
        self._status = b""  # bubblewrap's report, a few hundred bytes
        self._release = -1  # a byte on it lets a held command start
        self._preparation: asyncio.Task[None] | None = None  # of a held command
        self._end_service: Callable[[], None] | None = None
        self._misheld = False
        self._killed = False
        self._started = time.monotonic()
        self._process = self._start()

    async def finish(self, timeout: float | None) -> int:
        """Wait for the end, at most `timeout` seconds; return the exit status.

        The whole process tree has ended when this returns.
        """
        try:
            if not await wait_within(timeout, self._over):
                self.timed_out = True
                await self._terminate()
            elif self.stopped is None:
                await wait_within(LINGER, self._silent)
        finally:
            await finish_anyway(self.kill())
        return self._exit_code()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, error: AttemptError) -> None:
        """Make `finish` kill the command at once; `error` says why."""
        self.stopped = self.stopped or error
        self._over.set()

    async def kill(self) -> None:
        """Kill the whole process tree."""
        if self._process.returncode is not None:
            return
        if not self._launch.confined:
            self._signal_group(signal.SIGKILL)
            await self._in_thread(process_marks.kill_all, self._launch.marks)
        self._killed = True
        self._process.kill()
        self._kill_namespace()
        await self._end_preparation()
        for event in (self._exited, self._silent, self._gone):
            await wait_within(GONE, event)
        if self._ended:
            return  # another task has killed it meanwhile
        self._ended = True
        self.seconds = time.monotonic() - self._started
        self._reap_orphan()
        for fd in list(self._open):
            self._close(fd)
        self._process.poll()  # reaped last: until now its pid and its process group cannot be reused

    @property
    def misheld(self) -> bool:
        """Whether the command was held and could not be prepared; started again, it is not held."""
        return self.stopped is None and self._misheld

    @property
    def blocked_by_mount(self) -> bool:
        """Whether a mount kept bubblewrap from starting the program; a retry may succeed."""
        return self.stopped is None and not self.started() and is_mount_trouble(self.stderr.text())

    def started(self) -> bool:
        """Whether the program itself was started, as far as this can be seen from outside."""
        if self._launch.confined:
            return b'"exit-code"' in self._status or self.timed_out or (self._process.returncode or 0) < 0
        return self._process.returncode != ENTRY_FAILED or not self.stderr.text().startswith("holdwater: ")

    def _start(self) -> subprocess.Popen[bytes]:
        report, status = os.pipe2(os.O_CLOEXEC)
        handover = DescriptorHandover(status)
        try:
            process = subprocess.Popen(
                self._launch.argv(handover),
                stdin=handover.stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=build_environment(**self._launch.marks),
                start_new_session=True,
                pass_fds=handover.fds if self._launch.confined else (),
                bufsize=0,
            )
        except (OSError, ValueError) as e:  # ValueError: a NUL, or text that cannot be encoded
            os.close(report)
            if handover.release >= 0:
                os.close(handover.release)
            raise SandboxFailed(f"cannot start a process: {e}", kind="spawn") from e
        finally:
            handover.close()
        if handover.release >= 0:
            self._release = handover.release
            self._open.add(self._release)  # closed at the end: a closed pipe lets the command start
        try:
            self._watch(process, report)
        except OSError as e:  # out of descriptors
            process.kill()
            process.wait()
            for fd in list(self._open):
                self._close(fd)
            raise SandboxFailed(f"cannot watch a process: {e}", kind="spawn") from e
        return process

    def _watch(self, process: subprocess.Popen[bytes], report: int) -> None:
        for pipe, capture in ((process.stdout, self.stdout), (process.stderr, self.stderr)):
            assert pipe is not None
            fd = os.dup(pipe.fileno())
            pipe.close()
            os.set_blocking(fd, False)
            self._pipes.add(fd)
            self._add(fd, self._read, capture)
        self._add(os.pidfd_open(process.pid), self._on_exit)
        os.set_blocking(report, False)
        if self._launch.confined:
            self._report = report
            self._add(report, self._on_report)
        else:
            os.close(report)
            self._gone.set()

    def _add(self, fd: int, on_readable: Callable[..., None], *arguments: object) -> None:
        self._open.add(fd)
        self._loop.add_reader(fd, on_readable, fd, *arguments)

    def _read(self, fd: int, capture: StreamCapture) -> None:
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if chunk:
            capture.feed(chunk)
            if error := self._launch.count_output(len(chunk)):
                self.stop(error)
            return
        self._close(fd)
        self._pipes.discard(fd)
        if not self._pipes:
            self._silent.set()

    def _on_exit(self, fd: int) -> None:
        self._close(fd)
        self.left = self._launch.population()
        self._exited.set()
        self._over.set()

    def _on_report(self, fd: int) -> None:
        try:
            chunk = os.read(fd, CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._close(fd)
            if b"\n" not in self._status:
                self._gone.set()
            return
        told = b"\n" in self._status
        self._status += chunk
        if not told and b"\n" in self._status:  # bubblewrap writes the first line in pieces
            self._watch_namespace()

    def _watch_namespace(self) -> None:
        """Watch the namespace's first process: it outlives bubblewrap for a moment."""
        try:
            init = msgspec.json.decode(self._status.splitlines()[0])["child-pid"]
            self._init = os.pidfd_open(init)
            self._add(self._init, self._on_gone)
        except (OSError, ValueError, KeyError):
            self._gone.set()
            return
        if self._release >= 0 and not self._killed:
            self._preparation = self._loop.create_task(self._prepare(self._init))

    async def _prepare(self, init: int) -> None:
        """Prepare a held command and let it start; kill it if that fails."""
        try:
            self._end_service = await self._launch.prepare(init)
        except AttemptError as e:
            self.stop(e)
            return
        if self._end_service is None:
            self._misheld = True
            self._process.kill()
            return
        try:
            os.write(self._release, b"!")
        except BrokenPipeError:
            return  # the command was killed meanwhile

    async def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
            await asyncio.wait([self._preparation])
        end, self._end_service = self._end_service, None
        if end is not None:
            end()

    def _kill_namespace(self) -> None:
        """Kill the namespace's first process, which ends the namespace.

        That process dies with bubblewrap anyway, but only by a setting that it can change itself.
        """
        if self._report in self._open:
            self._on_report(self._report)  # the report may just have arrived
        if self._init is None or self._gone.is_set():
            return
        try:
            signal.pidfd_send_signal(self._init, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _on_gone(self, fd: int) -> None:
        self._loop.remove_reader(fd)  # kept open: the process is still to be reaped
        self._gone.set()

    def _reap_orphan(self) -> None:
        init, self._init = self._init, None  # closed in a moment: then the descriptor may be reused
        if init is None:
            return
        try:
            os.waitid(os.P_PIDFD, init, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return  # another process adopted it

    def _close(self, fd: int) -> None:
        if fd in self._open:
            self._loop.remove_reader(fd)
            self._open.discard(fd)
            os.close(fd)

    async def _terminate(self) -> None:
        if self._launch.confined:
            # Bubblewrap gets no signal: it would exit at once and take the tree with it.
            process_marks.signal_pids(process_marks.list_descendants(self._process.pid), signal.SIGTERM)
        else:
            self._signal_group(signal.SIGTERM)
            await self._in_thread(process_marks.signal_all, self._launch.marks, signal.SIGTERM)
        await wait_within(GRACE, self._exited)

    async def _in_thread(self, function: Callable[..., object], *arguments: object) -> None:
        await self._loop.run_in_executor(self._threads, function, *arguments)

    def _signal_group(self, number: int) -> None:
        if self._process.returncode is not None:
            return  # reaped: the pid may be reused by now
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # the group has ended

    def _exit_code(self) -> int:
        code = self._process.returncode
        if code is None or not self._gone.is_set():
            raise SandboxFailed("a process did not end when it was killed", kind="unkillable")
        return code if code >= 0 else 128 - code


async def run_command(
    launch: ProcessLaunch,
    log: CommandLog | None,
    threads: Executor,
    watch: Callable[[ProcessCommand], AbstractAsyncContextManager[None]],
    timeout: float | None,
) -> tuple[ProcessCommand, int]:
    """Run a command to its end; return it and its exit status. Retry if a mount of the host came or went."""
    for pause in (*PAUSES, 0.0):
        command = ProcessCommand(launch, log, threads)
        async with watch(command):
            code = await command.finish(timeout)
        if command.misheld:
            continue
        if not command.blocked_by_mount or not pause:
            break
        await asyncio.sleep(pause)
    return command, code


async def finish_anyway(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end even if the caller is cancelled meanwhile; then raise the cancellation."""
    task = asyncio.ensure_future(work)
    if await wait_shielded(task):
        task.exception()
        raise asyncio.CancelledError
    task.result()


async def wait_within(seconds: float | None, event: asyncio.Event) -> bool:
    """Return whether `event` was set within `seconds`."""
    if event.is_set():
        return True
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
