"""The instances that can be ordered: the suite's, by id, and complete instances that orders contain.

All of them are in the ledger, none in memory. The suite is read once, in the background: an order for an
instance that has not been read yet waits for it.
"""

from __future__ import annotations

import asyncio

import msgspec
from blake3 import blake3

from ...core.authoring import Agent, Suite
from ...core.config import RunConfig
from ...core.errors import BadInput, HoldwaterError
from ...core.records import Instance
from ...ledger.ledger import Ledger, PlannedInstance, SuitePass
from ..conductor.feed import encode_instance
from ..conductor.instance_source import BATCH, InstanceSource

DIGITS = 32  # of the digest in the name of an instance that an order contains


class InstanceCatalogue:
    """The instances of one server."""

    def __init__(self, suite: Suite, agent: Agent, config: RunConfig, ledger: Ledger) -> None:
        self.agent = agent  # acts on the instances
        self._source = InstanceSource(suite, config)
        self._ledger = ledger
        self._changed = asyncio.Condition()
        self._complete = False
        self.error: HoldwaterError | None = None

    async def read_suite(self) -> None:
        """Write every instance of the suite to the ledger; a failure is kept as `error`."""
        try:
            while items := await self._source.take(BATCH):
                await self._write([encode_instance(*item) for item in items])
                async with self._changed:
                    self._changed.notify_all()
        except BadInput as error:
            self.error = error
        finally:
            self._source.close()
        self.error = self.error or self._source.error
        self._complete = True
        async with self._changed:
            self._changed.notify_all()

    @staticmethod
    def name_instance(instance: str | Instance) -> str:
        """Return its name in the ledger. One outside the suite is named by content, to be stored once."""
        if isinstance(instance, str):
            return instance
        return f"{instance.id}@{blake3(msgspec.msgpack.encode(instance)).hexdigest()[:DIGITS]}"

    async def find_row(self, instance: str | Instance) -> int | None:
        """Return its row in the ledger; None if no instance has this id."""
        if isinstance(instance, Instance):
            return await self._add_instance(instance)
        while (known := await self._ledger.find_known(instance)) is None:
            async with self._changed:
                if self._complete:
                    return None
                await self._changed.wait()
        return known.id

    async def _write(self, items: list[PlannedInstance]) -> None:
        """Write new instances, and instances that changed since an earlier conductor wrote them."""
        new: list[PlannedInstance] = []
        for item, known in zip(items, await self._ledger.mark_seen(items, SuitePass.PLAN), strict=True):
            if known is None:
                new.append(item)
            elif known.digest != item.digest:
                await self._ledger.replace_instance(item)
                await self._ledger.note(
                    "instance.changed", f"the instance has changed in the suite: `{item.name}`"
                )
        if new:
            await self._ledger.plan(new)

    async def _add_instance(self, instance: Instance) -> int:
        """Write an instance that an order contains, unless it is there; return its row."""
        item = msgspec.structs.replace(
            encode_instance(instance, "an order"), name=self.name_instance(instance)
        )
        known = await self._ledger.find_known(item.name)
        if known is not None:
            return known.id
        try:
            (row,) = await self._ledger.plan([item])
        except BadInput:  # another order has added it meanwhile
            known = await self._ledger.find_known(item.name)
            if known is None:
                raise
            return known.id
        return row
