"""`holdwater serve`: a suite and an agent, and clients that order rollouts over HTTP."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from .console import Console
from .flags import Flag
from .run import Common, _agent, _in
from .settings import merged

SERVING = Group("How clients are served", sort_key=0)


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Serving:
    """What only a server can be told."""

    listen: Annotated[
        str | None, _in(SERVING, "`HOST:PORT` or `unix:PATH` (127.0.0.1:8400); other machines need a key")
    ] = None
    key_file: Annotated[
        str | None, _in(SERVING, "A file with the keys that clients may use; else `HOLDWATER_SERVE_KEYS`")
    ] = None
    no_key: Annotated[
        bool | None, _in(SERVING, "Want no key: obey every user and every program of this machine")
    ] = None
    allow_host: Annotated[
        list[str] | None,
        _in(SERVING, "A further name that clients know the server by; may be repeated"),
    ] = None
    tls_cert: Annotated[str | None, _in(SERVING, "A certificate (PEM), for `https`")] = None
    tls_key: Annotated[str | None, _in(SERVING, "Its key (PEM)")] = None
    queue: Annotated[
        int | None, _in(SERVING, "Rollouts that may be open at once; more are refused as `busy` (4096)")
    ] = None
    policy: Annotated[
        str | None, _in(SERVING, "`path.py:name` of a function that answers model calls, for orders that ask")
    ] = None
    grace: Annotated[
        float | None, _in(SERVING, "Seconds that a client has to come back before its work is cancelled (3)")
    ] = None
    return_grace: Annotated[
        float | None, _in(SERVING, "The same after the server itself was gone and is back (60)")
    ] = None
    least_workers: Annotated[
        int | None, _in(SERVING, "Workers that are kept while there is nothing to do (1)")
    ] = None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Flags(Serving, Common):
    """Every flag can stand in a TOML file too, under its own name."""


def serve(
    suite: str,
    /,
    *,
    flags: Flags = Flags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Serve rollouts of a suite to trainers: what runs is what clients order.

    For example: `holdwater serve demo --out runs/served`, or
    `holdwater serve tasks.jsonl --agent bash --listen 0.0.0.0:8400 --key-file keys --out runs/served`.

    Started again with the same directory it goes on, whatever ended it. The first Ctrl-C or SIGTERM drains
    it, the second ends it at once. The model may be left out: then orders bring theirs.

    Parameters
    ----------
    suite
        `demo`, `file.jsonl`, `path.py:name`, `module:name` or a plug-in.
    out
        The server's directory; `runs/<time>-<suite>` otherwise.
    config
        A TOML file with flags; those given here come first.
    json
        Print the run's summary as one JSON document on stdout, at the end.
    quiet
        No display and no closing page.
    """
    Console.claim()
    from ..api.serving import prepare_server, start_server
    from .conduct import conducted

    said = merged(flags, config)
    agent = _agent(said.pop("agent"), said.pop("command"))
    serving: Any = {field.name: said.pop(field.name) for field in dataclasses.fields(Serving)}
    prepared = prepare_server(suite, agent, out, said, serving)  # type: ignore[arg-type]
    return conducted(lambda around: start_server(prepared, around), json=json, quiet=quiet)
