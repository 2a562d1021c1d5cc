"""How a call ended, and the exchange that records it. `sessions.py` writes the exchange."""

from __future__ import annotations

import time
from typing import NamedTuple

from msgspec import Raw

from ..core.exchange import Exchange
from ..core.prices import ModelPrice, add_cost
from ..core.records import NO_USAGE, ModelUsage
from ..dialect import find_dialect
from .recorder import RequestDelta

BILLED_KINDS = frozenset(
    {"error", "garbage", "cut", "stall"}
)  # kinds of failure in which the upstream did answer


class CallEnding(NamedTuple):
    """How a call ended."""

    status: int  # sent to the client; 499 if nothing was sent
    reply: bytes | None = None  # JSON
    usage: ModelUsage = ModelUsage(requests=1)
    error: str = ""
    streamed: bool = False
    saved: ModelUsage | None = None  # replaces `usage`: the reply came from the record
    version: str = ""  # of the answering policy
    chunks: bytes | None = None  # as in `Exchange`
    billed: bool = True  # False: refused by the upstream, or never sent, so it costs nothing

    def make_exchange(
        self, number: int, delta: RequestDelta, price: ModelPrice | None, started: float, by: str
    ) -> Exchange:
        """Return the exchange of a call that began at `started`; `price` is that of the run's model."""
        usage = NO_USAGE
        if self.saved is None:
            known = price if find_dialect(delta.dialect).uses_run_model else None
            usage = add_cost(self.usage, known, billed=self.billed)
        return Exchange(
            number=number,
            parent=delta.parent,
            keep=delta.keep,
            append=tuple(Raw(message) for message in delta.append),
            head=Raw(delta.head) if delta.head is not None else None,
            reply=Raw(self.reply) if self.reply is not None else None,
            status=self.status,
            dialect=delta.dialect,
            streamed=self.streamed,
            usage=usage,
            error=self.error,
            started=started,
            seconds=max(0.0, time.time() - started),
            identity=delta.identity,
            saved=self.saved or NO_USAGE,
            version=self.version,
            by=by,
            chunks=Raw(self.chunks) if self.chunks is not None else None,
        )
