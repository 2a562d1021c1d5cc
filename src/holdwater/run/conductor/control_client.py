"""Sends requests to the conductor of a run: the other end of `control_socket.py`, for other processes.

A run that no process conducts is an error that says what to do instead.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ...core.control import CONTROL_SOCKET, REPLIES, AnyRequest, ControlReply, WatchRun
from ...core.errors import BadInput, HoldwaterError
from ...core.summary import RunSummary
from ...ledger.directory import RunDirectory, find_run, name_user
from ...ledger.reader import LedgerReader

START_SECONDS = 5.0  # for a conductor that has just begun to listen
REPLY_SECONDS = 60.0
LOOK_SECONDS = 0.05
LONGEST_REPLY = 64 << 20  # bytes


def send_request(run: str | Path, request: AnyRequest) -> ControlReply:
    """Send one request to the conductor of a run; raise `BadInput` if it refuses, or if there is none."""
    with ControlConnection(run) as connection:
        return connection.request(request)


class ControlConnection:
    """A connection to the conductor of a run. Implements `SummarySource` of the live display."""

    def __init__(self, run: str | Path) -> None:
        self.directory = RunDirectory(find_run(str(run)))
        self._socket = _connect(self.directory)
        self._socket.settimeout(REPLY_SECONDS)
        self._rest = b""
        self.over = False  # the run has ended, or does not answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def request(self, request: AnyRequest) -> ControlReply:
        """Return the reply to a request; raise `BadInput` if it is refused."""
        try:
            self._socket.sendall(msgspec.json.encode(request) + b"\n")
            line = self._read_line()
        except TimeoutError:
            raise HoldwaterError(
                f"the run did not answer within {REPLY_SECONDS:g} s: `{self.directory.path}`",
                "its process may be suspended, or its disk full",
            ) from None
        except ConnectionError:
            raise explain_absence(self.directory) from None
        try:
            reply = REPLIES.decode(line)
        except msgspec.MsgspecError as error:
            hint = "use the version of holdwater that conducts the run"
            raise HoldwaterError(f"the reply of the run cannot be read: {error}", hint) from None
        if reply.refused:
            raise BadInput(reply.refused, reply.hint)
        return reply

    def summary(self) -> RunSummary:
        """Return the present summary of the run."""
        try:
            summary = self.request(WatchRun()).summary
        except HoldwaterError:
            self.over = True
            raise
        assert summary is not None, "a reply to `WatchRun` has a summary"
        return summary

    def _read_line(self) -> bytes:
        while b"\n" not in self._rest:
            piece = self._socket.recv(1 << 16)
            if not piece or len(self._rest) > LONGEST_REPLY:
                raise ConnectionResetError("the conductor closed the connection")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def explain_absence(directory: RunDirectory) -> BadInput:
    """Return the error for a run that no process conducts: it says what to do instead."""
    path = directory.path
    with LedgerReader(directory) as reader:
        summary, config = reader.summary(), reader.config
    if summary.state == "running":
        holder = directory.find_holder()
        where = "" if holder is None else f" by process {holder.pid} on {holder.host}"
        return BadInput(
            f"the run is conducted{where}, and does not listen for requests: `{path}`",
            "it may be starting or ending: try again; on another machine, use `holdwater` there",
        )
    if summary.state == "finished":
        hint = f"`holdwater show {path}` shows it; `holdwater resume {path} --retry INSTANCE` tries it again"
        return BadInput(f"the run has finished: `{path}`", hint)
    again = "the same `holdwater serve`" if config.serving is not None else f"`holdwater resume {path}`"
    return BadInput(f"no process conducts the run, it is {summary.state}: `{path}`", f"{again} continues it")


def _connect(directory: RunDirectory) -> socket.socket:
    """Connect to the conductor; wait for one that holds the run and does not listen yet."""
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            with _open_folder(directory) as folder:
                return _connect_below(folder)
        except PermissionError:
            owner = name_user(directory.path.stat().st_uid)
            raise BadInput(
                f"the run belongs to {owner}: `{directory.path}`", "only this user and root may control it"
            ) from None
        except (FileNotFoundError, ConnectionRefusedError):
            RunDirectory.open(directory.path)  # raises if it is no run
            if directory.find_holder() is None or time.monotonic() > until:
                raise explain_absence(directory) from None
        time.sleep(LOOK_SECONDS)


@contextmanager
def _open_folder(directory: RunDirectory) -> Iterator[int]:
    folder = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield folder
    finally:
        os.close(folder)


def _connect_below(folder: int) -> socket.socket:
    """Connect to the socket of a directory through its descriptor: the path may be too long for a socket."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        caller.settimeout(START_SECONDS)
        caller.connect(f"/proc/self/fd/{folder}/{CONTROL_SOCKET}")
    except BaseException:  # boundary: the socket is closed, then the error is raised again
        caller.close()
        raise
    return caller
