"""Measures the memory that a typical workload leaves in a process, and prints it as one JSON line.

Run `python -m holdwater.rollout.allocator_probe [trim]`. Like a worker, its threads allocate and free many
blocks of text and some large ones, and keep a few. `run/fleet/allocator.py` starts it with and without
allocator settings.
"""

from __future__ import annotations

import random
import sys
import threading
import time

from .allocator import detect_allocator, give_back, measure_resident

THREADS = 6
ROUNDS = 2
TEXTS = 400  # of up to 64 KB
BODIES = 8  # of up to 3 MB
LITTLE = 10 * 1024 * 1024  # bytes above the start, at which giving back is done
SECONDS = 3.0  # to give back at most


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
