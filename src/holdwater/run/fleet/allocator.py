"""Chooses the memory allocator of workers: jemalloc where it is installed, otherwise glibc with bounds.

This module sets the environment of workers; `rollout/allocator.py` detects the allocator that a process
really has.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ...core.records import Record
from ...rollout.allocator import GLIBC, JEMALLOC, OTHER, detect_allocator

PRELOAD = "LD_PRELOAD"
JEMALLOC_CONF = "MALLOC_CONF"
PATIENCE = 10.0  # seconds

# Its background thread returns freed memory within half a second, without stalling the loop. Retained memory
# would count against a worker's limit on data.
_JEMALLOC = {
    JEMALLOC_CONF: "background_thread:true,dirty_decay_ms:250,muzzy_decay_ms:0,narenas:2,retain:false",
}
# By default glibc keeps freed memory in up to 8 arenas per core and never returns it.
GLIBC_BOUNDS = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "1048576",  # above the size of one socket read, or each read faults in pages
    "MALLOC_TRIM_THRESHOLD_": "1048576",
}
_LIBRARY_PATHS = ("usr/local/lib", "usr/lib/*-linux-gnu", "usr/lib64", "usr/lib")


class AllocatorEffect(Record, frozen=True):
    """The measurement of `rollout/allocator_probe.py`: bytes before, during and after a little work."""

    allocator: str
    base: int
    peak: int
    rest: int


def choose_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to a worker's environment `env`. Variables that the user has set stay."""
    if detect_allocator() == OTHER or _has_own(env):
        return {}
    library = None if _tunes_glibc(env) else find_jemalloc()
    if library is None:
        return {name: value for name, value in GLIBC_BOUNDS.items() if name not in env}
    preload = f"{before} {library}" if (before := env.get(PRELOAD, "")) else library
    return {PRELOAD: preload, **{name: value for name, value in _JEMALLOC.items() if name not in env}}


def name_allocator(chosen: Mapping[str, str]) -> str:
    """Return the allocator that the result of `choose_settings` selects; empty where any will do."""
    if PRELOAD in chosen:
        return JEMALLOC
    return GLIBC if chosen else ""


@functools.cache
def find_jemalloc() -> str | None:
    """Return the path of jemalloc if it is installed and this Python starts with it."""
    found = (str(path) for place in _LIBRARY_PATHS for path in Path("/").glob(f"{place}/libjemalloc.so.*"))
    return next(filter(_works, found), None)


def measure_effect(env: Mapping[str, str], *, trimmed: bool) -> AllocatorEffect | None:
    """Measure the memory that some work leaves in a process started with `env`; None if that fails."""
    words = ["-m", "holdwater.rollout.allocator_probe", *(["trim"] if trimmed else [])]
    try:
        ran = _run_python(words, env)
        return msgspec.json.decode(ran.stdout, type=AllocatorEffect)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


def _has_own(env: Mapping[str, str]) -> bool:
    """Return whether the user already preloads an allocator."""
    return "malloc" in env.get(PRELOAD, "")


def _tunes_glibc(env: Mapping[str, str]) -> bool:
    return "glibc.malloc" in env.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name != JEMALLOC_CONF for name in env
    )


def _works(library: str) -> bool:
    """Try the library: one for another machine or page size fails with a message on stderr."""
    try:
        ran = _run_python(["-I", "-S", "-c", ""], {PRELOAD: library})
    except (OSError, subprocess.SubprocessError):
        return False
    return not ran.stderr


def _run_python(words: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
        env=dict(env),
        check=True,
    )
