"""Finds recorded attempts whose replies an attempt may reuse: of its own sample, or of another run.

Workers read the replies themselves, see `conversation/earlier_replies.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from ...core.authoring import Suite
from ...core.config import RunConfig
from ...core.errors import BadInput
from ...core.failures import UNRECORDED
from ...core.fork_origin import ForkOrigin
from ...core.policy import explain_not_kept
from ...core.records import Attempt, AttemptFailure, FailureOrigin, Instance
from ...ledger.ledger import Ledger
from ...ledger.reader import LedgerReader

EarlierLookup = Callable[[Attempt, bytes], Awaitable[tuple[int, ...] | AttemptFailure]]
"""Returns the attempts whose replies this one may reuse, given the payload; or why it cannot be tried."""


def make_earlier_lookup(config: RunConfig, ledger: Ledger) -> EarlierLookup:
    """Return a lookup in this run, or in the run that it replays."""

    async def own(attempt: Attempt, payload: bytes) -> tuple[int, ...]:
        # The first try of a sample, and a regrade, have no earlier attempt with the same requests.
        return (
            await ledger.earlier_attempts(attempt) if attempt.number > 1 and attempt.regrades is None else ()
        )

    async def elsewhere(attempt: Attempt, payload: bytes) -> tuple[int, ...] | AttemptFailure:
        name = msgspec.msgpack.decode(payload, type=_InstanceId).id
        with LedgerReader(config.replays or "") as reader:
            found = reader.find_round_attempts(name, attempt.sample, attempt.round)
            keep = reader.find_unrecorded_policy(found)
        return found if keep is None else _fail_unrecorded(keep)

    return own if config.replays is None else elsewhere


def repeat_suite(suite: Suite, config: RunConfig) -> Suite:
    """Return `suite` with the instances of the run that a replay or a fork repeats, as they were then."""
    if config.fork is not None:
        return _fork_suite(suite, config.fork)
    return suite if config.replays is None else _replay_suite(suite, Path(config.replays))


def _fork_suite(suite: Suite, origin: ForkOrigin) -> Suite:
    def instances() -> Iterator[Instance]:
        with LedgerReader(origin.directory) as reader:
            row = reader.find_instance(origin.instance)
            if row is None:
                raise BadInput(f"no such instance in `{origin.directory}`: `{origin.instance}`")
            yield msgspec.msgpack.decode(reader.payload(row.id), type=Instance)

    return msgspec.structs.replace(suite, instances=instances, size=1, check=None, needs=None)


def _replay_suite(suite: Suite, run: Path) -> Suite:
    with LedgerReader(run) as reader:
        size = reader.count_tried_instances()
    if not size:
        raise BadInput(f"nothing has been tried in this run yet: `{run}`")

    def instances() -> Iterator[Instance]:
        with LedgerReader(run) as reader:
            for row in reader.instances(tried=True):
                yield msgspec.msgpack.decode(reader.payload(row.id), type=Instance)

    return msgspec.structs.replace(suite, instances=instances, size=size, check=None)


def _fail_unrecorded(keep: str) -> AttemptFailure:
    message = f"the recorded replies are {explain_not_kept(keep)}"
    return AttemptFailure(where=FailureOrigin.MODEL, kind=UNRECORDED, message=message, again=False)


class _InstanceId(msgspec.Struct):
    """The part of an instance by which it is found in another run."""

    id: str
