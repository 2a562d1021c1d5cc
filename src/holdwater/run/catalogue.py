"""The instances that can be ordered: those of the suite, by their ids, and whole ones that orders bring.

All of them are in the ledger; nothing is kept in memory. The suite is gone through once, beside everything
else: an order for an instance that has not come yet waits for it.
"""

from __future__ import annotations

import asyncio

import msgspec
from blake3 import blake3

from ..core.authoring import Agent, Suite
from ..core.config import RunConfig
from ..core.errors import BadInput, HoldwaterError
from ..core.records import Instance
from ..ledger.ledger import Ledger, Planned, SuitePass
from .feed import BATCH, planned
from .source import Source

DIGITS = 32  # of its digest, in the name of an instance that an order brings


class Catalogue:
    """One server's."""

    def __init__(self, suite: Suite, agent: Agent, config: RunConfig, ledger: Ledger) -> None:
        self.agent = agent  # who acts on them
        self._source = Source(suite, config)
        self._ledger = ledger
        self._grown = asyncio.Condition()
        self._whole = False
        self.error: HoldwaterError | None = None

    async def go_through(self) -> None:
        """Write every instance of the suite to the ledger; what goes wrong is kept as `error`."""
        try:
            while items := await self._source.take(BATCH):
                await self._write([planned(*item) for item in items])
                async with self._grown:
                    self._grown.notify_all()
        except BadInput as error:
            self.error = error
        finally:
            self._source.close()
        self.error = self.error or self._source.error
        self._whole = True
        async with self._grown:
            self._grown.notify_all()

    @staticmethod
    def name(instance: str | Instance) -> str:
        """What it is known by: one that is no part of the suite by its content, so that it is there once."""
        if isinstance(instance, str):
            return instance
        return f"{instance.id}@{blake3(msgspec.msgpack.encode(instance)).hexdigest()[:DIGITS]}"

    async def row(self, instance: str | Instance) -> int | None:
        """Where it is in the ledger; None: there is none with this id."""
        if isinstance(instance, Instance):
            return await self._bring(instance)
        while (known := await self._ledger.known(instance)) is None:
            async with self._grown:
                if self._whole:
                    return None
                await self._grown.wait()
        return known.id

    async def _write(self, items: list[Planned]) -> None:
        """New ones, and what has changed since an earlier conductor wrote it."""
        new: list[Planned] = []
        for item, known in zip(items, await self._ledger.sight(items, SuitePass.PLAN), strict=True):
            if known is None:
                new.append(item)
            elif known.digest != item.digest:
                await self._ledger.replace(item.name, item.digest, item.payload, item.place)
                await self._ledger.note("instance.changed", f"the suite has it otherwise now: `{item.name}`")
        if new:
            await self._ledger.plan(new)

    async def _bring(self, instance: Instance) -> int:
        """Write an instance that an order brings, if it is not there."""
        item = msgspec.structs.replace(planned(instance, "an order"), name=self.name(instance))
        known = await self._ledger.known(item.name)
        if known is not None:
            return known.id
        try:
            (row,) = await self._ledger.plan([item])
        except BadInput:  # another order has brought it meanwhile
            known = await self._ledger.known(item.name)
            if known is None:
                raise
            return known.id
        return row
