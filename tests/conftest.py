"""Settings of all tests: their bounds, their signals, and the process that plays them."""

from __future__ import annotations

import gc
import signal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # an example that takes long is no failure: the machine may be busy

# A shell without job control starts its background jobs with these ignored, and programs that tests start
# would inherit that. A handler is not inherited, and this process stays as deaf as before.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


def pytest_collection_finish() -> None:
    """Keep the collected tests out of garbage collections: each of a leak check would take half a second."""
    gc.collect()
    gc.freeze()


DAEMONS = ("ground", "netdaemon", "registry", "daemon")  # fixtures of `docker/conftest.py`


class GroupScheduling(LoadScopeScheduling):
    """Plays tests that share a daemon, a server or a run in one process, which makes it once.

    It gives such a group out whole, the largest first, and all other tests singly. The scheduling of xdist by
    marks does the same; with pytest 9.2 it sees no marks.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return _find_group(self.config.rootpath / path) or nodeid


@cache
def _find_group(path: Path) -> str:
    text = path.read_text()
    if 'scope="module"' in text:
        return path.stem
    if path.parent.name != "docker":
        return ""
    return next((daemon for daemon in DAEMONS if f"{daemon}: " in text), "")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadgroup" else None
