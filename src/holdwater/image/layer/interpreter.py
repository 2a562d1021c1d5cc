"""Copy a Python of this machine into a tree, with its standard library and the shared libraries for it.

The result uses no files of the base and refers to no files of this machine. Needs `patchelf`.
`interpreter_search.py` finds the Python.
"""

from __future__ import annotations

import re
import shutil
import struct
from collections import defaultdict
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...core.errors import BadInput
from ...core.records import Record
from .program import CancelCheck, ProgramRunner, run_in_thread

MAGIC = b"\x7fELF"
LOAD, DYNAMIC, INTERPRETER = 1, 2, 3  # program headers
NEEDED, STRINGS, RPATH, RUNPATH = 1, 5, 15, 29  # entries of the dynamic section
# Directories and files of the standard library that no agent needs.
LEFT_OUT = (
    *("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "__pycache__"),
    *("site-packages", "dist-packages", "config-*"),
    *("_tkinter.*", "_test*", "_ctypes_test*", "_xx*", "xxlimited*", "*.a", "*.exe"),
)
BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",
)
SITE_CUSTOMIZE = """\
import os, site
site.addsitedir(os.path.join(os.path.dirname(__file__), "site-packages"))
"""
LISTING = 60.0  # seconds
PATCHING = 600.0  # seconds
BATCH = 200  # files for one call
LIBRARY_LINE = re.compile(r"^\s*(\S+) => (/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)
LIBC = "libc.so.6"
# Libraries that the C library opens at run time, so that no file lists them as needed: for names of hosts and
# users, and for the end of a thread.
OPENED_BY_LIBC = ("libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2", "libgcc_s.so.1")


class ElfFile(NamedTuple):
    """A program or a shared library."""

    machine: tuple[int, int, int]  # 32 or 64 bit, byte order, processor: only files with equal values link
    loader: str  # empty for a file that is not a program
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    dynamic: bool


def read_elf(path: Path) -> ElfFile | None:
    """Return the headers' content; None for a broken file, or one that is not ELF."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            return None
        try:
            return _parse_elf(file)
        except (struct.error, UnicodeDecodeError):
            return None


class _ElfSegment(NamedTuple):
    kind: int
    offset: int
    address: int
    size: int


def _parse_elf(file: BufferedReader) -> ElfFile:
    bits, order = struct.unpack("BB", file.read(2))
    wide, sign = bits == 2, ">" if order == 2 else "<"
    file.seek(16)
    header = _unpack(file, sign + ("HHIQQQIHHH" if wide else "HHIIIIIHHH"))
    segments = _read_segments(file, header, sign, wide)
    dynamic = next((segment for segment in segments if segment.kind == DYNAMIC), None)
    loader = next((segment for segment in segments if segment.kind == INTERPRETER), None)
    entries = _read_entries(file, dynamic, sign + ("qQ" if wide else "iI")) if dynamic else []
    strings = next((value for tag, value in entries if tag == STRINGS), 0)

    def text(tag: int) -> list[str]:
        return [_read_text(file, segments, strings + value) for key, value in entries if key == tag]

    return ElfFile(
        machine=(bits, order, header[1]),
        loader=_read_string(file, loader.offset) if loader else "",
        needed=tuple(text(NEEDED)),
        rpath=tuple(part for paths in text(RUNPATH) or text(RPATH) for part in paths.split(":") if part),
        dynamic=dynamic is not None,
    )


def _read_segments(file: BufferedReader, header: tuple[int, ...], sign: str, wide: bool) -> list[_ElfSegment]:
    start, size, count = header[4], header[8], header[9]
    segments = []
    for number in range(count):
        file.seek(start + number * size)
        if wide:
            kind, _, offset, address, _, length = _unpack(file, sign + "IIQQQQ")
        else:
            kind, offset, address, _, length = _unpack(file, sign + "IIIII")
        segments.append(_ElfSegment(kind, offset, address, length))
    return segments


def _read_entries(file: BufferedReader, dynamic: _ElfSegment, form: str) -> list[tuple[int, int]]:
    file.seek(dynamic.offset)
    section = file.read(dynamic.size)
    return list(
        struct.iter_unpack(form, section[: len(section) // struct.calcsize(form) * struct.calcsize(form)])
    )


def _read_text(file: BufferedReader, segments: list[_ElfSegment], address: int) -> str:
    for segment in segments:
        if segment.kind == LOAD and segment.address <= address < segment.address + segment.size:
            return _read_string(file, segment.offset + address - segment.address)
    raise struct.error("an address that is not in the file")


def _read_string(file: BufferedReader, offset: int) -> str:
    file.seek(offset)
    return file.read(4096).split(b"\0", 1)[0].decode()


def _unpack(file: BufferedReader, form: str) -> tuple[int, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


class PythonInterpreter(Record, frozen=True):
    """A Python on this machine."""

    executable: Path
    stdlib: Path
    loader: Path  # the dynamic loader, which starts it and finds its libraries
    version: tuple[int, int, int]
    platlibdir: str  # `lib`; `lib64` on some systems
    is_debian: bool  # it searches for packages only in Debian's directories
    identity: str

    @property
    def name(self) -> str:
        return f"python{self.version[0]}.{self.version[1]}"

    @property
    def folder(self) -> str:
        """The standard library's path, relative to the installation prefix."""
        return f"{self.platlibdir}/{self.stdlib.name}"


class InterpreterFacts(msgspec.Struct):
    """The facts that an interpreter prints about itself."""

    executable: str
    stdlib: str
    version: tuple[int, int, int]
    platlibdir: str
    schemes: list[str]
    identity: str


# A program that prints `InterpreterFacts`. It runs in the interpreter that is asked, of any version.
QUESTION = """\
import json, os, platform, ssl, sys, sysconfig
parts = (sys.version, sys.implementation.cache_tag, sysconfig.get_platform()) + platform.libc_ver()
print(json.dumps({
    "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "stdlib": sysconfig.get_path("stdlib"),
    "version": sys.version_info[:3],
    "platlibdir": getattr(sys, "platlibdir", "lib"),
    "schemes": sysconfig.get_scheme_names(),
    "identity": " ".join([str(part) for part in parts] + [ssl.OPENSSL_VERSION]),
}))
"""


def make_interpreter(facts: InterpreterFacts) -> PythonInterpreter:
    """Return the interpreter; raise BadInput if it cannot be copied."""
    executable = Path(facts.executable)
    elf = read_elf(executable)
    if elf is None or not elf.loader:
        raise BadInput(
            f"this Python cannot be copied into a layer: `{executable}` is not a dynamic ELF program"
        )
    return PythonInterpreter(
        executable=executable,
        stdlib=Path(facts.stdlib),
        loader=Path(elf.loader),
        version=facts.version,
        platlibdir=facts.platlibdir,
        is_debian="deb_system" in facts.schemes,
        identity=facts.identity,
    )


def copy_interpreter(interpreter: PythonInterpreter, tree: Path, check: CancelCheck) -> None:
    """Copy the program and the standard library, without files specific to this machine. Blocks."""
    (tree / "bin").mkdir(parents=True)
    shutil.copyfile(interpreter.executable, tree / "bin" / interpreter.name)
    (tree / "bin" / interpreter.name).chmod(0o755)
    for other in ("python", "python3"):
        (tree / "bin" / other).symlink_to(interpreter.name)

    def left_out(directory: str, names: list[str]) -> list[str]:
        check()
        paths = [Path(directory, name) for name in names]  # a path that does not exist is a dangling link
        return [p.name for p in paths if any(fnmatch(p.name, one) for one in LEFT_OUT) or not p.exists()]

    library = tree / interpreter.folder
    shutil.copytree(interpreter.stdlib, library, ignore=left_out, copy_function=shutil.copyfile)
    for extension in library.glob("lib-dynload/*.so"):
        extension.chmod(0o755)
    if interpreter.is_debian:
        (library / "sitecustomize.py").write_text(SITE_CUSTOMIZE)


def find_authorities(library: Path) -> Path:
    """Return the CA certificates to ship: those of the agent's own `certifi`, or of this machine."""
    own = library / "site-packages/certifi/cacert.pem"
    found = own if own.is_file() else find_machine_bundle()
    if found is None:
        hint = "let the agent depend on `certifi`, or install `ca-certificates`"
        raise BadInput("no CA certificates found to ship with the agent", hint)
    return found


def find_machine_bundle() -> Path | None:
    return next((path for path in map(Path, BUNDLES) if path.is_file()), None)


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
