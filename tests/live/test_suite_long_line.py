"""A line of a gigabyte is an error with its place, not memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.wait_bounds import stretch

MEASURE = """
import resource, sys
from holdwater.core.errors import BadInput
from holdwater.suite.jsonl import jsonl
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    jsonl(sys.argv[1]).check()
except BadInput as error:
    print(error.message)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_line_beyond_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    with path.open("wb") as file:
        file.write(b'{"id": "a", "grade": "true"}\n{"id": "')
        file.truncate(1024**3)  # sparse: no disk, and no newline

    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)],
        capture_output=True,
        text=True,
        timeout=stretch(60),
        check=True,
    )

    message, grown = done.stdout.splitlines()
    assert message == "tasks.jsonl:2: the line is longer than 64 MiB"
    assert int(grown) < 200
