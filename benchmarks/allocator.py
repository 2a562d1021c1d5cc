"""Measures the memory that stays in a worker after work: with default libc, with bounds, with jemalloc.

    python benchmarks/allocator.py [--quick] [--json]

A process of each kind loads its heap as a worker does; memory is resident bytes as counted by the kernel. The
benchmark also trims during other work, which shows why only quiet workers are trimmed. It asserts nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from statistics import median

import msgspec
import table
from gauge import MB
from table import Row, say

from holdwater.rollout.allocator import GLIBC_BOUNDS, choose_settings, find_jemalloc

WORK = """
import json, random, sys, threading, time
from pathlib import Path
from holdwater.rollout.allocator import give_back, detect_allocator, measure_resident

threads, rounds, rest = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
stays = []

def work(seed, rounds):
    numbers = random.Random(seed)
    for _ in range(rounds):
        held = [b"x" * numbers.randrange(600, 64_000) for _ in range(1000)]
        held += [b"x" * numbers.randrange(200_000, 3_000_000) for _ in range(8)]
        stays.extend(held[:1000:250])

def at_once(rounds):
    working = [threading.Thread(target=work, args=(seed, rounds)) for seed in range(threads)]
    for thread in working:
        thread.start()
    return working

def stalls(trim):
    '''The longest that an allocation took beside a trim, or beside none.'''
    held = [b"x" * random.randrange(600, 64_000) for _ in range(12_000)]
    del held[::2]
    trimming = threading.Thread(target=give_back if trim else lambda: None)
    longest, begun = 0.0, time.perf_counter()
    trimming.start()
    while trimming.is_alive() or time.perf_counter() < begun + 0.2:
        at = time.perf_counter()
        held.append(b"x" * 50_000)
        longest = max(longest, time.perf_counter() - at)
    trimming.join()
    return longest

base, cpu = measure_resident(), time.process_time()
for thread in at_once(rounds):
    thread.join()
found = {"base": base, "left": measure_resident()}
found["cpu"] = time.process_time() - cpu
status = Path("/proc/self/status").read_text()
found["peak"] = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
time.sleep(rest)
found["rest"] = measure_resident()
begun = time.perf_counter()
give_back()
found["trim"] = time.perf_counter() - begun
found["trimmed"] = measure_resident()
found["alone"], found["beside"] = stalls(False), stalls(True)
print(json.dumps({"allocator": detect_allocator(), **found}))
"""


class Found(msgspec.Struct, frozen=True):
    """The figures of one process, in bytes and seconds."""

    allocator: str
    base: int
    peak: int
    left: int  # right after the work
    rest: int  # some seconds later
    trim: float
    trimmed: int  # after a trim
    cpu: float
    alone: float  # the longest allocation
    beside: float  # the longest allocation while another thread trims


class Sizes(msgspec.Struct, frozen=True):
    """The amount of work per process, and the number of processes of each kind."""

    threads: int
    rounds: int
    repeats: int
    rest: float = 2.0  # seconds


FULL = Sizes(threads=6, rounds=8, repeats=7)
QUICK = Sizes(threads=6, rounds=3, repeats=2)


def main() -> None:
    options = table.options(__doc__ or "")
    sizes = QUICK if options.quick else FULL
    rows = [row for name, env in kinds().items() for row in measured(name, env, sizes)]
    table.show(rows, json=options.json)


def kinds() -> dict[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str]] = {"libc as it comes": {}, "glibc with bounds": GLIBC_BOUNDS}
    if find_jemalloc() is not None:
        found["jemalloc"] = choose_settings({})
    return found


def measured(name: str, env: Mapping[str, str], sizes: Sizes) -> list[Row]:
    say(name)
    found = [_run(env, sizes) for _ in range(sizes.repeats)]

    def megabytes(what: str) -> float:
        return _middle(found, what) / MB

    def milliseconds(what: str) -> float:
        return _middle(found, what) * 1000

    return [
        Row(f"{name}: base", megabytes("base"), "MB"),
        Row(f"{name}: peak", megabytes("peak"), "MB"),
        Row(f"{name}: right after the work", megabytes("left"), "MB"),
        Row(f"{name}: {sizes.rest:g} s later", megabytes("rest"), "MB"),
        Row(f"{name}: after a trim", megabytes("trimmed"), "MB"),
        Row(f"{name}: the trim took", milliseconds("trim"), "ms"),
        Row(f"{name}: CPU of the work", milliseconds("cpu"), "ms"),
        Row(f"{name}: longest allocation", milliseconds("alone"), "ms"),
        Row(f"{name}: longest allocation beside a trim", milliseconds("beside"), "ms"),
    ]


def _middle(found: list[Found], what: str) -> float:
    return median(float(getattr(one, what)) for one in found)


def _run(env: Mapping[str, str], sizes: Sizes) -> Found:
    words = [sys.executable, "-c", WORK, str(sizes.threads), str(sizes.rounds), str(sizes.rest)]
    ran = subprocess.run(words, env={**os.environ, **env}, stdout=subprocess.PIPE, timeout=300, check=True)
    return msgspec.json.decode(ran.stdout, type=Found)


if __name__ == "__main__":
    main()
