"""`holdwater serve`: serves a suite and an agent to clients, which order rollouts over HTTP."""

# No `from __future__ import annotations`: the annotations are read in `run_flags.py`.
import dataclasses
from pathlib import Path
from typing import Annotated

from ..core.config import RunConfig, ServingConfig
from ..core.options import OptionGroup, list_options
from .console import CommandConsole
from .run_flags import AgentFlags, DisplayFlags, add_flags, make_option, merge_flags
from .runs import choose_agent

SERVER = OptionGroup.SERVER


@add_flags(list_options(ServingConfig).values())
@dataclasses.dataclass(frozen=True)
class ServingFlags:
    """Flags that the server's configuration keeps."""


@dataclasses.dataclass(frozen=True)
class AccessFlags:
    """Flags that say who may use the server. The run's directory does not keep them."""

    key_file: Annotated[
        str | None,
        make_option(SERVER, "A file with the keys that clients may use; else `HOLDWATER_SERVE_KEYS`"),
    ] = None
    no_key: Annotated[
        bool | None, make_option(SERVER, "Require no key: accept every user and program of this machine")
    ] = None
    allow_host: Annotated[
        list[str] | None,
        make_option(SERVER, "Another host name under which clients reach the server; may be repeated"),
    ] = None
    unprotected: Annotated[
        bool | None,
        make_option(SERVER, "Let `--protocol` listen where others reach it, although it has no keys"),
    ] = None
    protocol_key: Annotated[
        list[str] | None,
        make_option(SERVER, "A variable with a key that clients of `--protocol` may name; may be repeated"),
    ] = None
    tls_cert: Annotated[str | None, make_option(SERVER, "A certificate (PEM), for `https`")] = None
    tls_key: Annotated[str | None, make_option(SERVER, "Its key (PEM)")] = None


SERVING = {field.name for kind in (ServingFlags, AccessFlags) for field in dataclasses.fields(kind)}


@add_flags(entry for entry in list_options(RunConfig).values() if entry.option.serve)
@dataclasses.dataclass(frozen=True)
class ServerFlags(AgentFlags, AccessFlags, ServingFlags):
    """All flags of a server. A TOML file may set each of them under its own name."""


def serve(
    suite: str,
    /,
    *,
    flags: ServerFlags = ServerFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    display: DisplayFlags = DisplayFlags(),  # noqa: B008 - frozen
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
    """
    CommandConsole.claim()
    from ..api.serving import prepare_server
    from .foreground_run import run_in_foreground

    said = merge_flags(flags, config)
    agent = choose_agent(said.pop("agent"), said.pop("command"))
    serving = {name: said.pop(name) for name in SERVING}
    prepared = prepare_server(suite, agent, out, said, serving)  # type: ignore[arg-type]
    return run_in_foreground(prepared, json=display.json, quiet=display.quiet, view=display.view)
