"""The command line of bubblewrap: what a command sees of the machine.

It builds arguments and starts nothing: `command.py` does. Whether bubblewrap works here is `probe.py`'s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from msgspec import field

from ..core.records import Record
from .kernel_files import protect_kernel_files
from .root import Root, is_below

PORT = 4141
INSIDE = "/run/holdwater"
WORK = f"{INSIDE}/work"  # the same in every sandbox: agents quote it, and a retry must ask what was asked
HOME = f"{INSIDE}/home"
PRIVATE = f"{INSIDE}/private"
REPLACED = ("/tmp", "/var/tmp", "/run", "/proc", "/dev")  # have nothing of the host's left to hide
NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before it is tried again, after a mount was in its way
FORWARDER = Path(__file__).with_name("forwarder.py")


class View(Record, frozen=True, dict=True):
    """What a command can see and reach."""

    work: str
    home: str
    private: str  # read-only
    tmp: str
    root: Root = Root()
    show: dict[str, str] = field(
        default_factory=dict
    )  # read-only, beside what the root shows: path inside -> of this machine
    links: dict[str, str] = field(default_factory=dict)  # path inside -> where it leads
    shares_network: bool = False
    gateway: str | None = None
    own: dict[str, str] = field(default_factory=dict)  # further directories: path inside -> of this machine
    workdir: str = WORK  # where the command is started

    @cached_property
    def shown(self) -> dict[str, str]:
        """What `show` adds: the rest can be read anyway, and what is ours stays as it is."""
        return {
            inside: path
            for inside, path in self.show.items()
            if not (inside == path and self.is_in_root(inside)) and not is_ours(inside)
        }

    @cached_property
    def linked(self) -> dict[str, str]:
        """The links that have to be made."""
        there = {*self.shown, *self.root.links}
        return {
            path: target
            for path, target in self.links.items()
            if not self.is_in_root(path) and not is_below(path, there) and not is_ours(path)
        }

    @cached_property
    def mounts(self) -> dict[str, str]:
        """Where inside the directories of this machine are."""
        temporary = {"/tmp": self.tmp, "/var/tmp": self.tmp}
        ours = {WORK: self.work, HOME: self.home, PRIVATE: self.private, **self.own}
        return {**self.root.binds, **temporary, **ours, **self.shown}

    def is_in_root(self, path: str) -> bool:
        """Whether the root shows this machine's file of this path."""
        return is_below(path, self.root.binds) and not is_replaced(path)


def confine(view: View, hide: tuple[str, ...]) -> list[str]:
    """The arguments for a sandbox of its own."""
    shown = {inside: path for inside, path in view.shown.items() if not is_below(path, hide)}
    masks = find_masks(view.root, shown, hide)
    made = _places_to_make_in([*view.own, *shown], view)
    covers = _covers([*view.own, *shown, *view.linked], view)
    arguments = base(view.shares_network, view.root, made)
    arguments += ["--bind", view.tmp, "/tmp", "--bind", view.tmp, "/var/tmp"]
    steps = [(path, ["--tmpfs", path]) for path in covers]
    steps += [(inside, ["--ro-bind", path, inside]) for inside, path in shown.items()]
    steps += [(path, ["--symlink", target, path]) for path, target in view.linked.items()]
    steps += [(path, _mask(path, whole)) for path, whole in masks.items()]
    steps += [(inside, ["--bind", path, inside]) for inside, path in view.own.items()]
    for _, words in sorted(steps, key=lambda step: step[0]):  # outer ones first
        arguments += words
    arguments += ["--bind", view.work, WORK, "--bind", view.home, HOME, "--ro-bind", view.private, PRIVATE]
    if view.gateway:
        arguments += ["--ro-bind", str(FORWARDER), f"{INSIDE}/forwarder.py"]
        arguments += [
            "--ro-bind",
            view.gateway,
            f"{INSIDE}/gateway.sock",
        ]  # its mode is that of all sandboxes
    closed = [*(path for path in masks if masks[path]), *covers, "/run", *reversed(made)]
    for path in closed if view.root.shows_host else [*closed, "/"]:
        arguments += ["--remount-ro", path]
    return [*arguments, "--chdir", view.workdir]


def base(shares_network: bool, root: Root = Root(), made: Sequence[str] = ()) -> list[str]:  # noqa: B008 - frozen
    """A read-only root without the host's processes, devices, run-time sockets and capabilities.

    `made`: directories of it in which others can be made, outer ones first.
    """
    arguments = ["--die-with-parent", "--new-session", *NAMESPACES, "--cap-drop", "ALL"]
    for inside, path in root.binds.items():
        if inside not in made:
            arguments += ["--ro-bind", path, inside]
    for path, target in root.links.items():
        arguments += ["--symlink", target, path]
    for path in made:
        arguments += _in_pieces(path, root)
    arguments += ["--proc", "/proc", *protect_kernel_files()]
    arguments += ["--dev", "/dev", "--tmpfs", "/run"]
    if not shares_network:
        return [*arguments, "--unshare-net"]
    resolver = "/run/systemd/resolve"  # where `/etc/resolv.conf` often leads
    arguments += ["--ro-bind-try", resolver, resolver]
    names = "/etc/resolv.conf"  # as it is now, where `/etc` is a copy
    if not root.shows_host and not Path(names).is_symlink():
        arguments += ["--ro-bind-try", names, names]
    return arguments


def _mask(path: str, whole: bool) -> list[str]:
    return ["--tmpfs", path] if whole else ["--ro-bind", "/dev/null", path]


def find_masks(root: Root, shown: Mapping[str, str], hide: Iterable[str]) -> dict[str, bool]:
    """Where inside a hidden path of this machine would be seen, and whether it is a directory."""
    binds = [(path, inside) for inside, path in (*root.binds.items(), *shown.items())]
    masks = {}
    for hidden in hide:
        for path, inside in binds:
            place = inside.rstrip("/") + hidden[len(path.rstrip("/")) :]
            replaced = inside in root.binds and is_replaced(place)
            if is_below(hidden, [path]) and not replaced:
                masks[place] = Path(hidden).is_dir()
    return masks


def _places_to_make_in(paths: Iterable[str], view: View) -> list[str]:
    """The directories of the root that lack a directory on the way to one of `paths`, outer ones first."""
    found = set()
    for path in paths:
        above = Path(path)
        while (place := view.root.locate(str(above))) is not None and not place.exists():
            above = above.parent
        if str(above) != path and view.is_in_root(str(above)):
            found.add(str(above))
    return sorted(found)


def _covers(paths: Iterable[str], view: View) -> list[str]:
    """Directories that stand before `paths` in places that a command may write.

    A command could put a link there, and bubblewrap would make the next one's directories where it leads.
    """
    places = sorted({"/tmp", "/var/tmp", *view.own}, key=len, reverse=True)
    found = set()
    for path in paths:
        place = next((place for place in places if path != place and is_below(path, [place])), None)
        steps = path[len(place) + 1 :].split("/") if place else []
        if len(steps) > 1:
            found.add(f"{place}/{steps[0]}")
    return sorted(found)


def _in_pieces(place: str, root: Root) -> list[str]:
    """An empty directory in the place of one of the root's, with what that has in it."""
    arguments = ["--tmpfs", place]
    for path in sorted((root.locate(place) or Path(place)).iterdir()):
        inside = f"{place.rstrip('/')}/{path.name}"
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), inside]
        elif inside not in REPLACED:
            arguments += ["--ro-bind", str(path), inside]
    return arguments


def is_mount_trouble(stderr: str) -> bool:
    """Whether a mount was in its way: one of the host's, say docker's, may have come or gone meanwhile."""
    line, _, _ = stderr.partition("\n")
    return line.startswith("bwrap: ") and ("mount" in line or "source path" in line)


def forwarder() -> list[str]:
    python = os.path.realpath(sys.executable)  # not the virtual environment's link: it may be hidden
    return [python, "-I", "-S", f"{INSIDE}/forwarder.py", f"{INSIDE}/gateway.sock", str(PORT), "--"]


def hidden(paths: Iterable[Path]) -> tuple[str, ...]:
    """These paths as far as they exist, without those in others."""
    found = sorted({os.path.realpath(path) for path in paths if path.exists()})
    return tuple(path for path in found if not any(path.startswith(f"{outer}/") for outer in found))


def is_ours(path: str) -> bool:
    """Whether this path inside is what a sandbox has of its own, and nothing can take its place."""
    return path in REPLACED or is_kept(path)


def is_kept(path: str) -> bool:
    """Whether this path inside belongs to the sandbox itself, as its root and its processes do."""
    path = os.path.normpath("/" + path.lstrip("/"))
    return path == "/" or is_below(path, [INSIDE, "/proc", "/dev"])


def is_replaced(path: str) -> bool:
    """Whether the host's file of this path is not seen inside, unless it is shown."""
    return is_below(path, REPLACED)
