"""The process that lists the tasks of a taskset: `python -m holdwater.suite.verifiers.lister SPEC`.

It writes JSON lines: facts about the taskset first, then its tasks, then an end. `listing.py` reads them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from ...core.errors import BadInput
from .environment import check_environment, describe_rows, is_older_version, load_environment
from .package import LoadedTaskset
from .tasks import TaskDescription, TasksetFacts, make_absolute, parse_spec

_PR_SET_PDEATHSIG = 1


def main(spec: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # the taskset's own prints
        for line in list_tasks(spec):
            _write(out, line)


def list_tasks(spec: str) -> Iterator[dict[str, Any]]:
    """Yield the lines: the last one is `{"end": true}`, or a problem."""
    try:
        facts, tasks = (_open_environment if is_older_version() else _open_taskset)(spec)
        yield {"facts": msgspec.to_builtins(facts)}
        for task in tasks:
            yield {"task": msgspec.to_builtins(task)}
    except BadInput as error:
        yield {"problem": error.message, "hint": error.hint}
    except Exception as error:  # boundary: the taskset's own code  # noqa: BLE001
        frame = traceback.extract_tb(error.__traceback__)[-1]
        yield {"problem": f"{frame.filename}:{frame.lineno}: {type(error).__name__}: {error}", "hint": ""}
    else:
        yield {"end": True}


def _open_taskset(spec: str) -> tuple[TasksetFacts, Iterator[TaskDescription]]:
    taskset = LoadedTaskset(parse_spec(spec))
    taskset.check()
    toolsets, stops = tuple(taskset.list_toolsets()), tuple(taskset.list_stops())
    player = taskset.env_cls.__name__ if taskset.drives_turns else ""
    return TasksetFacts(taskset.cls.__name__, toolsets, stops, player), taskset.describe_tasks()


def _open_environment(spec: str) -> tuple[TasksetFacts, Iterator[TaskDescription]]:
    env = load_environment(spec)
    check_environment(env, parse_spec(spec))
    return TasksetFacts(type(env).__name__), describe_rows(env, make_absolute(spec))


def _write(out: BinaryIO, line: dict[str, Any]) -> None:
    out.write(msgspec.json.encode(line) + b"\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
