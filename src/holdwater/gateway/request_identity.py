"""Computes the identity of a request, by which a later attempt finds the recorded replies of an earlier one.

It covers the messages and the other keys, without the parts that a client generates anew at each start. Each
dialect's `form.strip_generated` drops those parts from messages.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from blake3 import blake3
from msgspec import Raw

from ..core.masking import mask_bytes

# Keys that a client fills anew at each start, or that change the form of the answer and not its content.
VOLATILE_KEYS = frozenset(
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


def identify_request(dialect: str, head: Mapping[str, Raw], names: bytes) -> str:
    """Return the identity of a request with the keys `head` and the message digests `names`."""
    asked = [(key, head[key]) for key in sorted(head.keys() - VOLATILE_KEYS)]
    return blake3(mask_bytes(msgspec.json.encode([dialect, asked])) + names).hexdigest(_SIZE)
