"""`holdwater serve`: serves a suite and an agent to clients, which order rollouts over HTTP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from .console import CommandConsole
from .flags import Flag, SharedFlags, make_option, merge_flags
from .runs import choose_agent

SERVING = Group("Server", sort_key=0)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ServingFlags:
    """Flags of a server only."""

    listen: Annotated[
        str | None, make_option(SERVING, "`HOST:PORT` or `unix:PATH` (127.0.0.1:8400); other machines need a key")
    ] = None
    key_file: Annotated[
        str | None, make_option(SERVING, "A file with the keys that clients may use; else `HOLDWATER_SERVE_KEYS`")
    ] = None
    no_key: Annotated[
        bool | None, make_option(SERVING, "Require no key: accept every user and program of this machine")
    ] = None
    allow_host: Annotated[
        list[str] | None,
        make_option(SERVING, "Another host name under which clients reach the server; may be repeated"),
    ] = None
    tls_cert: Annotated[str | None, make_option(SERVING, "A certificate (PEM), for `https`")] = None
    tls_key: Annotated[str | None, make_option(SERVING, "Its key (PEM)")] = None
    queue: Annotated[
        int | None, make_option(SERVING, "Maximum number of open rollouts; more are rejected as `busy` (4096)")
    ] = None
    policy: Annotated[
        str | None,
        make_option(SERVING, "`path.py:name` of a function that answers model calls, for orders that request it"),
    ] = None
    grace: Annotated[
        float | None,
        make_option(SERVING, "Seconds that a client has to reconnect before its work is cancelled (3)"),
    ] = None
    return_grace: Annotated[
        float | None, make_option(SERVING, "The same, after a restart of the server (60)")
    ] = None
    least_workers: Annotated[int | None, make_option(SERVING, "Workers that stay while there is no work (1)")] = (
        None
    )


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class ServerFlags(ServingFlags, SharedFlags):
    """All flags of a server. A TOML file may set each of them under its own name."""


def serve(
    suite: str,
    /,
    *,
    flags: ServerFlags = ServerFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Serve rollouts of a suite to trainers, which order them over HTTP.

    For example: `holdwater serve demo --out runs/served`, or
    `holdwater serve tasks.jsonl --agent bash --listen 0.0.0.0:8400 --key-file keys --out runs/served`.

    A server that is started again with the same directory continues its work, also after a crash. The first
    Ctrl-C or SIGTERM drains the server, the second ends it at once. Without `--model`, each order names its
    own model.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        The server's directory (default: `runs/<time>-<suite>`).
    config
        A TOML file with flags; flags on the command line take precedence.
    json
        Print the run's summary as one JSON document on stdout, at the end.
    quiet
        Show no live display and no closing page.
    """
    CommandConsole.claim()
    from ..api.serving import prepare_server, start_server
    from .foreground_run import run_in_foreground

    said = merge_flags(flags, config)
    agent = choose_agent(said.pop("agent"), said.pop("command"))
    serving: Any = {field.name: said.pop(field.name) for field in dataclasses.fields(ServingFlags)}
    prepared = prepare_server(suite, agent, out, said, serving)  # type: ignore[arg-type]
    return run_in_foreground(lambda around: start_server(prepared, around), json=json, quiet=quiet)
