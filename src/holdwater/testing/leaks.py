"""A leak check: a run in this process must leave no objects, threads or file descriptors behind.

`rollout/scope.py` defines the scopes; this module only finds what outlived them.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SCOPED = frozenset(
    {
        "holdwater.rollout.children.ChildSpawner",
        "holdwater.rollout.group.WaitingMember",
        "holdwater.rollout.group.GroupScoring",
        "holdwater.rollout.attempt_state.AttemptState",
        "holdwater.rollout.host.AttemptHost",
        "holdwater.rollout.logs.LogSink",
        "holdwater.rollout.scope.Scope",
        "holdwater.gateway.sessions.Session",
        "holdwater.gateway.upstreams.held_calls._HeldCall",
        "holdwater.ledger.exchanges.AttemptLog",
        "holdwater.run.conductor.scheduler.AttemptScheduler",
        "holdwater.run.orders.active_order.ActiveOrder",
        "holdwater.sandbox.docker.sandbox.DockerSandbox",
        "holdwater.sandbox.process.ProcessSandbox",
        "holdwater.serve.event_stream.OrderFollower",
    }
)
PATIENCE = 5.0  # seconds: a thread needs some time to end after it is stopped


class LeakDetected(AssertionError):
    """An object, thread or file outlived its scope."""


@contextmanager
def no_leaks(patience: float = PATIENCE) -> Iterator[None]:
    """Raise `LeakDetected` if the block leaves objects of ended scopes, threads or open files behind."""
    gc.collect()
    objects, threads, files = count_objects(), set(threading.enumerate()), _count_open_files()
    yield
    until = time.monotonic() + patience
    while found := _find_leaks(objects, threads, files):
        if time.monotonic() > until:
            raise LeakDetected("; ".join(found))
        time.sleep(0.02)


def _find_leaks(objects: Counter[str], threads: set[threading.Thread], files: Counter[str]) -> list[str]:
    """Describe the objects, threads and files that exist now and did not exist before."""
    gc.collect()
    new_threads = [thread.name for thread in threading.enumerate() if thread not in threads]
    found = [f"{count} x {name}" for name, count in (count_objects() - objects).items()]
    found += [f"thread `{name}`" for name in new_threads]
    found += [f"{count} x open `{name}`" for name, count in (_count_open_files() - files).items()]
    return found


def count_objects() -> Counter[str]:
    """Return the number of live objects by scoped class."""
    kinds = Counter(map(type, gc.get_objects()))
    names = {kind: f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    return Counter({name: kinds[kind] for kind, name in names.items() if name in SCOPED})


def _count_open_files() -> Counter[str]:
    """Count open descriptors by target, without the numbers of sockets and pipes."""
    found: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found[str(fd.readlink()).split(":[")[0]] += 1
        except OSError:
            continue  # the descriptor of this listing is closed already
    return found
