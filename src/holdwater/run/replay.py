"""Which recorded attempts an attempt can be answered from: its own sample's earlier ones, or another run's.

What they were answered is read in the worker, see `ledger/recording.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from ..core.authoring import Suite
from ..core.config import RunConfig
from ..core.errors import BadInput
from ..core.policy import not_kept
from ..core.records import Attempt, Failure, Instance, Where
from ..gateway.upstreams.replay import UNRECORDED
from ..ledger.ledger import Ledger
from ..ledger.reader import Reader

Earlier = Callable[[Attempt, bytes], Awaitable[tuple[int, ...] | Failure]]
"""The attempts whose replies may be given to this one, at the instance with this payload; or why it cannot be
tried."""


def earlier_in(config: RunConfig, ledger: Ledger) -> Earlier:
    """In this run, or in the one that it replays."""

    async def own(attempt: Attempt, payload: bytes) -> tuple[int, ...]:
        # The first try of a sample, and a regrade, have nothing before them that was asked the same.
        return await ledger.earlier(attempt) if attempt.number > 1 and attempt.regrades is None else ()

    async def elsewhere(attempt: Attempt, payload: bytes) -> tuple[int, ...] | Failure:
        name = msgspec.msgpack.decode(payload, type=_Named).id
        with Reader(config.replays or "") as reader:
            found = reader.tried(name, attempt.sample, attempt.round)
            keep = reader.unrecorded(found)
        return found if keep is None else _unrecorded(keep)

    return own if config.replays is None else elsewhere


def replayed(suite: Suite, run: Path) -> Suite:
    """`suite` with the instances that were tried in a recorded run, as they were then."""
    with Reader(run) as reader:
        size = reader.tried_instances()
    if not size:
        raise BadInput(f"nothing has been tried in this run yet: `{run}`")

    def instances() -> Iterator[Instance]:
        with Reader(run) as reader:
            for row in reader.instances(tried=True):
                yield msgspec.msgpack.decode(reader.payload(row.id), type=Instance)

    return msgspec.structs.replace(suite, instances=instances, size=size, check=None)


def _unrecorded(keep: str) -> Failure:
    message = f"the recorded replies are {not_kept(keep)}"
    return Failure(where=Where.MODEL, kind=UNRECORDED, message=message, again=False)


class _Named(msgspec.Struct):
    """The part of an instance by which it is found in another run."""

    id: str
