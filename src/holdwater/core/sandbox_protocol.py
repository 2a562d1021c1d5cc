"""The records that a run and a sandbox server exchange, and the options by which a run finds its server.

A call is one stream of `web/link_streams.py`: a `SandboxCall`, then the bytes of its content if it has any.
The server answers with pieces and one `CallDone` or `CallFailed`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .limits import Limits
from .options import ConfigOption, OptionGroup
from .records import FailureOrigin, Network, Record, SandboxSpec

MACHINE = OptionGroup.MACHINE
LINK_PATH = "/v1/link"
HEALTH_PATH = "/v1/health"
SESSION_HEADER = "Holdwater-Session"  # the name that a client gave its session
RECEIVED_HEADER = (
    "Holdwater-Received"  # messages received so far, when a session continues; absent: a new one
)
GATEWAY_HEADER = "Holdwater-Gateway"  # `1`: sandboxes of this session may reach the client's gateway
LONGEST_SESSION = 64  # characters
LONGEST_CALL = 64 * 1024 * 1024  # bytes of one record: a command line may be long
SINGLE = "single"  # the name of a file that is a whole tree
A_FILE, A_DIRECTORY = b"f", b"d"  # the first byte of a tree that is taken
CALL, TUNNEL, GREETING = b"call", b"tunnel", b"greeting"  # the purposes of streams


class RemoteAddress(Record, frozen=True):
    """The server of a run's remote sandboxes. The token itself is no part of the configuration."""

    url: Annotated[
        str | None,
        ConfigOption(
            MACHINE,
            "With `remote`: the server, `https://HOST:PORT`; see `holdwater help remote`",
            name="sandbox_url",
            resume="The URL of the sandbox server",
            live=False,
        ),
    ] = None
    token_file: Annotated[
        str | None,
        ConfigOption(
            MACHINE,
            "With `remote`: the file with the server's token; else `HOLDWATER_SANDBOX_TOKEN`",
            name="sandbox_token_file",
            resume="The file with the sandbox server's token",
            live=False,
        ),
    ] = None
    ca: Annotated[
        str | None,
        ConfigOption(
            MACHINE,
            "With `remote`: certificates (PEM) that the server's must be signed by",
            name="sandbox_ca",
            resume="Certificates (PEM) of the sandbox server",
            live=False,
        ),
    ] = None
    plain: Annotated[
        bool,
        ConfigOption(
            MACHINE, "With `remote`: allow `http` to another machine, unencrypted", name="sandbox_plain"
        ),
    ] = False


class ServerAccess(Record, frozen=True):
    """The access of one process to a sandbox server."""

    url: str
    token: str
    ca: str | None = None


class ServerGreeting(Record, frozen=True):
    """The first message of a session, from the server."""

    version: str
    grace: float  # seconds that a cut connection may take to come back
    # The base URLs of the client's gateway inside a sandbox, by its network; empty: it has none.
    gateways: dict[str, str] = msgspec.field(default_factory=dict)


class SandboxServerHealth(Record, frozen=True):
    """The state of a sandbox server."""

    version: str
    sandbox: str  # the kind
    network: Network  # the most open network that a sandbox may have
    draining: bool = False
    sessions: int = 0
    sandboxes: int = 0
    waiting: int = 0  # requests that wait for memory, disk or CPU
    memory: int = 0  # bytes leased
    memory_room: int = 0  # bytes that can still be leased
    disk_room: int = 0


class CallWork(msgspec.Struct, frozen=True, tag=True):
    """The base of the works that a call may ask for."""


class HoldPlace(CallWork, frozen=True):
    """Wait for memory, disk and images for a sandbox, and keep them until `ReleasePlace`."""

    id: str  # of the instance
    start: SandboxSpec
    limits: Limits
    grader: SandboxSpec | None = None
    group: int | None = None  # whose members get their leases together
    members: int = 1


class EndGroup(CallWork, frozen=True):
    """Give back the leases of a group that no place uses any more; those in use follow."""

    group: int


class FindContext(CallWork, frozen=True):
    """Return whether this session has a build context: the `build` of a spec is then its digest."""

    digest: str


class PutContext(CallWork, frozen=True):
    """Keep the build context in the pieces that follow (a tar), as long as the session goes on."""

    digest: str


class ReleasePlace(CallWork, frozen=True):
    """Give the place back, and end its sandbox."""


class OpenSandbox(CallWork, frozen=True):
    """Open the sandbox of a place; wait for a place if none is held."""

    start: SandboxSpec
    limits: Limits


class CloseSandbox(CallWork, frozen=True):
    """Close the sandbox."""


class RunCommand(CallWork, frozen=True):
    """Run a command; pieces of the answer are its log."""

    command: str | tuple[str, ...]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    timeout: float | None = None
    user: str | None = None
    workdir: str | None = None
    logged: bool = False


class ReadFile(CallWork, frozen=True):
    """Return a file: pieces."""

    path: str


class WriteFile(CallWork, frozen=True):
    """Write a file from the pieces that follow."""

    path: str


class PutTree(CallWork, frozen=True):
    """Copy the tree in the pieces that follow (a tar) to a path."""

    path: str
    single: bool = False  # it is one file, `SINGLE`


class TakeTree(CallWork, frozen=True):
    """Return a directory or a file: pieces of a tar."""

    path: str
    exclude: tuple[str, ...] = ()


class RenewSandbox(CallWork, frozen=True):
    """Reset the sandbox."""

    start: SandboxSpec | None = None


class SetNetwork(CallWork, frozen=True):
    """Set the network of subsequent commands."""

    network: Network


class EndProcesses(CallWork, frozen=True):
    """End all processes."""


class MarkState(CallWork, frozen=True):
    """Record the end of set-up."""


class ClearOutside(CallWork, frozen=True):
    """Restore everything but the working directory."""


class SalvageWork(CallWork, frozen=True):
    """Return the changes: pieces of an archive."""


class RestoreWork(CallWork, frozen=True):
    """Restore the archive in the pieces that follow."""


AnyWork = (
    HoldPlace
    | EndGroup
    | FindContext
    | PutContext
    | ReleasePlace
    | OpenSandbox
    | CloseSandbox
    | RunCommand
    | ReadFile
    | WriteFile
    | PutTree
    | TakeTree
    | RenewSandbox
    | SetNetwork
    | EndProcesses
    | MarkState
    | ClearOutside
    | SalvageWork
    | RestoreWork
)


class SandboxCall(msgspec.Struct, frozen=True):
    """A work for the sandbox of one attempt of one run."""

    run: str
    attempt: int
    work: AnyWork


class SandboxUsage(Record, frozen=True):
    """The use of a sandbox so far, and its leftovers."""

    peak_memory: int = 0
    peak_disk: int = 0
    outside: int = 0
    leftovers: tuple[str, ...] = ()


class ContentPiece(msgspec.Struct, frozen=True, tag=True):
    """A part of the content of a call or of an answer."""

    content: bytes


class CallDone(msgspec.Struct, frozen=True, tag=True):
    """The end of a call that succeeded."""

    result: Any = None
    usage: SandboxUsage = SandboxUsage()


class CallFailed(msgspec.Struct, frozen=True, tag=True):
    """The end of a call that failed."""

    message: str
    where: FailureOrigin = FailureOrigin.SANDBOX
    kind: str = "sandbox"
    hint: str = ""
    again: bool = True
    errno: int = 0  # of an error of the file system
    over: bool = False  # the sandbox is closed
    usage: SandboxUsage = SandboxUsage()


AnyAnswer = ContentPiece | CallDone | CallFailed
