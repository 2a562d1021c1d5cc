"""Builds the launcher: a shell that enters the control groups, sets rlimits and execs the command.

So no process of a command ever runs outside of its limits. `process.py` decides on the limits. The shell
starts with a clean environment: see `handover.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from resource import RLIMIT_NOFILE, getrlimit

from ..core.records import Limits
from . import process_usage
from .cgroup import ControlGroup
from .disk_usage import BLOCK

ENTRY_FAILED = 125  # the shell's exit status when it cannot enter a control group
MOST_FILES = 65536  # open files per process
AFTER_WARNING = 5  # seconds of CPU between SIGXCPU and SIGKILL


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
        most = process_usage.count_tasks(os.getuid()) + limits.pids  # NPROC counts all of a user's processes
        yield f"ulimit -u {most} || ulimit -p {most}"  # dash uses another letter
