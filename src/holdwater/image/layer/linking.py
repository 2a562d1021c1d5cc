"""Make a tree of programs and extensions run with the loader, C library and other libraries in its prefix.

The result uses no files of the base and refers to no files of this machine. Needs `patchelf`.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from pathlib import Path

from .elf import ElfFile, read_elf
from .interpreter import PythonInterpreter
from .program import ProgramRunner
from .thread import CancelCheck, run_in_thread

LISTING = 60.0  # seconds
PATCHING = 600.0  # seconds
BATCH = 200  # files for one call
LIBRARY_LINE = re.compile(r"^\s*(\S+) => (/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)
LIBC = "libc.so.6"
# Libraries that the C library opens at run time, so that no file lists them as needed: for names of hosts and
# users, and for the end of a thread.
OPENED_BY_LIBC = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2", "libgcc_s.so.1")


async def link_tree(
    programs: ProgramRunner, patchelf: str, interpreter: PythonInterpreter, tree: Path, prefix: str
) -> None:
    """Copy every library that `tree` needs into its `lib`, and point all of its files there."""
    (tree / "lib").mkdir(exist_ok=True)
    await _LibraryCollector(programs, interpreter, tree).run()
    elves = await run_in_thread(lambda check: _find_elf_files(tree, interpreter, check))
    groups: dict[tuple[str, ...], list[Path]] = defaultdict(list)  # bound: the tree's files
    for path, elf in elves.items():
        options = _patch_options(path, elf, tree, f"{prefix}/lib", interpreter.loader.name)
        if options:
            groups[options].append(path)
    for options, files in sorted(groups.items()):
        for start in range(0, len(files), BATCH):
            await programs.run([patchelf, *options, *files[start : start + BATCH]], PATCHING)


class _LibraryCollector:
    """Copies the libraries that a tree's files need from this machine into the tree's `lib`."""

    def __init__(self, programs: ProgramRunner, interpreter: PythonInterpreter, tree: Path) -> None:
        self._programs = programs
        self._interpreter = interpreter
        self._tree = tree
        self._present: set[str] = set()  # bound: the libraries of the tree

    async def run(self) -> None:
        loader = self._interpreter.loader
        await self._copy_library(loader.name, loader)
        libc = (await self._copy_libraries(self._interpreter.executable)).get(LIBC)
        for name in OPENED_BY_LIBC:
            if libc is not None and name not in self._present and libc.with_name(name).exists():
                await self._copy_library(name, libc.with_name(name))
        elves = await run_in_thread(lambda check: _find_elf_files(self._tree, self._interpreter, check))
        for path, elf in elves.items():
            if not self._present.issuperset(elf.needed):
                await self._copy_libraries(self._original_path(path))

    async def _copy_libraries(self, file: Path) -> dict[str, Path]:
        """Copy the libraries that the loader finds for `file`; return all that it found.

        Libraries that it does not find were missing on this machine too.
        """
        listed = await self._programs.run([self._interpreter.loader, "--list", file], LISTING, (0, 1, 127))
        found = {name: Path(place) for name, place in LIBRARY_LINE.findall(listed) if "/" not in name}
        for name, place in found.items():
            # Compare names only: a process loads one library of a name.
            if name not in self._present and not place.is_relative_to(self._tree):
                await self._copy_library(name, place)
        return found

    async def _copy_library(self, name: str, place: Path) -> None:
        copy = self._tree / "lib" / name
        await run_in_thread(lambda check: shutil.copyfile(place, copy))
        copy.chmod(0o755)
        self._present.add(name)

    def _original_path(self, path: Path) -> Path:
        """Return the file's path on this machine if it is an extension of the standard library.

        Its search path may be relative to that location.
        """
        library = self._tree / self._interpreter.folder
        if not path.is_relative_to(library / "lib-dynload"):
            return path
        return self._interpreter.stdlib / path.relative_to(library)


def _find_elf_files(tree: Path, interpreter: PythonInterpreter, check: CancelCheck) -> dict[Path, ElfFile]:
    """Return the files that the interpreter's loader can load."""
    own = read_elf(interpreter.executable)
    found: dict[Path, ElfFile] = {}  # bound: the tree's files
    for path in sorted(tree.rglob("*")):
        check()
        if path.is_symlink() or not path.is_file():
            continue
        elf = read_elf(path)
        if elf is not None and elf.dynamic and own is not None and elf.machine == own.machine:
            found[path] = elf
    return found


def _patch_options(path: Path, elf: ElfFile, tree: Path, lib: str, loader: str) -> tuple[str, ...]:
    """Return the options of `patchelf` for a file; empty: leave it unchanged."""
    if path in (tree / "lib" / loader, tree / "lib" / LIBC):
        return ()  # they search for no libraries, and patching breaks them
    options: list[str] = []
    if Path(elf.loader).name == loader:
        options += ["--set-interpreter", f"{lib}/{loader}"]
    if elf.needed or elf.rpath:
        # RPATH instead of RUNPATH: it also applies to libraries opened at run time by the C library and
        # extensions.
        private = elf.rpath if "site-packages" in path.parts else ()
        own = [part for part in private if part.startswith(("$ORIGIN", "${ORIGIN}"))]
        options += ["--force-rpath", "--set-rpath", ":".join([*own, lib])]
    return tuple(options)
