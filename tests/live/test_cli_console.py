"""The console in a real process: who reaches stdout, and what a closed or blocked stderr costs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.wait_bounds import stretch


def python(code: str, *words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", "from holdwater.cli.console import CommandConsole\n" + code, *words]
    settings = {"capture_output": True, "timeout": stretch(60), "env": environment(), **options}
    return subprocess.run(command, **settings)  # type: ignore[call-overload,no-any-return]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def close_stderr() -> None:
    os.close(2)


CLOSED = {"stderr": None, "stdout": subprocess.PIPE, "capture_output": False, "preexec_fn": close_stderr}
NOISE = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
console = CommandConsole.claim()
print("before the log is known")
console.divert(__import__("pathlib").Path(sys.argv[1]))
print("from python")
print("to stderr", file=sys.stderr)
os.write(1, b"from a raw write\\n")
libc.write(1, b"from C's write\\n", 15)
libc.printf(b"from C's printf\\n")
libc.fflush(None)
subprocess.run(["sh", "-c", "echo from a child; echo a child to stderr >&2"])
console.say("said")
console.write_json({"answer": [1, 2]})
console.flush(50)
"""
STRAYS = (
    "from python",
    "to stderr",
    "from a raw write",
    "from C's write",
    "from C's printf",
    "from a child",
    "a child to stderr",
)


def test_stray_prints_go_to_the_log_and_stdout_is_one_document(tmp_path: Path) -> None:
    log = tmp_path / "run.log"

    done = python(NOISE, str(log))

    assert json.loads(done.stdout) == {"answer": [1, 2]}
    assert done.stderr == b"said\n"
    written = log.read_text()
    assert [stray for stray in STRAYS if stray not in written] == []


def test_the_real_descriptors_are_not_inherited_by_children() -> None:
    code = """
import subprocess
console = CommandConsole.claim()
seen = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, close_fds=False).stdout.split()
console.write_json(seen)
"""
    done = python(code)

    assert set(json.loads(done.stdout)) <= {"0", "1", "2", "3"}  # 3: the directory that ls reads


def test_an_unread_stderr_does_not_block_the_command() -> None:
    reader, writer = os.pipe()
    code = """
console = CommandConsole.claim()
for number in range(2000):
    console.say(f"{number} " + "x" * 1000)
flushed = [console.flush(0.2), console.flush(1000)]
console.write_json({"dropped": console.dropped, "flushed": flushed})
"""
    try:
        done = python(code, stderr=writer, stdout=subprocess.PIPE, capture_output=False)
    finally:
        os.close(writer)
        os.close(reader)

    told = json.loads(done.stdout)
    assert done.returncode == 0
    assert told["dropped"] > 0 and told["flushed"] == [False, False]


@pytest.mark.parametrize("how", ["closed", "gone"])
def test_a_stderr_that_is_closed_costs_what_was_said_and_nothing_else(how: str) -> None:
    code = """
console = CommandConsole.claim()
console.say("to nobody")
first = console.flush(50)
console.say("to nobody again")
console.write_json({"first": first, "second": console.flush(50)})
"""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        if how == "closed":
            done = python(
                code, stderr=None, stdout=subprocess.PIPE, capture_output=False, preexec_fn=close_stderr
            )
        else:
            done = python(code, stderr=writer, stdout=subprocess.PIPE, capture_output=False)
    finally:
        os.close(writer)

    assert done.returncode == 0
    assert json.loads(done.stdout) == {"first": True, "second": True}


def test_a_file_of_ours_never_becomes_a_standard_descriptor(tmp_path: Path) -> None:
    code = """
import os, sys
console = CommandConsole.claim()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(2, b"a stray print")
console.write_json(fd)
"""
    done = python(
        code,
        str(tmp_path / "ours"),
        stderr=None,
        stdout=subprocess.PIPE,
        capture_output=False,
        preexec_fn=close_stderr,
    )

    assert json.loads(done.stdout) > 2
    assert (tmp_path / "ours").read_bytes() == b""


def test_all_data_arrives_through_a_stdout_that_was_made_non_blocking() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    command = [
        sys.executable,
        "-c",
        "from holdwater.cli.console import CommandConsole\n"
        "CommandConsole.claim().write_json('x' * 1_000_000)",
    ]
    with subprocess.Popen(command, stdout=writer, env=environment()) as child:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            received = pipe.read()

    assert child.returncode == 0
    assert json.loads(received) == "x" * 1_000_000


def test_reports_name_every_field_of_a_record() -> None:
    code = """
from holdwater.core.summary import RunGauge
CommandConsole().write_json([RunGauge(at=1.0)])
"""
    told = json.loads(python(code).stdout)

    assert told[0]["running"] == 0 and told[0]["waiting"] == {}


FRAME = """
import os, pty, select
screen, terminal = pty.openpty()
os.dup2(terminal, 2)
console = CommandConsole.claim()
console.terminal.draw("frame one\\nrow two")
console.flush(50)
console.say("a line")
console.flush(50)
console.terminal.draw("")
console.flush(50)
shown = b""  # a pseudo-terminal hands over in pieces, and later than the write
while not shown.endswith(b"\\x1b[2A\\r\\x1b[J") and select.select([screen], [], [], 10)[0]:
    shown += os.read(screen, 65536)
console.write_json(shown.decode())
"""


def test_lines_are_said_above_the_frame() -> None:
    done = python(FRAME, env={**environment(), "TERM": "xterm"})

    after = json.loads(done.stdout).replace("\r\n", "\n")
    first, rest = after.split("a line", 1)
    assert first.endswith("\x1b[2A\r")  # back over the two rows of the frame
    assert "frame one" in first and "frame one" in rest
    assert after.endswith("\x1b[2A\r\x1b[J")
