"""Feeds samples to the planner: first the open ones of an earlier conductor, then the suite's, lazily.

A sample is in the ledger before it is handed out. `compare_suite` finds changes in the suite on a resume.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
from blake3 import blake3

from ...core.config import RunConfig
from ...core.errors import BadInput, DuplicateInstance, HoldwaterError
from ...core.events import GroupMembership, SampleOpened
from ...core.records import Instance
from ...ledger.ledger import Ledger, OpenSample, PlannedInstance, SuitePass
from .instance_source import BATCH, READ_LEAST, READ_MORE, InstanceSource

NAMED = 10  # changed or missing instances that a message names


class SampleFeed(Protocol):
    """Gives the scheduler samples to try."""

    @property
    def error(self) -> HoldwaterError | None: ...

    async def take(self, count: int) -> list[SampleOpened]:
        """Return about `count` samples or fewer, as soon as there are any; none when there are no more."""

    def close(self) -> None: ...


class RunFeed:
    """The samples of a run: first the open ones in the ledger, then new ones."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        source: InstanceSource,
        *,
        resumed: bool,
        grouped: bool = False,  # the samples of an instance are scored together
        say: Callable[[str], None] = lambda line: None,  # for the user
    ) -> None:
        self._shard = config.shard
        self._say = say
        self._samples = config.samples
        self._ledger = ledger
        self._source = source
        self._resumed = resumed
        self._grouped = grouped
        self._open_samples: AsyncIterator[OpenSample] | None = (
            ledger.open_samples(config.samples) if resumed else None
        )
        self._refused: HoldwaterError | None = None
        self._any_taken = False

    @property
    def error(self) -> HoldwaterError | None:
        """The error of the suite, if there was one."""
        return self._refused or self._source.error

    async def take(self, count: int) -> list[SampleOpened]:
        opened = await self._take_open(count)
        while not opened and self._refused is None:
            items = await self._source.take(math.ceil(count / self._samples))
            if not items:
                await self._end()
                break
            for row in await self._plan(self._encode_items(items)):
                group = self._find_membership(row, self._samples)
                opened += [
                    SampleOpened(instance=row, sample=sample, group=group) for sample in range(self._samples)
                ]
        self._any_taken = self._any_taken or bool(opened)
        return opened

    def close(self) -> None:
        self._source.close()

    async def _end(self) -> None:
        """Refuse a run without instances, unless the suite is just too small for this shard."""
        if self._any_taken or self._resumed or self._source.error:
            return
        if self._shard is not None and self._source.matched:
            empty = "no instance of the suite falls into `--shard {}/{}`".format(*self._shard)
            self._say(f"warning: {empty}")
            await self._ledger.note("shard.empty", empty)
            return
        self._refused = BadInput("no instance was chosen", "check `--only` and the suite")

    async def _take_open(self, count: int) -> list[SampleOpened]:
        opened: list[SampleOpened] = []
        while self._open_samples is not None and len(opened) < count:
            try:
                standing = await anext(self._open_samples)
            except StopAsyncIteration:
                self._open_samples = None
                break
            group = self._find_membership(standing.instance, standing.open_count, scored=standing.scored)
            opened.append(msgspec.structs.replace(make_opened_event(standing), group=group))
        return opened

    def _find_membership(self, instance: int, size: int, *, scored: bool = False) -> GroupMembership | None:
        """Return the group of an instance's open samples: its id is the instance's row."""
        return GroupMembership(group=instance, size=size, scored=scored) if self._grouped else None

    def _encode_items(self, items: list[tuple[Instance, str]]) -> list[PlannedInstance]:
        """Encode the items for the ledger; an invalid one ends the pulling, earlier ones stay."""
        rows: list[PlannedInstance] = []
        try:
            for item in items:
                rows.append(encode_instance(*item))
        except BadInput as error:
            self._refused = error
        return rows

    async def _plan(self, items: list[PlannedInstance]) -> list[int]:
        """Write the new instances; a duplicate ends the pulling, earlier ones stay."""
        try:
            return await self._ledger.plan(items)
        except DuplicateInstance as error:
            self._refused = error
            return list(error.rows)


class EmptyFeed:
    """The feed of a server: samples come from orders, none are pulled."""

    error: HoldwaterError | None = None

    async def take(self, count: int) -> list[SampleOpened]:
        return []

    def close(self) -> None:
        return


def encode_instance(instance: Instance, place: str) -> PlannedInstance:
    """Encode an instance for the ledger."""
    try:
        payload = msgspec.msgpack.encode(instance)
        msgspec.msgpack.decode(payload, type=Instance)  # as a worker will: records do not check their fields
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise BadInput(f"{place} (`{instance.id}`) cannot be stored: {error}") from error
    return PlannedInstance(name=instance.id, digest=blake3(payload).digest(), payload=payload, place=place)


def make_opened_event(standing: OpenSample) -> SampleOpened:
    """Return the event for an open sample, with the attempts and retries it has used."""
    spent = standing.spent
    return SampleOpened(
        instance=standing.instance,
        sample=standing.sample,
        number=standing.number,
        round=spent.round,
        retries=spent.retries,
        scale=spent.scale,
        first=spent.first,
        losses=standing.losses,
        crashes=standing.crashes,
        outages=standing.outages,
        best=standing.best,
        last=standing.last,
        regrades=standing.regrades,
    )


async def compare_suite(ledger: Ledger, source: InstanceSource, *, accept: bool) -> None:
    """Refuse to resume if planned instances changed or vanished in the suite, unless `accept` is set.

    The suite is read only until all planned instances have come: it may have no end.
    """
    changed: list[str] = []
    absent = (await ledger.counts()).planned
    most = READ_LEAST + READ_MORE * absent
    while absent and most > 0 and (items := await source.take(BATCH)):
        most -= len(items)
        rows = [encode_instance(*item) for item in items]
        for row, known in zip(rows, await ledger.mark_seen(rows, SuitePass.COMPARE), strict=True):
            absent -= known is not None
            if known is None or known.digest == row.digest:
                continue
            changed += [row.name] if len(changed) < NAMED else []
            if accept:
                await ledger.replace_instance(row)
    source.close()
    # After an error of the suite, missing instances are unknown: the run will end with that error.
    missing = await ledger.find_missing(NAMED) if source.error is None else []
    if accept or not (changed or missing):
        return
    parts = [
        f"changed: {_join_names(changed)}" if changed else "",
        f"missing: {_join_names(missing)}" if missing else "",
    ]
    raise BadInput(
        f"the suite has changed since the run was planned; {'; '.join(part for part in parts if part)}",
        "`--accept-changes` resumes anyway: settled instances keep their verdicts",
    )


def _join_names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + (", ..." if len(names) == NAMED else "")
