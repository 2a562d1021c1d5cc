"""Where the planner's samples come from: what an earlier conductor left open, then the suite, lazily.

A sample is written to the ledger before it is handed out. `compare` tells a resume what changed in the suite.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
from blake3 import blake3

from ..core.config import RunConfig
from ..core.errors import BadInput, DuplicateInstance, HoldwaterError
from ..core.events import Opened
from ..core.records import Instance
from ..ledger.ledger import Ledger, Planned, Standing, SuitePass
from .source import Source

BATCH = 256
NAMED = 10  # changed or missing instances that a message names
READ_MORE = 10  # times the planned instances that are read, and so many beside them,
READ_LEAST = 100_000  # until those that did not come count as missing: a suite may have no end


class Feed(Protocol):
    """Gives the scheduler samples to try."""

    @property
    def error(self) -> HoldwaterError | None: ...

    async def take(self, count: int) -> list[Opened]:
        """Some of about `count` samples, as soon as there are any; none when there are no more."""

    def close(self) -> None: ...


class RunFeed:
    """The samples of a run: first those that stand open in the ledger, then new ones."""

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        source: Source,
        *,
        resumed: bool,
        say: Callable[[str], None] = lambda line: None,  # for the user
    ) -> None:
        self._shard = config.shard
        self._say = say
        self._samples = config.samples
        self._ledger = ledger
        self._source = source
        self._resumed = resumed
        self._standing: AsyncIterator[Standing] | None = (
            ledger.open_samples(config.samples) if resumed else None
        )
        self._refused: HoldwaterError | None = None
        self._given = False

    @property
    def error(self) -> HoldwaterError | None:
        """What the suite did wrong, if it did."""
        return self._refused or self._source.error

    async def take(self, count: int) -> list[Opened]:
        opened = await self._take_standing(count)
        while not opened and self._refused is None:
            items = await self._source.take(math.ceil(count / self._samples))
            if not items:
                await self._end()
                break
            for row in await self._plan(self._storable(items)):
                opened += [Opened(instance=row, sample=sample) for sample in range(self._samples)]
        self._given = self._given or bool(opened)
        return opened

    def close(self) -> None:
        self._source.close()

    async def _end(self) -> None:
        """A run without an instance is a mistake, unless a small suite has none for this shard."""
        if self._given or self._resumed or self._source.error:
            return
        if self._shard is not None and self._source.matched:
            empty = "no instance of the suite falls into `--shard {}/{}`".format(*self._shard)
            self._say(f"warning: {empty}")
            await self._ledger.note("shard.empty", empty)
            return
        self._refused = BadInput("no instance was chosen", "look at `--only` and the suite")

    async def _take_standing(self, count: int) -> list[Opened]:
        opened: list[Opened] = []
        while self._standing is not None and len(opened) < count:
            try:
                opened.append(reopened(await anext(self._standing)))
            except StopAsyncIteration:
                self._standing = None
        return opened

    def _storable(self, items: list[tuple[Instance, str]]) -> list[Planned]:
        """The items as they are written; one that cannot be ends the pulling, what came before it stays."""
        rows: list[Planned] = []
        try:
            for item in items:
                rows.append(planned(*item))
        except BadInput as error:
            self._refused = error
        return rows

    async def _plan(self, items: list[Planned]) -> list[int]:
        """Write the new instances; a duplicate ends the pulling, and those before it stay."""
        try:
            return await self._ledger.plan(items)
        except DuplicateInstance as error:
            self._refused = error
            return list(error.rows)


class NoFeed:
    """The samples of a server are ordered: nothing is pulled."""

    error: HoldwaterError | None = None

    async def take(self, count: int) -> list[Opened]:
        return []

    def close(self) -> None:
        return


def planned(instance: Instance, place: str) -> Planned:
    """An instance as it is written to the ledger."""
    try:
        payload = msgspec.msgpack.encode(instance)
        msgspec.msgpack.decode(payload, type=Instance)  # a worker will: records do not check their fields
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise BadInput(f"{place} (`{instance.id}`) cannot be stored: {error}") from error
    return Planned(name=instance.id, digest=blake3(payload).digest(), payload=payload, place=place)


def reopened(standing: Standing) -> Opened:
    """An open sample with what it has used up."""
    spent = standing.spent
    return Opened(
        instance=standing.instance,
        sample=standing.sample,
        number=standing.number,
        round=spent.round,
        retries=spent.retries,
        scale=spent.scale,
        first=spent.first,
        losses=standing.losses,
        crashes=standing.crashes,
        best=standing.best,
        last=standing.last,
        regrades=standing.regrades,
    )


async def compare(ledger: Ledger, source: Source, *, accept: bool) -> None:
    """Refuse to resume over a suite whose planned instances changed or vanished, unless that is accepted.

    The suite is read until all planned instances have come, and no further: it may have no end.
    """
    changed: list[str] = []
    absent = (await ledger.counts()).planned
    most = READ_LEAST + READ_MORE * absent
    while absent and most > 0 and (items := await source.take(BATCH)):
        most -= len(items)
        rows = [planned(*item) for item in items]
        for row, known in zip(rows, await ledger.sight(rows, SuitePass.COMPARE), strict=True):
            absent -= known is not None
            if known is None or known.digest == row.digest:
                continue
            changed += [row.name] if len(changed) < NAMED else []
            if accept:
                await ledger.replace(row.name, row.digest, row.payload, row.place)
    source.close()
    # A suite that raised cannot say what is missing: the run will end with its error.
    missing = await ledger.missing(NAMED) if source.error is None else []
    if accept or not (changed or missing):
        return
    parts = [f"changed: {_list(changed)}" if changed else "", f"missing: {_list(missing)}" if missing else ""]
    raise BadInput(
        f"the suite is not what was planned; {'; '.join(part for part in parts if part)}",
        "`--accept-changes` resumes all the same: settled instances keep their verdicts",
    )


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) + (", ..." if len(names) == NAMED else "")
