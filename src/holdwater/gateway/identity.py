"""What makes two requests the same: their messages and what else they ask for, but for what a client makes up
anew at each start. By it the replies of an earlier attempt are found again.

What is made up in messages is said by each dialect's `form.steady`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from blake3 import blake3
from msgspec import Raw

from ..core.masking import mask_bytes

# Keys that a client fills anew each time it is started, or that say how and not what to answer.
PASSING = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "stream",
        "stream_options",
        "user",
    }
)
_SIZE = 16  # bytes of blake3


def identity(dialect: str, head: Mapping[str, Raw], names: bytes) -> str:
    """Of a request with these keys beside its messages, and these names of its messages."""
    asked = [(key, head[key]) for key in sorted(head.keys() - PASSING)]
    return blake3(mask_bytes(msgspec.json.encode([dialect, asked])) + names).hexdigest(_SIZE)
