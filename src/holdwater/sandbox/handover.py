"""Passes a sandbox's variables to its launcher by descriptors, never by the launcher's own environment.

A variable such as `LD_PRELOAD` in the launcher's environment would run code outside of the sandbox, and other
users can read command lines. `process.py` selects the variables; `command.py` starts the launcher.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from shlex import quote

from .launcher import ENTRY_FAILED

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Variables that a shell refuses to change or uses itself.
SHELL_VARIABLES = {"BASHOPTS", "BASH_VERSINFO", "EUID", "LINENO", "OPTIND", "PPID", "SHELLOPTS", "UID"}


class DescriptorHandover:
    """The descriptors that one launcher inherits. The owner closes them once the launcher has started."""

    def __init__(self, status: int | None = None) -> None:
        self.status = status  # descriptor for bubblewrap's report
        self.stdin = subprocess.DEVNULL
        self.fds = [] if status is None else [status]

    def put(self, content: bytes) -> int:
        """Return a descriptor from which the launcher reads `content`."""
        fd = os.memfd_create("holdwater")
        self.fds.append(fd)
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def build_bwrap_argv(
    handover: DescriptorHandover, bwrap: str, arguments: list[str], filter_: bytes
) -> list[str]:
    """Return the words before the command's argv; all bubblewrap arguments go into a descriptor."""
    if handover.status is not None:
        arguments = [*arguments, "--json-status-fd", str(handover.status)]
    if filter_:
        arguments = [*arguments, "--seccomp", str(handover.put(filter_))]
    return [bwrap, "--args", str(handover.put(_join(arguments))), "--"]


def _join(words: Iterable[str]) -> bytes:
    """Encode arguments for bubblewrap's `--args`. A NUL in a word would start another argument."""
    encoded = [os.fsencode(word) for word in words]
    if broken := next((word for word in encoded if b"\0" in word), None):
        raise ValueError(f"embedded null byte: {broken[:100]!r}")
    return b"".join(word + b"\0" for word in encoded)


def render_setenv(variables: Mapping[str, str]) -> list[str]:
    """Return bubblewrap's arguments that set the command's variables."""
    check_names(variables)
    return [word for name, value in variables.items() for word in ("--setenv", name, value)]


def render_settings(variables: Mapping[str, str], workdir: str) -> bytes:
    """Return a script that the launcher sources last: it enters the directory and sets the variables."""
    check_names(variables)
    if "\0" in "".join((workdir, *variables.values())):
        raise ValueError("embedded null byte")
    plain = {name for name in variables if NAME.fullmatch(name) and name not in SHELL_VARIABLES}
    failed = f"echo {quote(f'holdwater: cannot enter {workdir}')} >&2; exit {ENTRY_FAILED}"
    lines = [f"cd -P -- {quote(workdir)} 2>/dev/null || {{ {failed}; }}", "unset OLDPWD"]
    odd = [quote(f"{name}={value}") for name, value in variables.items() if name not in plain]
    if odd:
        lines.append(f'set -- /usr/bin/env -- {" ".join(odd)} "$@"')
    lines += [f"export {name}={quote(variables[name])}" for name in variables if name in plain]
    return os.fsencode("\n".join(lines) + "\n")


def check_names(variables: Mapping[str, str]) -> None:
    """Refuse names that are invalid in an environment."""
    for name in variables:
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"illegal environment variable name: {name[:100]!r}")
