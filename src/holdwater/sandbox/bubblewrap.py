"""The command line of bubblewrap: what a command sees of the machine.

It builds arguments and starts nothing: `command.py` does. Whether bubblewrap works here is `probe.py`'s.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from ..core.records import Record

PORT = 4141
INSIDE = "/run/holdwater"
WORK = f"{INSIDE}/work"  # the same in every sandbox: agents quote it, and a retry must ask what was asked
HOME = f"{INSIDE}/home"
PRIVATE = f"{INSIDE}/private"
SECRETS = (".ssh", ".aws", ".config/gcloud", ".netrc", ".docker", ".kube", ".gnupg", ".git-credentials")
REPLACED = ("/tmp", "/var/tmp", "/run", "/proc", "/dev")  # have nothing of the host's left to hide
NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before it is tried again, after a mount was in its way
FORWARDER = Path(__file__).with_name("forwarder.py")


class View(Record, frozen=True):
    """What a command can see and reach."""

    work: str
    home: str
    private: str  # read-only
    tmp: str
    show: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # read-only, also where the host is replaced: path inside -> of this machine
    shares_network: bool = False
    gateway: str | None = None
    own: dict[str, str] = msgspec.field(
        default_factory=dict
    )  # further directories: path inside -> of this machine
    workdir: str = WORK  # where the command is started

    @property
    def shown(self) -> dict[str, str]:
        """What `show` adds: the rest of the host can be read anyway, and what is ours stays as it is."""
        return {
            inside: path
            for inside, path in self.show.items()
            if (inside != path or is_replaced(inside)) and not is_ours(inside)
        }

    @property
    def mounts(self) -> dict[str, str]:
        """Where inside the directories of this machine are."""
        temporary = {"/tmp": self.tmp, "/var/tmp": self.tmp}
        ours = {WORK: self.work, HOME: self.home, PRIVATE: self.private, **self.own}
        return {**temporary, **ours, **self.shown}


def confine(bwrap: str, view: View, hide: tuple[str, ...], status: int, argv: Sequence[str]) -> list[str]:
    """`argv` in a sandbox of its own; what became of it is written to the descriptor `status`."""
    shown = {inside: path for inside, path in view.shown.items() if not is_below(inside, hide)}
    masks = [path for path in hide if not is_replaced(path) or is_below(path, shown)]
    made = _places_to_make_in([*view.own, *shown])
    arguments = [bwrap, *base(view.shares_network, made), "--json-status-fd", str(status)]
    arguments += ["--bind", view.tmp, "/tmp", "--bind", view.tmp, "/var/tmp"]
    for inside, path in sorted(shown.items()):
        arguments += ["--ro-bind", path, inside]
    for path in masks:
        arguments += _mask(path)
    arguments += ["--bind", view.work, WORK, "--bind", view.home, HOME, "--ro-bind", view.private, PRIVATE]
    for inside, path in view.own.items():
        arguments += ["--bind", path, inside]
    if view.gateway:
        arguments += ["--ro-bind", str(FORWARDER), f"{INSIDE}/forwarder.py"]
        arguments += ["--bind", view.gateway, f"{INSIDE}/gateway.sock"]
        argv = [*forwarder(), *argv]
    for path in [*(path for path in masks if Path(path).is_dir()), "/run", *reversed(made)]:
        arguments += ["--remount-ro", path]
    return [*arguments, "--chdir", view.workdir, "--", *argv]


def base(shares_network: bool, made: Sequence[str] = ()) -> list[str]:
    """A read-only host without its processes, devices, run-time sockets and capabilities.

    `made`: directories of it in which others can be made, outer ones first.
    """
    arguments = ["--die-with-parent", "--new-session", *NAMESPACES, "--cap-drop", "ALL"]
    if "/" not in made:
        arguments += ["--ro-bind", "/", "/"]
    for path in made:
        arguments += _in_pieces(path)
    arguments += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/run",
    ]
    if not shares_network:
        return [*arguments, "--unshare-net"]
    resolver = "/run/systemd/resolve"  # where `/etc/resolv.conf` often leads
    return [*arguments, "--ro-bind-try", resolver, resolver]


def _places_to_make_in(paths: Iterable[str]) -> list[str]:
    """The directories of the host that lack a directory on the way to one of `paths`, outer ones first."""
    found = set()
    for path in paths:
        above = Path(path)
        while not above.exists():
            above = above.parent
        if str(above) != path and not is_replaced(str(above)):
            found.add(str(above))
    return sorted(found)


def _in_pieces(place: str) -> list[str]:
    """An empty directory in the place of one of the host's, with what that has in it."""
    arguments = ["--tmpfs", place]
    for path in sorted(Path(place).iterdir()):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif str(path) not in REPLACED:
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments


def is_mount_trouble(stderr: str) -> bool:
    """Whether a mount was in its way: one of the host's, say docker's, may have come or gone meanwhile."""
    line, _, _ = stderr.partition("\n")
    return line.startswith("bwrap: ") and ("mount" in line or "source path" in line)


def forwarder() -> list[str]:
    python = os.path.realpath(sys.executable)  # not the virtual environment's link: it may be hidden
    return [python, "-I", "-S", f"{INSIDE}/forwarder.py", f"{INSIDE}/gateway.sock", str(PORT), "--"]


def hidden(paths: Iterable[Path]) -> tuple[str, ...]:
    """These paths and the places where people keep secrets, as far as they exist."""
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        secrets = []
    else:
        secrets = [home / name for name in SECRETS]
    found = sorted({os.path.realpath(path) for path in [*paths, *secrets] if path.exists()})
    return tuple(path for path in found if not any(path.startswith(f"{outer}/") for outer in found))


def _mask(path: str) -> list[str]:
    return ["--tmpfs", path] if Path(path).is_dir() else ["--ro-bind", "/dev/null", path]


def is_ours(path: str) -> bool:
    """Whether this path inside is what a sandbox has of its own, and nothing can take its place."""
    return path in ("/", *REPLACED) or is_below(path, [INSIDE, "/proc", "/dev"])


def is_replaced(path: str) -> bool:
    """Whether the host's file of this path is not seen inside, unless it is shown."""
    return is_below(path, REPLACED)


def is_below(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)
