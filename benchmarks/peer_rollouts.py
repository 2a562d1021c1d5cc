"""Runs the rollouts of `rollout_churn.py` on verifiers from PyPI, in its own virtual environment.

`peer_verifiers.py` runs there: its server, which is one worker, and its client, which is not counted.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import churn_meter
from churn_meter import Seen, Work
from launch import HERE
from peers import environment, version

VERSION = "0.4.1.dev86"
PATIENCE = 30.0  # seconds for a process to end
SCRIPT = str(HERE / "peer_verifiers.py")


class Theirs(NamedTuple):
    who: str
    seen: Seen
    disk: int  # bytes of the trajectories as its own client keeps them: JSON lines


class NotRun(Exception):
    """There are no figures; the message says why."""


def measured(work: Work, url: str, directory: Path) -> Theirs:
    try:
        python = environment(f"verifiers-{VERSION}", (f"verifiers=={VERSION}",))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotRun(f"cannot be installed: {error}") from error
    address = f"tcp://127.0.0.1:{_free_port()}"
    with (
        (directory / "verifiers.log").open("ab") as log,
        _started([str(python), SCRIPT, "serve", address], stdout=log, stderr=log) as server,
    ):
        words = [str(python), SCRIPT, "drive", address, url, *map(str, work)]
        with _started(words, stdout=subprocess.PIPE, stderr=log) as client:
            assert client.stdout is not None
            client.stdout.readline()  # the server answers
            said: list[bytes] = []
            seen = churn_meter.measured(server.pid, lambda: said.append(client.communicate()[0]))
    if client.returncode != 0:
        raise NotRun(f"its client failed with status {client.returncode}: see `{log.name}`")
    return Theirs(f"verifiers {version(python, 'verifiers')}", seen, int(said[0]))


@contextmanager
def _started(words: Sequence[str], **streams: object) -> Iterator[subprocess.Popen[bytes]]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=env, **streams)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
