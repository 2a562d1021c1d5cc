"""What an ELF file asks of its loader: read from its headers, nothing is run or changed.

Where the answer is copied to and how files are changed is `linking.py`'s part.
"""

from __future__ import annotations

import struct
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

MAGIC = b"\x7fELF"
LOAD, DYNAMIC, INTERPRETER = 1, 2, 3  # program headers
NEEDED, STRINGS, RPATH, RUNPATH = 1, 5, 15, 29  # entries of the dynamic section


class Elf(NamedTuple):
    """A program or a shared library."""

    machine: tuple[int, int, int]  # 32 or 64 bit, byte order, processor: files of one kind fit together
    loader: str  # empty for what is not started as a program
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    dynamic: bool


def read_elf(path: Path) -> Elf | None:
    """None for anything that is no ELF file, or a broken one."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            return None
        try:
            return _read(file)
        except (struct.error, UnicodeDecodeError):
            return None


class _Segment(NamedTuple):
    kind: int
    offset: int
    address: int
    size: int


def _read(file: BufferedReader) -> Elf:
    bits, order = struct.unpack("BB", file.read(2))
    wide, sign = bits == 2, ">" if order == 2 else "<"
    file.seek(16)
    header = _unpack(file, sign + ("HHIQQQIHHH" if wide else "HHIIIIIHHH"))
    segments = _segments(file, header, sign, wide)
    dynamic = next((segment for segment in segments if segment.kind == DYNAMIC), None)
    loader = next((segment for segment in segments if segment.kind == INTERPRETER), None)
    entries = _entries(file, dynamic, sign + ("qQ" if wide else "iI")) if dynamic else []
    strings = next((value for tag, value in entries if tag == STRINGS), 0)

    def text(tag: int) -> list[str]:
        return [_text(file, segments, strings + value) for key, value in entries if key == tag]

    return Elf(
        machine=(bits, order, header[1]),
        loader=_string(file, loader.offset) if loader else "",
        needed=tuple(text(NEEDED)),
        rpath=tuple(part for paths in text(RUNPATH) or text(RPATH) for part in paths.split(":") if part),
        dynamic=dynamic is not None,
    )


def _segments(file: BufferedReader, header: tuple[int, ...], sign: str, wide: bool) -> list[_Segment]:
    start, size, count = header[4], header[8], header[9]
    segments = []
    for number in range(count):
        file.seek(start + number * size)
        if wide:
            kind, _, offset, address, _, length = _unpack(file, sign + "IIQQQQ")
        else:
            kind, offset, address, _, length = _unpack(file, sign + "IIIII")
        segments.append(_Segment(kind, offset, address, length))
    return segments


def _entries(file: BufferedReader, dynamic: _Segment, form: str) -> list[tuple[int, int]]:
    file.seek(dynamic.offset)
    section = file.read(dynamic.size)
    return list(
        struct.iter_unpack(form, section[: len(section) // struct.calcsize(form) * struct.calcsize(form)])
    )


def _text(file: BufferedReader, segments: list[_Segment], address: int) -> str:
    for segment in segments:
        if segment.kind == LOAD and segment.address <= address < segment.address + segment.size:
            return _string(file, segment.offset + address - segment.address)
    raise struct.error("an address that is not in the file")


def _string(file: BufferedReader, offset: int) -> str:
    file.seek(offset)
    return file.read(4096).split(b"\0", 1)[0].decode()


def _unpack(file: BufferedReader, form: str) -> tuple[int, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))
