"""The settings of a server, stored with the configuration of its run (`config.py`)."""

from __future__ import annotations

from typing import Annotated

from .options import ConfigOption, OptionGroup
from .records import MiB, Record

SERVER = OptionGroup.SERVER


class ServingConfig(Record, frozen=True):
    """The settings of a server."""

    listen: Annotated[
        str, ConfigOption(SERVER, "`HOST:PORT` or `unix:PATH` (127.0.0.1:8400); other machines need a key")
    ] = "127.0.0.1:8400"
    protocol: Annotated[
        str | None,
        ConfigOption(SERVER, "A protocol that the server speaks beside HTTP: `verifiers`"),
    ] = None
    protocol_listen: Annotated[
        str | None,
        ConfigOption(SERVER, "The address of `--protocol`: `HOST:PORT` or `unix:PATH` (127.0.0.1:5000)"),
    ] = None
    # Open rollouts at once, including waiting and undelivered ones.
    queue: Annotated[
        int,
        ConfigOption(SERVER, "Maximum number of open rollouts; more are rejected as `busy` (4096)", least=1),
    ] = 4096
    largest_order: int = 64 * MiB  # bytes of a request body
    policy: Annotated[
        str | None,
        ConfigOption(
            SERVER, "`path.py:name` of a function that answers model calls, for orders that request it"
        ),
    ] = None
    grace: Annotated[
        float,
        ConfigOption(
            SERVER, "Seconds that a client has to reconnect before its work is cancelled (3)", least=0
        ),
    ] = 3.0
    return_grace: Annotated[
        float, ConfigOption(SERVER, "The same, after a restart of the server (60)", least=0)
    ] = 60.0
    least_workers: Annotated[
        int, ConfigOption(SERVER, "Workers that stay while there is no work (1)", least=1)
    ] = 1
    quiet: float = 30.0  # seconds that a worker must be idle before it is removed
    starting: float = 60.0  # seconds in which a worker must become ready
