"""Serves the browser view of runs, as `holdwater view` does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..core.errors import BadInput
from ..ledger.directory import RUNS
from ..serve.settings import ServerSettings
from ..viewer.run_pool import RunPool
from ..viewer.server import ViewServer


def serve_view(
    roots: Sequence[str | os.PathLike[str]],
    announce: Callable[[str, str], None],
    *,
    listen: str = "127.0.0.1:0",
    hosts: Sequence[str] = (),
) -> None:
    """Serve the runs below `roots` (default: `runs/`) until Ctrl-C; `announce` gets address and token."""
    places = [Path(root) for root in roots] or [RUNS]
    for place in places:
        if not place.is_dir():
            raise BadInput(f"no such directory: `{place}`", "make a run: `holdwater run demo`")
    settings = ServerSettings(listen=listen, hosts=tuple(hosts))
    asyncio.run(_serve(RunPool(places), settings, announce))


async def _serve(pool: RunPool, settings: ServerSettings, announce: Callable[[str, str], None]) -> None:
    async with ViewServer(pool, settings) as server:
        announce(server.address, server.token)
        await asyncio.Event().wait()
