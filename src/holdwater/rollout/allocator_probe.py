"""What some work leaves in a process: `python -m holdwater.rollout.allocator_probe [trim]`, in one JSON line.

Threads make and free what a worker does: many blocks of text, some large ones, and a few that stay.
`run/allocator.py` starts it with and without settings.
"""

from __future__ import annotations

import random
import sys
import threading
import time

from .allocator import give_back, in_force, resident

THREADS = 6
ROUNDS = 2
TEXTS = 400  # of up to 64 KB
BODIES = 8  # of up to 3 MB
LITTLE = 10 * 1024 * 1024  # bytes
SECONDS = 3.0


def main() -> None:
    base = resident()
    stays: list[bytes] = []  # bound: a few a round
    sizes: list[int] = []  # bound: one a round
    threads = [threading.Thread(target=_work, args=(seed, stays, sizes)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if "trim" in sys.argv[1:]:
        _give_back_all(base)
    found = f'"allocator":"{in_force()}","base":{base},"peak":{max(sizes)},"rest":{resident()}'
    sys.stdout.write(f"{{{found}}}\n")


def _give_back_all(base: int) -> None:
    """Give back until little is left, as workers do again and again.

    jemalloc skips a purge while its own thread is at one, which a busy machine may hold up.
    """
    until = time.monotonic() + SECONDS
    give_back()
    while resident() > base + LITTLE and time.monotonic() < until:
        time.sleep(0.05)
        give_back()


def _work(seed: int, stays: list[bytes], sizes: list[int]) -> None:
    numbers = random.Random(seed)
    for _ in range(ROUNDS):
        held = [b"x" * numbers.randrange(600, 64_000) for _ in range(TEXTS)]
        held += [b"x" * numbers.randrange(200_000, 3_000_000) for _ in range(BODIES)]
        sizes.append(resident())
        stays += held[: TEXTS : TEXTS // 4]


if __name__ == "__main__":
    main()
