"""Lists the tasks of a taskset in a process of its own, which ends with the last task.

The package takes 180 MB, and a dataset takes more: the conductor, which lives as long as the run, loads
neither. `lister.py` is the process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import IO, Any

import msgspec

from ...core.environment import build_python_environment
from ...core.errors import BadInput
from ...core.records import Instance
from .lister import list_tasks
from .tasks import TaskDescription, TasksetFacts, make_instance

LISTER = [sys.executable, "-m", "holdwater.suite.verifiers.lister"]
LONGEST_REASON = 500


class TaskListing:
    """The tasks of one taskset. `check` starts the process, and `read_instances` goes on with it."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._begun: tuple[Iterator[dict[str, Any]], TasksetFacts] | None = None

    @property
    def facts(self) -> TasksetFacts:
        """Facts about the taskset; raise BadInput if it cannot be used."""
        if self._begun is None:
            lines = self._start()
            self._begun = lines, msgspec.convert(next(lines)["facts"], TasksetFacts)
        return self._begun[1]

    def read_instances(self) -> Iterator[Instance]:
        """Yield an instance for each task, as the taskset yields it."""
        assert self.facts
        assert self._begun is not None
        (lines, _), self._begun = self._begun, None
        for line in lines:
            if "task" in line:
                yield make_instance(msgspec.convert(line["task"], TaskDescription))

    def _start(self) -> Iterator[dict[str, Any]]:
        if "verifiers" in sys.modules:  # another process would only load the package once more
            return _check_lines(list_tasks(self._spec))
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - `_read_lines` closes it
        process = subprocess.Popen(
            [*LISTER, self._spec],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=build_python_environment(),
        )
        weakref.finalize(self, process.kill)
        return _read_lines(process, errors, self._spec)


def _read_lines(process: subprocess.Popen[bytes], errors: IO[bytes], spec: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of the process until its end; raise BadInput for a problem."""
    assert process.stdout is not None
    with process.stdout, errors:
        try:
            if (yield from _check_lines(map(msgspec.json.decode, process.stdout))):
                return
            process.wait()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:] or ["no reason given"]
            raise BadInput(f"the tasks of `{spec}` cannot be listed: {last[0][-LONGEST_REASON:]}")
        finally:
            process.kill()
            process.wait()


def _check_lines(lines: Iterable[dict[str, Any]]) -> Generator[dict[str, Any], None, bool]:
    """Yield the lines before the end, and return whether there is one; raise BadInput for a problem."""
    for line in lines:
        if "problem" in line:
            raise BadInput(line["problem"], line["hint"])
        if "end" in line:
            return True
        yield line
    return False
