"""Builds the launcher: a shell that enters the control groups, sets rlimits and execs the command.

So no process of a command ever runs outside of its limits. The launcher's own environment is clean: a
variable such as `LD_PRELOAD` in it would run code outside of the sandbox, and other users can read command
lines. The sandbox's variables reach it by descriptors. `process.py` decides on limits and variables.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from resource import RLIMIT_NOFILE, getrlimit
from shlex import quote

from ..core.records import Limits
from . import resource_usage
from .cgroup import ControlGroup
from .resource_usage import BLOCK

ENTRY_FAILED = 125  # the shell's exit status when it cannot enter a control group
MOST_FILES = 65536  # open files per process
AFTER_WARNING = 5  # seconds of CPU between SIGXCPU and SIGKILL

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Variables that a shell refuses to change or uses itself.
SHELL_VARIABLES = {"BASHOPTS", "BASH_VERSINFO", "EUID", "LINENO", "OPTIND", "PPID", "SHELLOPTS", "UID"}


def build_launcher(
    group: ControlGroup | None, limits: Limits, root: bool, *, sources: bool = False
) -> list[str]:
    """Return the words before a command's argv. With `sources` the shell sources its standard input first."""
    places = group.procs_files if group else []
    rlimits = "".join(f"{{ {rlimit}; }} 2>/dev/null; " for rlimit in _list_rlimits(group, limits, root))
    become = '. /proc/self/fd/0; exec "$@" </dev/null' if sources else 'exec "$@"'
    script = (
        "{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; "  # killed before the worker
        'n=$1; shift; while [ "$n" -gt 0 ]; do '
        '{ echo $$ >"$1"; } 2>/dev/null || '
        f'{{ echo "holdwater: cannot enter $1" >&2; exit {ENTRY_FAILED}; }}; '
        f"shift; n=$((n-1)); done; {rlimits}{become}"
    )
    return ["/bin/sh", "-c", script, "sh", str(len(places)), *map(str, places)]


def _list_rlimits(group: ControlGroup | None, limits: Limits, root: bool) -> Iterator[str]:
    """Yield the rlimits per process, for everything that no control group limits."""
    yield "ulimit -c 0"
    soft, hard = (MOST_FILES if most < 0 else min(most, MOST_FILES) for most in getrlimit(RLIMIT_NOFILE))
    yield f"ulimit -S -n {soft}; ulimit -H -n {hard}"
    if limits.disk:
        yield f"ulimit -f {max(1, limits.disk // BLOCK)}"  # no file may exceed the whole quota
    data = limits.memory // 1024 if limits.memory and group is None else "unlimited"
    yield f"ulimit -S -d {data}"  # resets the worker's own limit, which does not apply to commands
    if limits.cpu_seconds and not (group and group.counts_cpu):
        seconds = math.ceil(limits.cpu_seconds)
        yield f"ulimit -S -t {seconds}; ulimit -H -t {seconds + AFTER_WARNING}"
    if limits.pids and not root and not (group and group.limits_pids):
        most = resource_usage.count_tasks(os.getuid()) + limits.pids  # NPROC counts all of a user's processes
        yield f"ulimit -u {most} || ulimit -p {most}"  # dash uses another letter


class DescriptorHandover:
    """The descriptors that one launcher inherits. The owner closes them once the launcher has started."""

    def __init__(self, status: int | None = None) -> None:
        self.status = status  # descriptor for bubblewrap's report
        self.stdin = subprocess.DEVNULL
        self.fds = [] if status is None else [status]
        self.release = -1  # where a byte lets a held command start; the owner's to close

    def hold(self) -> int:
        """Return a descriptor on which bubblewrap waits before it starts the command."""
        held, self.release = os.pipe2(os.O_CLOEXEC)
        self.fds.append(held)
        return held

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
