"""Makes a tree of programs and extensions run from its prefix alone: its own loader, C library and all.

Nothing of the base is used then, and nothing of this machine is asked for. Needs `patchelf`.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

from .elf import Elf, read_elf
from .interpreter import Interpreter
from .program import Programs
from .thread import Check, in_thread

LISTING = 60.0  # seconds
PATCHING = 600.0  # seconds
BATCH = 200  # files for one call
FOUND = re.compile(r"^\s*(\S+) => (/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)
LIBC = "libc.so.6"
# What the C library opens by itself, so that no file says that it needs it: for names of hosts and users, and
# for the end of a thread.
OPENED = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2", "libgcc_s.so.1")


async def link(programs: Programs, patchelf: str, interpreter: Interpreter, tree: Path, prefix: str) -> None:
    """Bring every library that `tree` needs into its `lib`, and point all of its files there."""
    (tree / "lib").mkdir(exist_ok=True)
    await _Gathering(programs, interpreter, tree).run()
    elves = await in_thread(lambda check: _elves(tree, interpreter, check))
    groups: dict[tuple[str, ...], list[Path]] = defaultdict(list)  # bound: the tree's files
    for path, elf in elves.items():
        options = _options(path, elf, tree, f"{prefix}/lib", interpreter.loader.name)
        if options:
            groups[options].append(path)
    for options, files in sorted(groups.items()):
        for start in range(0, len(files), BATCH):
            await programs.run([patchelf, *options, *files[start : start + BATCH]], PATCHING)


class _Gathering:
    """Copies into a tree's `lib` what the files in the tree need and this machine has."""

    def __init__(self, programs: Programs, interpreter: Interpreter, tree: Path) -> None:
        self._programs = programs
        self._interpreter = interpreter
        self._tree = tree
        self._present: set[str] = set()  # bound: the libraries of the tree

    async def run(self) -> None:
        loader = self._interpreter.loader
        await self._copy(loader.name, loader)
        libc = (await self._take(self._interpreter.executable)).get(LIBC)
        for name in OPENED:
            if libc is not None and name not in self._present and libc.with_name(name).exists():
                await self._copy(name, libc.with_name(name))
        elves = await in_thread(lambda check: _elves(self._tree, self._interpreter, check))
        for path, elf in elves.items():
            if not self._present.issuperset(elf.needed):
                await self._take(self._origin(path))

    async def _take(self, file: Path) -> dict[str, Path]:
        """Copy what the loader finds for `file` here. What it does not find was not there before either."""
        listed = await self._programs.run([self._interpreter.loader, "--list", file], LISTING, (0, 1, 127))
        found = {name: Path(place) for name, place in FOUND.findall(listed) if "/" not in name}
        for name, place in found.items():
            # By its name alone: a process has one library of a name.
            if name not in self._present and not place.is_relative_to(self._tree):
                await self._copy(name, place)
        return found

    async def _copy(self, name: str, place: Path) -> None:
        copy = self._tree / "lib" / name
        await in_thread(lambda check: shutil.copyfile(place, copy))
        copy.chmod(0o755)
        self._present.add(name)

    def _origin(self, path: Path) -> Path:
        """An extension of the standard library as it lies on this machine: it may look from there."""
        library = self._tree / self._interpreter.folder
        if not path.is_relative_to(library / "lib-dynload"):
            return path
        return self._interpreter.stdlib / path.relative_to(library)


def _elves(tree: Path, interpreter: Interpreter, check: Check) -> dict[Path, Elf]:
    """The files that the interpreter's loader can load."""
    own = read_elf(interpreter.executable)
    found: dict[Path, Elf] = {}  # bound: the tree's files
    for path in sorted(tree.rglob("*")):
        check()
        if path.is_symlink() or not path.is_file():
            continue
        elf = read_elf(path)
        if elf is not None and elf.dynamic and own is not None and elf.machine == own.machine:
            found[path] = elf
    return found


def _options(path: Path, elf: Elf, tree: Path, lib: str, loader: str) -> tuple[str, ...]:
    """What `patchelf` is asked to do to a file."""
    if path in (tree / "lib" / loader, tree / "lib" / LIBC):
        return ()  # they look for nothing, and do not survive a change
    options: list[str] = []
    if Path(elf.loader).name == loader:
        options += ["--set-interpreter", f"{lib}/{loader}"]
    if elf.needed or elf.rpath:
        # The old kind of path, which also holds for what the C library and extensions open by themselves.
        private = elf.rpath if "site-packages" in path.parts else ()
        own = [part for part in private if part.startswith(("$ORIGIN", "${ORIGIN}"))]
        options += ["--force-rpath", "--set-rpath", ":".join([*own, lib])]
    return tuple(options)
