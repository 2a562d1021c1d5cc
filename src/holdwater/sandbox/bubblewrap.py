"""Decides what a command sees of the machine, and builds the command line of bubblewrap for it.

The root of a sandbox is a list of paths (`make_root`), or the whole host; secrets in it are hidden. This
module starts nothing: `command.py` does. `probe.py` finds out whether bubblewrap works here.
"""

from __future__ import annotations

import functools
import marshal
import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from msgspec import field

from ..core.config import SandboxRoot
from ..core.records import MiB, Record
from .confined_paths import FULL
from .kernel_protection import protect_kernel_files

PORT = 4141
INSIDE = "/run/holdwater"
WORK = f"{INSIDE}/work"  # same in every sandbox: agents quote it, and a retry must send the same request
HOME = f"{INSIDE}/home"
PRIVATE = f"{INSIDE}/private"
REPLACED = ("/tmp", "/var/tmp", "/run", "/proc", "/dev")  # nothing of the host is left in these to hide
NAMESPACES = ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds before each retry after a mount blocked bubblewrap
FORWARDER = Path(__file__).with_name("forwarder.py")

# Programs and the files that they read: no homes, projects, state or sockets of the machine.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/gnu/store"),  # where some systems keep all programs
    "/sys/devices/system",  # the number of processors
)
ETC = "/etc"
LARGEST = 16 * MiB  # bytes of a file in `/etc`
HOST = "/"
SECRETS = (".ssh", ".aws", ".config/gcloud", ".netrc", ".docker", ".kube", ".gnupg", ".git-credentials")
PACKAGE = Path(__file__).parents[1]  # holdwater itself, with the solutions of the demo


class RootMounts(Record, frozen=True):
    """The paths and links that the root shows, read-only."""

    binds: dict[str, str] = field(default_factory=lambda: {HOST: HOST})  # path inside -> path on this machine
    links: dict[str, str] = field(default_factory=dict)  # path inside -> target

    @property
    def shows_host(self) -> bool:
        return HOST in self.binds

    def locate(self, path: str) -> Path | None:
        """Return the path on this machine that the root shows at `path`, whether it exists or not."""
        for inside, host in self.binds.items():
            if is_below(path, [inside]):
                return Path(host + path[len(inside) :]) if inside != HOST else Path(path)
        return None


def make_root(kind: SandboxRoot, settings: str = ETC) -> RootMounts:
    """Return the root of this kind. `settings`: shown as `/etc`, a copy of it without its secrets."""
    if kind is SandboxRoot.HOST:
        return RootMounts()
    binds, links = {ETC: settings}, {"/var/run": "../run"}
    for path in (*SYSTEM, *_find_interpreter()):
        if Path(path).is_symlink():
            links[path] = os.readlink(path)  # noqa: PTH115 - as it stands
        elif Path(path).exists() and not is_below(path, binds):
            binds[path] = path
    return RootMounts(binds=binds, links=links)


def copy_settings(into: Path) -> None:
    """Copy the files of `/etc` that every user may read, so that they stay the same during a run. Blocks.

    Hiding the secrets by mounts would cost each command more, and a file that is replaced loses its mount.
    """
    into.mkdir()
    left = [(ETC, str(into))]  # bound: the directories of `/etc`
    while left:
        source, target = left.pop()
        with os.scandir(source) as entries:
            for entry in entries:
                try:
                    if _copy_setting(entry, place := f"{target}/{entry.name}"):
                        left.append((entry.path, place))
                except OSError as e:
                    if e.errno in FULL:
                        raise
                    continue  # removed meanwhile, or not readable for this user either


def _copy_setting(entry: os.DirEntry[str], target: str) -> bool:
    """Copy one entry, directories as empty ones; return whether it is a directory."""
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)  # noqa: PTH115, PTH211 - as it stands
        return False
    found = entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IXOTH:
        os.mkdir(target)  # noqa: PTH102 - as in the next function
        return True
    if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH and found.st_size <= LARGEST:
        _copy_file(entry.path, target, found.st_mode & 0o755)
    return False


def _copy_file(source: str, target: str, mode: int) -> None:
    """Copy a file with few system calls: `shutil` takes twice as long, and each worker waits for the copy."""
    content = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while os.sendfile(copy, content, None, LARGEST):
                pass
            os.fchmod(copy, mode)
        finally:
            os.close(copy)
    finally:
        os.close(content)


def find_home() -> str:
    """Return this user's home directory from the user database; empty if there is none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def find_secrets(kind: SandboxRoot) -> Iterator[Path]:
    """Yield the paths that must be hidden in every sandbox."""
    if home := find_home():
        yield from (Path(home, name) for name in SECRETS)
    if kind is SandboxRoot.SYSTEM:
        yield PACKAGE


def is_below(path: str, places: Iterable[str]) -> bool:
    for place in places:  # a plain loop: called hundreds of times per command
        if path == place or path.startswith(place if place.endswith("/") else place + "/"):
            return True
    return False


def _find_interpreter() -> Iterator[str]:
    """Yield the paths of the Python that runs the forwarder, without a virtual environment's packages."""
    yield os.path.realpath(Path(sys.executable).resolve().parent)
    yield os.path.realpath(Path(sys.base_prefix, "lib"))


class CommandView(Record, frozen=True, dict=True):
    """The files and networks that a command can see and reach."""

    work: str
    home: str
    private: str  # read-only
    tmp: str
    root: RootMounts = RootMounts()
    show: dict[str, str] = field(
        default_factory=dict
    )  # read-only, in addition to the root: path inside -> path on this machine
    links: dict[str, str] = field(default_factory=dict)  # path inside -> target
    shares_network: bool = False
    gateway: str | None = None
    own: dict[str, str] = field(default_factory=dict)  # more directories: path inside -> path on this machine
    workdir: str = WORK  # directory in which the command starts

    @cached_property
    def shown(self) -> dict[str, str]:
        """The mounts that `show` adds.

        Paths that the root shows anyway, and paths that the sandbox provides itself, are not among them.
        """
        return {
            inside: path
            for inside, path in self.show.items()
            if not (inside == path and self.is_in_root(inside)) and not is_ours(inside)
        }

    @cached_property
    def linked(self) -> dict[str, str]:
        """The links that have to be created."""
        there = {*self.shown, *self.root.links}
        return {
            path: target
            for path, target in self.links.items()
            if not self.is_in_root(path) and not is_below(path, there) and not is_ours(path)
        }

    @cached_property
    def mounts(self) -> dict[str, str]:
        """Path inside -> directory of this machine, for all mounts."""
        temporary = {"/tmp": self.tmp, "/var/tmp": self.tmp}
        ours = {WORK: self.work, HOME: self.home, PRIVATE: self.private, **self.own}
        return {**self.root.binds, **temporary, **ours, **self.shown}

    def is_in_root(self, path: str) -> bool:
        """Whether the root shows this machine's file at this path."""
        return is_below(path, self.root.binds) and not is_replaced(path)


def build_arguments(view: CommandView, hide: tuple[str, ...], forwarder: int = -1) -> list[str]:
    """Return bubblewrap's arguments for a sandbox that shows `view` and hides the paths in `hide`.

    `forwarder`: a descriptor with `compile_forwarder`, if the command starts it.
    """
    shown = {inside: path for inside, path in view.shown.items() if not is_below(path, hide)}
    masks = find_masks(view.root, shown, hide)
    made = _find_incomplete([*view.own, *shown], view)
    covers = _find_covers([*view.own, *shown, *view.linked], view)
    arguments = build_base(view.shares_network, view.root, made)
    arguments += ["--bind", view.tmp, "/tmp", "--bind", view.tmp, "/var/tmp"]
    steps = [(path, ["--tmpfs", path]) for path in covers]
    steps += [(inside, ["--ro-bind", path, inside]) for inside, path in shown.items()]
    steps += [(path, ["--symlink", target, path]) for path, target in view.linked.items()]
    steps += [
        (path, ["--tmpfs", path] if whole else ["--ro-bind", "/dev/null", path])
        for path, whole in masks.items()
    ]
    steps += [(inside, ["--bind", path, inside]) for inside, path in view.own.items()]
    for _, words in sorted(steps, key=lambda step: step[0]):  # outer paths first
        arguments += words
    arguments += ["--bind", view.work, WORK, "--bind", view.home, HOME, "--ro-bind", view.private, PRIVATE]
    if view.gateway and forwarder >= 0:
        arguments += ["--file", str(forwarder), f"{INSIDE}/forwarder.pyc"]  # cheaper than a mount
        # Read-only: all sandboxes share the socket's mode.
        arguments += ["--ro-bind", view.gateway, f"{INSIDE}/gateway.sock"]
    closed = [*(path for path in masks if masks[path]), *covers, "/run", *reversed(made)]
    for path in closed if view.root.shows_host else [*closed, "/"]:
        arguments += ["--remount-ro", path]
    return [*arguments, "--chdir", view.workdir]


def build_base(shares_network: bool, root: RootMounts = RootMounts(), made: Sequence[str] = ()) -> list[str]:  # noqa: B008 - frozen
    """Return arguments for a read-only root.

    It shows no processes, devices or run-time sockets of the host and gives no capabilities. `made`:
    directories of the root that are rebuilt so that mount points can be created in them, outer ones first.
    """
    arguments = ["--die-with-parent", "--new-session", *NAMESPACES, "--cap-drop", "ALL"]
    for inside, path in root.binds.items():
        if inside not in made:
            arguments += ["--ro-bind", path, inside]
    for path, target in root.links.items():
        arguments += ["--symlink", target, path]
    for path in made:
        arguments += _rebuild_directory(path, root)
    arguments += ["--proc", "/proc", *protect_kernel_files()]
    arguments += ["--dev", "/dev", "--tmpfs", "/run"]
    if not shares_network:
        return [*arguments, "--unshare-net"]
    resolver = "/run/systemd/resolve"  # `/etc/resolv.conf` often links here
    arguments += ["--ro-bind-try", resolver, resolver]
    names = "/etc/resolv.conf"  # the current file, where `/etc` is a copy
    if not root.shows_host and not Path(names).is_symlink():
        arguments += ["--ro-bind-try", names, names]
    return arguments


def find_masks(root: RootMounts, shown: Mapping[str, str], hide: Iterable[str]) -> dict[str, bool]:
    """Return where inside a hidden path of this machine would be visible, and whether it is a directory."""
    binds = [(path, inside) for inside, path in (*root.binds.items(), *shown.items())]
    masks = {}
    for hidden in hide:
        for path, inside in binds:
            place = inside.rstrip("/") + hidden[len(path.rstrip("/")) :]
            replaced = inside in root.binds and is_replaced(place)
            if is_below(hidden, [path]) and not replaced:
                masks[place] = Path(hidden).is_dir()
    return masks


def _find_incomplete(paths: Iterable[str], view: CommandView) -> list[str]:
    """Return the root's directories that lack a directory on the way to one of `paths`, outer ones first."""
    found = set()
    for path in paths:
        above = Path(path)
        while (place := view.root.locate(str(above))) is not None and not place.exists():
            above = above.parent
        if str(above) != path and view.is_in_root(str(above)):
            found.add(str(above))
    return sorted(found)


def _find_covers(paths: Iterable[str], view: CommandView) -> list[str]:
    """Return directories to mount over the parents of `paths` that a command could write.

    Without the cover, a command could put a link there, and bubblewrap would create the directories of the
    next command at the link's target.
    """
    places = sorted({"/tmp", "/var/tmp", *view.own}, key=len, reverse=True)
    found = set()
    for path in paths:
        place = next((place for place in places if path != place and is_below(path, [place])), None)
        steps = path[len(place) + 1 :].split("/") if place else []
        if len(steps) > 1:
            found.add(f"{place}/{steps[0]}")
    return sorted(found)


def _rebuild_directory(place: str, root: RootMounts) -> list[str]:
    """Return arguments that replace a directory of the root by an empty one with the same entries mounted."""
    arguments = ["--tmpfs", place]
    for path in sorted((root.locate(place) or Path(place)).iterdir()):
        inside = f"{place.rstrip('/')}/{path.name}"
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), inside]
        elif inside not in REPLACED:
            arguments += ["--ro-bind", str(path), inside]
    return arguments


def is_mount_trouble(stderr: str) -> bool:
    """Whether a mount stopped bubblewrap: a mount of the host, such as docker's, may have come or gone."""
    line, _, _ = stderr.partition("\n")
    return line.startswith("bwrap: ") and ("mount" in line or "source path" in line)


@functools.cache
def build_forwarder_argv() -> tuple[str, ...]:
    python = os.path.realpath(sys.executable)  # not the virtual environment's link: that may be hidden
    return (python, "-I", "-S", f"{INSIDE}/forwarder.pyc", f"{INSIDE}/gateway.sock", str(PORT), "--")


@functools.cache
def compile_forwarder() -> bytes:
    """Return the forwarder as a compiled module: compiling it takes longer than a sandbox's mounts."""
    code = compile(FORWARDER.read_bytes(), FORWARDER.name, "exec", dont_inherit=True, optimize=2)
    header = bytes(12)  # flags, and time and size of the source: not read for a module that runs as a script
    return MAGIC_NUMBER + header + marshal.dumps(code)


def find_outermost(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return the paths that exist, without paths inside other ones."""
    found = sorted({os.path.realpath(path) for path in paths if path.exists()})
    return tuple(path for path in found if not any(path.startswith(f"{outer}/") for outer in found))


def is_ours(path: str) -> bool:
    """Whether the sandbox provides this path inside itself, so that no mount can replace it."""
    return path in REPLACED or is_reserved(path)


def is_reserved(path: str) -> bool:
    """Whether this path inside is reserved for the sandbox itself, such as its root and `/proc`."""
    path = os.path.normpath("/" + path.lstrip("/"))
    return path == "/" or is_below(path, [INSIDE, "/proc", "/dev"])


def is_replaced(path: str) -> bool:
    """Whether the host's file at this path is invisible inside, unless `show` adds it."""
    return is_below(path, REPLACED)
