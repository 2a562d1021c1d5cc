"""What a launcher gets by descriptors: the sandbox's variables, which its own environment never holds.

A variable such as `LD_PRELOAD` in the launcher's environment would run code outside of the sandbox, and
other users can read command lines. `process.py` says what is handed over, `command.py` starts the launcher.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from shlex import quote

from .entrance import NOT_ENTERED

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Variables that a shell refuses to change, or reads as its own.
OF_SHELLS = {"BASHOPTS", "BASH_VERSINFO", "EUID", "LINENO", "OPTIND", "PPID", "SHELLOPTS", "UID"}


class Handover:
    """Descriptors that one launcher inherits. Its owner closes it once the launcher has started."""

    def __init__(self, status: int | None = None) -> None:
        self.status = status  # where bubblewrap reports
        self.stdin = subprocess.DEVNULL
        self.fds = [] if status is None else [status]

    def put(self, content: bytes) -> int:
        """A descriptor from which the launcher reads `content`."""
        fd = os.memfd_create("holdwater")
        self.fds.append(fd)
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def start_bubblewrap(handover: Handover, bwrap: str, arguments: list[str], filter_: bytes) -> list[str]:
    """The words that a command's own follow: all that it sees and carries is in a descriptor."""
    if handover.status is not None:
        arguments = [*arguments, "--json-status-fd", str(handover.status)]
    if filter_:
        arguments = [*arguments, "--seccomp", str(handover.put(filter_))]
    return [bwrap, "--args", str(handover.put(_join(arguments))), "--"]


def _join(words: Iterable[str]) -> bytes:
    """Arguments as bubblewrap's `--args` reads them. A NUL in a word would begin another argument."""
    encoded = [os.fsencode(word) for word in words]
    if broken := next((word for word in encoded if b"\0" in word), None):
        raise ValueError(f"embedded null byte: {broken[:100]!r}")
    return b"".join(word + b"\0" for word in encoded)


def set_variables(variables: Mapping[str, str]) -> list[str]:
    """Bubblewrap's arguments that give the command its variables."""
    check_names(variables)
    return [word for name, value in variables.items() for word in ("--setenv", name, value)]


def render_settings(variables: Mapping[str, str], workdir: str) -> bytes:
    """A script that the entrance sources last: it enters the directory and sets the command's variables."""
    check_names(variables)
    if "\0" in "".join((workdir, *variables.values())):
        raise ValueError("embedded null byte")
    plain = {name for name in variables if NAME.fullmatch(name) and name not in OF_SHELLS}
    failed = f"echo {quote(f'holdwater: cannot enter {workdir}')} >&2; exit {NOT_ENTERED}"
    lines = [f"cd -P -- {quote(workdir)} 2>/dev/null || {{ {failed}; }}", "unset OLDPWD"]
    odd = [quote(f"{name}={value}") for name, value in variables.items() if name not in plain]
    if odd:
        lines.append(f'set -- /usr/bin/env -- {" ".join(odd)} "$@"')
    lines += [f"export {name}={quote(variables[name])}" for name in variables if name in plain]
    return os.fsencode("\n".join(lines) + "\n")


def check_names(variables: Mapping[str, str]) -> None:
    """Refuse names that no environment can hold."""
    for name in variables:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"illegal environment variable name: {name[:100]!r}")
