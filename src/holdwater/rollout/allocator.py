"""The memory allocator: chooses one for workers, detects the one of this process, gives memory back.

Workers have jemalloc where it is installed, otherwise glibc with bounds. `worker_memory.py` decides when to
give memory back. `python -m holdwater.rollout.allocator [trim]` measures the memory that a typical workload
leaves, and prints it as one JSON line.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..core.records import MiB, Record

JEMALLOC = "jemalloc"
GLIBC = "glibc"
OTHER = "other"  # for example musl's

_ALL_ARENAS = b"arena.4096.purge"  # jemalloc's number for all arenas
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MALLOPT_BOUNDS = {-1: MiB, -3: MiB, -8: 2}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX

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

# The workload of the measurement.
THREADS = 6
ROUNDS = 2
TEXTS = 400  # of up to 64 KB
BODIES = 8  # of up to 3 MB
LITTLE = 10 * 1024 * 1024  # bytes above the start, at which giving back is done
SECONDS = 3.0  # to give back at most


def detect_allocator() -> str:
    """Return the allocator that this process really uses, independent of its environment."""
    if f"lib{JEMALLOC}" in Path("/proc/self/maps").read_text(errors="replace"):
        return JEMALLOC
    return GLIBC if hasattr(ctypes.CDLL(None), "gnu_get_libc_version") else OTHER


def give_back() -> None:
    """Return unused memory to the kernel. Raises if the allocator does not support that.

    The time grows with the memory of the process. Threads that allocate meanwhile stall.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallctl"):
        library.malloc_trim(0)
    elif status := library.mallctl(_ALL_ARENAS, None, None, None, 0):
        raise OSError(status, os.strerror(status))


def keep_bounded() -> None:
    """Make freed large blocks return to the kernel at once, in a process that we did not start.

    By default glibc raises its threshold with every large block that is freed, and keeps the next ones. This
    fixes the threshold.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallctl") and hasattr(library, "mallopt"):
        for parameter, value in _MALLOPT_BOUNDS.items():
            library.mallopt(parameter, value)


def measure_resident() -> int:
    """Return the resident bytes of this process. Cheap: it is called many times a second."""
    fd = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(fd, 128).split()[1]) * _PAGE
    finally:
        os.close(fd)


class AllocatorEffect(Record, frozen=True):
    """The memory of a process, in bytes: before, during and after a little work."""

    allocator: str
    base: int
    peak: int
    rest: int


def choose_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to a worker's environment `env`. Variables that the user has set stay."""
    preloads_own = "malloc" in env.get(PRELOAD, "")
    if detect_allocator() == OTHER or preloads_own:
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
    words = ["-m", "holdwater.rollout.allocator", *(["trim"] if trimmed else [])]
    try:
        ran = _run_python(words, env)
        return msgspec.json.decode(ran.stdout, type=AllocatorEffect)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


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


def main() -> None:
    base = measure_resident()
    stays: list[bytes] = []  # bound: a few a round
    sizes: list[int] = []  # bound: one a round
    threads = [threading.Thread(target=_work, args=(seed, stays, sizes)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "trim" in sys.argv[1:]:
        _give_back_all(base)
    found = (
        f'"allocator":"{detect_allocator()}","base":{base},"peak":{max(sizes)},"rest":{measure_resident()}'
    )
    sys.stdout.write(f"{{{found}}}\n")


def _give_back_all(base: int) -> None:
    """Give memory back until little is left, repeatedly, as workers do.

    jemalloc skips a purge while its own thread runs one, which a busy machine may delay.
    """
    until = time.monotonic() + SECONDS
    give_back()
    while measure_resident() > base + LITTLE and time.monotonic() < until:
        time.sleep(0.05)
        give_back()


def _work(seed: int, stays: list[bytes], sizes: list[int]) -> None:
    numbers = random.Random(seed)
    for _ in range(ROUNDS):
        held = [b"x" * numbers.randrange(600, 64_000) for _ in range(TEXTS)]
        held += [b"x" * numbers.randrange(200_000, 3_000_000) for _ in range(BODIES)]
        sizes.append(measure_resident())
        stays += held[: TEXTS : TEXTS // 4]


if __name__ == "__main__":
    main()
