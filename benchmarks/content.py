"""What the agents of the benchmarks say: text and images, unique for a seed and the same each time.

Only the standard library: the command agent runs it inside the sandbox.
"""

from __future__ import annotations

import random

# About as often as in English, so that it compresses about as badly as single letters can.
LETTERS = "      eeeeetttaaaooiinnsshhrrddllccuummwwffggyyppbbvkxjqz.,\n".replace("\n", " ")
_TABLE = bytes(ord(LETTERS[code % len(LETTERS)]) for code in range(256))


def text(seed: str, size: int) -> str:
    """`size` characters that JSON need not escape."""
    return random.Random(seed).randbytes(size).translate(_TABLE).decode("ascii")


def image(seed: str, size: int) -> bytes:
    """`size` bytes that do not compress, as those of a picture."""
    return random.Random(seed).randbytes(size)
