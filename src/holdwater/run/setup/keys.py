"""Removes the keys from the environment of the command at its start, before anything else runs.

Every process of the same user can read `/proc/PID/environ`, a copy of the environment that a process started
with. A library call leaves the environment of its process unchanged: it belongs to the caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

KEY_ENDINGS = ("_KEY", "_KEYS", "_TOKEN")  # of all variables that hold keys
ENVIRONMENT_STARTS = 47  # the field of `/proc/PID/stat` with the address, counted from the state
_taken: dict[str, str] = {}  # bound: `list_key_variables`


def take_keys() -> None:
    """Move the keys out of this process's environment, including the kernel's copy."""
    if not any(name.endswith(KEY_ENDINGS) for name in os.environ):
        return
    from ...dialect import list_key_variables  # takes a fifth of the time of `holdwater --help`

    found = {name: os.environ.pop(name) for name in list_key_variables() if name in os.environ}
    _taken.update(found)
    if found:
        _erase(found)


def read_taken_keys() -> dict[str, str]:
    return dict(_taken)


def _erase(names: Iterable[str]) -> None:
    """Overwrite the variables where the kernel reads them, if they are at the expected address."""
    import ctypes  # takes half the time of `holdwater --help`; most commands have no key

    try:
        block = Path("/proc/self/environ").read_bytes()
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return  # without `/proc` there is no copy to read
    address = int(stat.rpartition(")")[2].split()[ENVIRONMENT_STARTS])
    marks = tuple(f"{name}=".encode() for name in names)
    for row in block.split(b"\0"):
        if row.startswith(marks) and ctypes.string_at(address, len(row)) == row:
            ctypes.memset(address, 0, len(row))
        address += len(row) + 1
