"""A list of instance ids, from which `--select` chooses: a file, standard input, or a list of the library.

The order of the ids and repeated ids have no effect. In memory an id takes eight bytes beside the text of the
list. The run directory keeps the list, so a resume does not read the user's file again.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from blake3 import blake3

from ...core.config import SelectionRecord
from ...core.errors import BadInput
from ...core.records import MiB
from ...ledger.directory import RunDirectory

LARGEST_LIST = 64 * MiB
STANDARD_INPUT = "-"
BOM = b"\xef\xbb\xbf"


class InstanceSelection:
    """The chosen ids. `file` names them in errors."""

    def __init__(self, file: str, content: bytes) -> None:
        self.content = content
        self._file = file
        self._hashes = array("Q", sorted({_hash_id(name) for _, name in self._list_ids()}))
        if not self._hashes:
            raise BadInput(f"no instance id in `{file}`", "write one id per line")

    def __len__(self) -> int:
        return len(self._hashes)

    @property
    def record(self) -> SelectionRecord:
        digest = blake3(self.content).hexdigest()
        return SelectionRecord(file=self._file, ids=len(self), digest=digest)

    def find_position(self, name: str) -> int | None:
        """Return a number below `len` that is the id's own; None if the id is not chosen."""
        value = _hash_id(name)
        position = bisect_left(self._hashes, value)
        return position if position < len(self) and self._hashes[position] == value else None

    def list_missing(self, found: bytearray) -> Iterator[tuple[str, str]]:
        """Yield the ids whose position is 0 in `found`, with their places."""
        for number, name in self._list_ids():
            position = self.find_position(name)
            if position is not None and not found[position]:
                found[position] = 1
                yield f"{self._file}:{number}", name

    def _list_ids(self) -> Iterator[tuple[int, str]]:
        """Yield the ids with the numbers of their lines."""
        start = len(BOM) if self.content.startswith(BOM) else 0
        number = 0
        while start < len(self.content):
            end = self.content.find(b"\n", start)
            end = len(self.content) if end < 0 else end
            line, start, number = self.content[start:end].strip(), end + 1, number + 1
            if line and not line.startswith(b"#"):
                try:
                    yield number, line.decode()
                except UnicodeDecodeError as error:
                    place = f"{self._file}:{number}"
                    raise BadInput(f"{place}: not valid UTF-8: byte {error.start + 1}") from None


class SelectionMarks:
    """The chosen ids that one pass over a suite has found."""

    def __init__(self, selection: InstanceSelection) -> None:
        self._selection = selection
        self._found = bytearray(len(selection))
        self._left = len(selection)

    @property
    def complete(self) -> bool:
        return self._left == 0

    def mark(self, name: str) -> bool:
        """Return whether the id is chosen."""
        position = self._selection.find_position(name)
        if position is not None and not self._found[position]:
            self._found[position] = 1
            self._left -= 1
        return position is not None

    def list_missing(self) -> Iterator[tuple[str, str]]:
        """Yield the ids that are not found, with their places."""
        return self._selection.list_missing(bytearray(self._found))


def read_selection(source: str | Path | Sequence[str] | None) -> InstanceSelection | None:
    """Read the list of ids from a file or, for `-`, from standard input."""
    if source is None:
        return None
    if not isinstance(source, str | Path):
        return InstanceSelection("select", "\n".join(source).encode())
    name = "standard input" if str(source) == STANDARD_INPUT else str(source)
    try:
        content = _read_standard_input() if str(source) == STANDARD_INPUT else _read_start(Path(source))
    except OSError as error:
        raise BadInput(f"cannot read `{name}`: {error.strerror}") from None
    if len(content) > LARGEST_LIST:
        raise BadInput(f"the list of instances is larger than {LARGEST_LIST // MiB} MiB: `{name}`")
    return InstanceSelection(name, content)


def reopen_selection(directory: RunDirectory, record: SelectionRecord | None) -> InstanceSelection | None:
    """Return the selection of a run from the list in its directory."""
    if record is None:
        return None
    try:
        content = directory.selection.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read `{directory.selection}`: {error.strerror}") from None
    if blake3(content).hexdigest() != record.digest:
        raise BadInput(
            f"the list of instances has changed since the run was created: `{directory.selection}`",
            f"it was a copy of `{record.file}`; a run keeps its selection",
        )
    return InstanceSelection(record.file, content)


@cache
def _read_standard_input() -> bytes:
    """Read the list once: `check` prepares a run for each of its agents."""
    return sys.stdin.buffer.read(LARGEST_LIST + 1)


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(LARGEST_LIST + 1)


def _hash_id(name: str) -> int:
    return int.from_bytes(blake3(name.encode("utf-8", "surrogatepass")).digest(8), "big")
