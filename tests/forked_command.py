"""Starts `holdwater` as a fork of a process that has its modules: the interpreter starts once for all tests.

A forked command has a session, a directory, an environment, descriptors and an exit status of its own. A
program of Python is started alike, by the words that follow `python`.
Its `/proc/PID/cmdline` and `/proc/PID/environ` are those of the server: tests of these start an interpreter.
`python -m tests.forked_command FD` is the server, which ends with the tests.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from tests.wait_bounds import stretch

ROOT = Path(__file__).parents[1]
LARGEST_REQUEST = 1 << 20
ASKING = threading.Lock()  # one request at a time: each is followed by its reply


class Interpreter(NamedTuple):
    """A Python, and the modules that its server loads before it forks commands."""

    python: str = sys.executable
    modules: tuple[str, ...] = ()


OWN = Interpreter()


class ForkedCommand:
    """A running command, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        stdout: int,
        stderr: int,
        *,
        stdin: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        interpreter: Interpreter = OWN,
        network: str = "",
        program: bool = False,
    ) -> None:
        """`network`: a file such as `/proc/PID/ns/net`, of the network namespace that the command is in.

        `program`: the words are a Python program, `-c CODE`, `-m MODULE` or `FILE`, and its arguments.
        """
        self._exit, theirs = os.pipe()
        variables = dict(os.environ if env is None else env)
        request = json.dumps([list(words), variables, str(cwd or Path.cwd()), network, program]).encode()
        with ASKING, Path(os.devnull).open("rb") as nothing:
            server, _ = start_server(interpreter)
            fds = [nothing.fileno() if stdin is None else stdin, stdout, stderr, theirs]
            socket.send_fds(server, [request], fds)
            self.pid = int(server.recv(100))
        os.close(theirs)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, or minus the number of the signal that ended the command."""
        if self.returncode is None:
            if not select.select([self._exit], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("holdwater", timeout or 0)
            self.returncode = int(os.read(self._exit, 100))
            os.close(self._exit)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    *words: str,
    seconds: float = 60.0,
    stdin: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    interpreter: Interpreter = OWN,
    program: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command, or a Python program, to its end; `seconds` are those of a quiet machine."""
    with TemporaryFile() as out, TemporaryFile() as err:
        command = ForkedCommand(
            words,
            out.fileno(),
            err.fileno(),
            stdin=stdin,
            env=env,
            cwd=cwd,
            interpreter=interpreter,
            program=program,
        )
        try:
            status = command.wait(stretch(seconds))
        finally:
            command.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, status, out.read().decode(), err.read().decode())


@cache
def start_server(interpreter: Interpreter = OWN) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the server, if this process has none yet: one socket and one child, which stay."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
    with theirs:
        process = subprocess.Popen(
            [interpreter.python, "-m", "tests.forked_command", str(theirs.fileno()), *interpreter.modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            pass_fds=[theirs.fileno()],
        )
    return ours, process


def serve(requests: socket.socket) -> int:
    """Fork a command for each request and report its end. In the fork: return the command's exit status."""
    from holdwater.cli import command

    exits: dict[int, int] = {}  # command -> the pipe for its exit status
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, wake], [], [])
        if wake in ready:
            os.read(wake, 1000)
        _report_ends(exits)
        if requests not in ready:
            continue
        content, fds, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 4)
        if not content:
            return 0
        pid = os.fork()
        if pid:
            exits[pid] = fds.pop()
            requests.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        words, env, cwd, network, program = json.loads(content)
        _become(words, env, cwd, network, fds)
        for fd in (wake, woken, *fds, *exits.values()):
            os.close(fd)
        return _run_program(words) if program else command()


def _report_ends(exits: dict[int, int]) -> None:
    while exits:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = exits.pop(pid)
        try:
            os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            pass  # its test is over
        os.close(pipe)


def _become(words: list[str], env: dict[str, str], cwd: str, network: str, fds: list[int]) -> None:
    """Be the process that `python -m holdwater WORDS` would be."""
    os.setsid()
    if network:
        with Path(network).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), network)
    for number in range(3):
        os.dup2(fds[number], number)
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = ["holdwater", *words]


def _run_program(words: list[str]) -> int:
    """Be the process that `python WORDS` would be."""
    kind = words.pop(0) if words[0] in ("-c", "-m") else ""
    sys.argv = words if not kind else [kind, *words[1:]]
    if kind == "-c":
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")
    return 0


def _load_modules(further: Sequence[str]) -> None:
    """Load the modules of most commands, and further ones; others load theirs as usual."""
    import gc

    import holdwater.api.reading
    import holdwater.api.runs
    import holdwater.api.serving
    import holdwater.cli.export
    import holdwater.cli.foreground_run
    import holdwater.cli.runs
    import holdwater.cli.show
    import holdwater.docker.build
    import holdwater.rollout.worker_gateway
    import holdwater.run.builds.build
    import holdwater.view.live_display  # noqa: F401
    from holdwater.rollout.allocator import find_jemalloc

    for name in further:
        importlib.import_module(name)
    find_jemalloc()  # it tries the library in an interpreter, once a process
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _load_modules(sys.argv[2:])
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))
