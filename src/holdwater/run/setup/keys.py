"""Removes secrets from the kernel's copies of environment and command line, before anything else runs.

Processes of the same user can read `/proc/PID/environ`, a copy of the environment that a process started
with, and all processes `/proc/PID/cmdline`. A library call leaves both unchanged: they belong to the caller.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path

KEY_ENDINGS = ("_KEY", "_KEYS", "_TOKEN")  # of all variables that hold keys
# The fields of `/proc/PID/stat` with the addresses, counted from the state.
ARGUMENTS_START = 45
ENVIRONMENT_STARTS = 47
VALUE_FLAG = "--env"  # its values are secrets
_taken: dict[str, str] = {}  # bound: `list_key_variables`, and the keys of servers


def take_keys() -> None:
    """Move the keys out of this process's environment and the values of `--env` out of its command line.

    That includes the kernel's copies.
    """
    if any(word.startswith(VALUE_FLAG) for word in sys.argv):
        _overwrite("cmdline", ARGUMENTS_START, _find_values)
    if not any(name.endswith(KEY_ENDINGS) for name in os.environ):
        return
    from ...dialect import list_key_variables  # takes a fifth of the time of `holdwater --help`

    take_variables(list_key_variables())


def take_variables(names: Iterable[str]) -> None:
    """Move these keys out of the environment; the user names them in the options."""
    found = {name: os.environ.pop(name) for name in names if name in os.environ}
    _taken.update(found)
    if found:
        _overwrite("environ", ENVIRONMENT_STARTS, lambda rows: _find_rows(rows, found))


def read_taken_keys() -> dict[str, str]:
    return dict(_taken)


def _find_rows(rows: list[bytes], names: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the variables among the rows of an environment: the number of the row, and where it is secret."""
    marks = tuple(f"{name}=".encode() for name in names)
    yield from ((number, 0) for number, row in enumerate(rows) if row.startswith(marks))


def _find_values(rows: list[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the words of a command line with a value of `--env`, and where the value starts."""
    flag = VALUE_FLAG.encode()
    for number, (before, row) in enumerate(pairwise(rows), start=1):
        name_starts = len(flag) + 1 if row.startswith(flag + b"=") else 0
        if before == flag or name_starts:
            name, equals, _ = row[name_starts:].partition(b"=")
            if equals:
                yield number, name_starts + len(name) + 1


def _overwrite(file: str, field: int, find: Callable[[list[bytes]], Iterable[tuple[int, int]]]) -> None:
    """Overwrite parts of a block of strings where the kernel reads it, if it is at the expected address."""
    import ctypes  # takes half the time of `holdwater --help`; most commands have no secret

    try:
        rows = Path(f"/proc/self/{file}").read_bytes().split(b"\0")
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return  # without `/proc` there is no copy to read
    start = int(stat.rpartition(")")[2].split()[field])
    addresses = list(accumulate((len(row) + 1 for row in rows), initial=start))
    for number, at in find(rows):
        address, row = addresses[number], rows[number]
        if ctypes.string_at(address, len(row)) == row:
            ctypes.memset(address + at, 0 if at == 0 else ord("x"), len(row) - at)
