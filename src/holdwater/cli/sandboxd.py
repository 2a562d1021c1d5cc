"""`holdwater sandboxd`: gives sandboxes of this machine to runs on other machines."""

# No `from __future__ import annotations`: the annotations are read in `run_flags.py`.
import dataclasses
from pathlib import Path
from typing import Annotated

from ..core.config import RunConfig
from ..core.options import OptionGroup, list_options
from .console import CommandConsole
from .flags import Flag
from .run_flags import add_flags, make_option, merge_flags

SERVER = OptionGroup.SERVER
OPTIONS = (  # of a run, which a sandbox server has too
    *("memory", "disk", "concurrency", "ungoverned"),
    *("sandbox", "mount", "sandbox_root", "sandbox_read_only", "network", "scratch", "grace"),
)


@add_flags(list_options(RunConfig)[name] for name in OPTIONS)
@dataclasses.dataclass(frozen=True)
class SandboxServerFlags:
    """The flags of a sandbox server. A TOML file may set each of them under its own name."""

    token_file: Annotated[
        str | None, make_option(SERVER, "The file with the token that clients must send; mode 0600")
    ] = None
    listen: Annotated[str | None, make_option(SERVER, "`HOST:PORT` (127.0.0.1:8500)")] = None
    allow_host: Annotated[
        list[str] | None,
        make_option(SERVER, "Another host name under which clients reach the server; may be repeated"),
    ] = None
    tls_cert: Annotated[str | None, make_option(SERVER, "A certificate (PEM), for `https`")] = None
    tls_key: Annotated[str | None, make_option(SERVER, "Its key (PEM)")] = None
    client_grace: Annotated[
        float | None,
        make_option(SERVER, "Seconds that a client has to reconnect before its sandboxes end (30)"),
    ] = None
    builds: Annotated[
        bool | None,
        make_option(SERVER, "Build Dockerfiles of clients: their commands are on the daemon's network"),
    ] = None


ACCESS = ("token_file", "listen", "allow_host", "tls_cert", "tls_key")


def sandboxd(
    *,
    flags: SandboxServerFlags = SandboxServerFlags(),  # noqa: B008 - frozen
    out: Path | None = None,
    config: Path | None = None,
    json: Flag = False,
) -> int:
    """Serve sandboxes of this machine to runs with `--sandbox remote` on other machines.

    For example: `holdwater sandboxd --token-file token`, or
    `holdwater sandboxd --listen 0.0.0.0:8500 --token-file token --tls-cert cert.pem --tls-key key.pem`.

    The first Ctrl-C or SIGTERM drains the server, the second ends it at once. After a crash, the next server
    with the same directory removes its leftovers.

    Parameters
    ----------
    out
        The server's directory (default: `sandboxd` in the cache directory).
    config
        A TOML file with flags; flags on the command line take precedence.
    json
        Print the address as one line of JSON on stdout, once clients can connect.
    """
    from ..api.process import CommandSignals, complete
    from ..api.sandboxes import SandboxServerAddress, prepare_sandbox_server, serve_sandboxes
    from ..core.errors import BadInput

    console = CommandConsole.claim()
    said = merge_flags(flags, config)
    access = {name: said.pop(name) for name in ACCESS}
    access["listen"] = access["listen"] or "127.0.0.1:8500"
    if access["token_file"] is None:
        raise BadInput("a sandbox server needs a token", "give `--token-file FILE`")
    grace = said.pop("client_grace")
    builds = bool(said.pop("builds"))
    setup = prepare_sandbox_server(said, access, out, 30.0 if grace is None else grace, builds=builds)

    def announce(address: SandboxServerAddress) -> None:
        if json:
            console.write_line(address)
        kind = f"`{address.sandbox}` sandboxes, in `{address.directory}`"
        console.say(f"sandboxes: {address.address} gives {kind}")

    signals = CommandSignals.current or CommandSignals()
    complete(serve_sandboxes(setup, signals, console.say, announce))
    return 0
