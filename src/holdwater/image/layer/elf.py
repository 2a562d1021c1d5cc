"""Read the headers of an ELF file: its loader, the libraries that it needs, its search paths.

This module runs and changes nothing; `linking.py` copies the libraries and patches the files.
"""

from __future__ import annotations

import struct
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

MAGIC = b"\x7fELF"
LOAD, DYNAMIC, INTERPRETER = 1, 2, 3  # program headers
NEEDED, STRINGS, RPATH, RUNPATH = 1, 5, 15, 29  # entries of the dynamic section


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
