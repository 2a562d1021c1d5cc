"""A leak check: after a run in this process nothing of it is left, neither objects nor threads nor fds.

What belongs to which scope is said in `rollout/scope.py`; this only looks at what outlived it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCOPED = frozenset(
    {
        "holdwater.rollout.children.Children",
        "holdwater.rollout.group.Member",
        "holdwater.rollout.group.Scoring",
        "holdwater.rollout.life.Life",
        "holdwater.rollout.host.Host",
        "holdwater.rollout.logs.Sink",
        "holdwater.rollout.scope.Scope",
        "holdwater.gateway.sessions.Session",
        "holdwater.gateway.upstreams.held._HeldCall",
        "holdwater.ledger.exchanges.AttemptLog",
        "holdwater.run.scheduler.Scheduler",
        "holdwater.run.ticket.Ticket",
        "holdwater.sandbox.docker.sandbox.DockerSandbox",
        "holdwater.sandbox.process.ProcessSandbox",
        "holdwater.serve.follow.Follower",
    }
)
PATIENCE = 5.0  # seconds: a thread that was told to end is not gone at once


class Leaked(AssertionError):
    """Something outlived its scope."""


@contextmanager
def no_leaks(patience: float = PATIENCE) -> Iterator[None]:
    """Raise `Leaked` if the block leaves objects of ended scopes, threads or open files behind."""
    gc.collect()
    objects, threads, files = living(), set(threading.enumerate()), _open_files()
    yield
    until = time.monotonic() + patience
    while found := _left(objects, threads, files):
        if time.monotonic() > until:
            raise Leaked("; ".join(found))
        time.sleep(0.02)


def _left(objects: Counter[str], threads: set[threading.Thread], files: Counter[str]) -> list[str]:
    """What is there now and was not there before, in words."""
    gc.collect()
    new_threads = [thread.name for thread in threading.enumerate() if thread not in threads]
    found = [f"{count} x {name}" for name, count in (living() - objects).items()]
    found += [f"thread `{name}`" for name in new_threads]
    found += [f"{count} x open `{name}`" for name, count in (_open_files() - files).items()]
    return found


def living() -> Counter[str]:
    """How many objects of each scoped kind there are."""
    return Counter(name for thing in gc.get_objects() if (name := _name(type(thing))) in SCOPED)


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _open_files() -> Counter[str]:
    """What this process's descriptors lead to; numbers of sockets and pipes are left out."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found[str(fd.readlink()).split(":[")[0]] += 1
        except OSError:
            continue  # the descriptor of the listing itself
    return found
