"""Makes the messages of the benchmark agents: text and images, unique per seed and reproducible.

It uses only the standard library: the command agent runs it inside the sandbox.
"""

from __future__ import annotations

import random

# Letters are about as frequent as in English, so the text compresses about as badly as single letters can.
LETTERS = "      eeeeetttaaaooiinnsshhrrddllccuummwwffggyyppbbvkxjqz.,\n".replace("\n", " ")
_TABLE = bytes(ord(LETTERS[code % len(LETTERS)]) for code in range(256))


def text(seed: str, size: int) -> str:
    """Return `size` characters that JSON need not escape."""
    return random.Random(seed).randbytes(size).translate(_TABLE).decode("ascii")


def image(seed: str, size: int) -> bytes:
    """Return `size` incompressible bytes, like those of a picture."""
    return random.Random(seed).randbytes(size)
