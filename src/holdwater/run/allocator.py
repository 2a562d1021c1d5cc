"""The allocator that workers are started with: jemalloc where it is installed, glibc with bounds otherwise.

It says what the environment of a worker must hold; `rollout/allocator.py` says what a process really has.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..core.records import Record
from ..rollout.allocator import GLIBC, JEMALLOC, OTHER, in_force

PRELOAD = "LD_PRELOAD"
JEMALLOC_CONF = "MALLOC_CONF"
PATIENCE = 10.0  # seconds

# A thread of its own gives freed memory back within half a second, without stalling the loop. What it
# retained would count against a worker's limit on data.
_JEMALLOC = {
    JEMALLOC_CONF: "background_thread:true,dirty_decay_ms:250,muzzy_decay_ms:0,narenas:2,retain:false",
}
# glibc keeps freed memory in up to 8 arenas a core and never gives it back by default.
GLIBC_BOUNDS = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "1048576",  # above what a socket reads at once, or each read faults in pages
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}
_PLACES = ("usr/local/lib", "usr/lib/*-linux-gnu", "usr/lib64", "usr/lib")


class Effect(Record, frozen=True):
    """What `rollout/allocator_probe.py` measured: bytes before, during and after a little work."""

    allocator: str
    base: int
    peak: int
    rest: int


def settings(env: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment needs beside `env`. What the user has set there stays as it is."""
    if in_force() == OTHER or _has_own(env):
        return {}
    library = None if _tunes_glibc(env) else jemalloc()
    if library is None:
        return {name: value for name, value in GLIBC_BOUNDS.items() if name not in env}
    preload = f"{before} {library}" if (before := env.get(PRELOAD, "")) else library
    return {PRELOAD: preload, **{name: value for name, value in _JEMALLOC.items() if name not in env}}


def asked(chosen: Mapping[str, str]) -> str:
    """The allocator that `settings` stand for; nothing where any will do."""
    if PRELOAD in chosen:
        return JEMALLOC
    return GLIBC if chosen else ""


@functools.cache
def jemalloc() -> str | None:
    """Where it is, if it is installed and this Python can be started with it."""
    found = (str(path) for place in _PLACES for path in Path("/").glob(f"{place}/libjemalloc.so.*"))
    return next(filter(_works, found), None)


def measured(env: Mapping[str, str], *, trimmed: bool) -> Effect | None:
    """What some work leaves in a process that is started with `env`; None if it cannot be."""
    words = ["-m", "holdwater.rollout.allocator_probe", *(["trim"] if trimmed else [])]
    try:
        ran = _python(words, env)
        return msgspec.json.decode(ran.stdout, type=Effect)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


def _has_own(env: Mapping[str, str]) -> bool:
    """Whether the user has put an allocator before libc's already."""
    return "malloc" in env.get(PRELOAD, "")


def _tunes_glibc(env: Mapping[str, str]) -> bool:
    return "glibc.malloc" in env.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name != JEMALLOC_CONF for name in env
    )


def _works(library: str) -> bool:
    """One for another machine or page size is refused by the loader or by itself, on stderr."""
    try:
        ran = _python(["-I", "-S", "-c", ""], {PRELOAD: library})
    except (OSError, subprocess.SubprocessError):
        return False
    return not ran.stderr


def _python(words: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        env=dict(env),
        check=True,
    )
