"""The way into a sandbox: a shell that enters the control groups, takes on rlimits and becomes the command.

So no command is ever outside, not for a moment. What the limits are is decided in `process.py`. The shell
starts with a clean environment: see `handover.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from resource import RLIMIT_NOFILE, getrlimit

from ..core.records import Limits
from . import tree
from .cgroup import Cgroup
from .quota import BLOCK

NOT_ENTERED = 125  # the status of the shell when it could not enter a control group
MOST_FILES = 65536  # open files of one process
AFTER_WARNING = 5  # seconds of CPU from SIGXCPU to SIGKILL


def entrance(group: Cgroup | None, limits: Limits, root: bool, *, sources: bool = False) -> list[str]:
    """The words that a command's own follow. With `sources` the shell runs its standard input before it."""
    places = group.entrances if group else []
    rlimits = "".join(f"{{ {rlimit}; }} 2>/dev/null; " for rlimit in _rlimits(group, limits, root))
    become = '. /proc/self/fd/0; exec "$@" </dev/null' if sources else 'exec "$@"'
    script = (
        "{ echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; "  # taken before the worker
        'n=$1; shift; while [ "$n" -gt 0 ]; do '
        '{ echo $$ >"$1"; } 2>/dev/null || '
        f'{{ echo "holdwater: cannot enter $1" >&2; exit {NOT_ENTERED}; }}; '
        f"shift; n=$((n-1)); done; {rlimits}{become}"
    )
    return ["/bin/sh", "-c", script, "sh", str(len(places)), *map(str, places)]


def _rlimits(group: Cgroup | None, limits: Limits, root: bool) -> Iterator[str]:
    """For each process, what no group holds for all of them."""
    yield "ulimit -c 0"
    soft, hard = (MOST_FILES if most < 0 else min(most, MOST_FILES) for most in getrlimit(RLIMIT_NOFILE))
    yield f"ulimit -S -n {soft}; ulimit -H -n {hard}"
    if limits.disk:
        yield f"ulimit -f {max(1, limits.disk // BLOCK)}"  # no file is larger than the whole may be
    data = limits.memory // 1024 if limits.memory and group is None else "unlimited"
    yield f"ulimit -S -d {data}"  # its worker has a limit of its own, which is not for it
    if limits.cpu_seconds and not (group and group.counts_cpu):
        seconds = math.ceil(limits.cpu_seconds)
        yield f"ulimit -S -t {seconds}; ulimit -H -t {seconds + AFTER_WARNING}"
    if limits.pids and not root and not (group and group.limits_pids):
        most = tree.tasks_of(os.getuid()) + limits.pids  # it counts all that the user has
        yield f"ulimit -u {most} || ulimit -p {most}"  # dash knows it by another letter
