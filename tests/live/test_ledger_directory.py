"""The run directory: creation, refusal, the remains of a killed creation, and the lock between processes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.ledger_runs import SOURCE, new_run

from holdwater.core.config import RunConfig
from holdwater.core.errors import BadInput, RunLocked
from holdwater.core.records import Limits
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.ledger import Ledger

HOLD = """
import sys
from holdwater.ledger.directory import RunDirectory
with RunDirectory(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.kill()


def test_what_was_asked_for_comes_back_whole(tmp_path: Path) -> None:
    directory = new_run(tmp_path / "deep" / "run", model="m", limits=Limits(acting=5.0), shard=(1, 3))

    config = RunDirectory.open(directory.path).read_config()

    assert (config.model, config.limits, config.shard) == ("m", Limits(acting=5.0), (1, 3))
    assert "retries" in json.loads(directory.config.read_bytes()), "a later default must not change the run"


def test_a_directory_that_holds_a_run_is_refused_with_a_hint(tmp_path: Path) -> None:
    directory = new_run(tmp_path / "run")

    with pytest.raises(BadInput) as refused:
        RunDirectory.create(directory.path)

    assert "holdwater resume" in refused.value.hint


@pytest.mark.parametrize("name", ["notes.txt", "ledger.db", "logs/old.log"])
def test_a_directory_with_foreign_files_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("precious")

    with pytest.raises(BadInput, match="not empty"):
        RunDirectory.create(tmp_path)

    assert mine.read_text() == "precious"
    assert not (tmp_path / "lock").exists()


def test_the_remains_of_a_killed_creation_are_reset(tmp_path: Path) -> None:
    Ledger.create(RunDirectory.create(tmp_path))
    (tmp_path / "run.json.new").write_text('{"id":')

    with pytest.raises(BadInput, match="never created") as refused:
        RunDirectory.open(tmp_path)
    assert "holdwater run --out" in refused.value.hint

    new_run(tmp_path)
    assert RunDirectory.open(tmp_path).read_config().id == "run-1"


def test_a_creation_that_is_under_way_is_not_reset(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path)
    Ledger.create(directory)

    with held_elsewhere(tmp_path), pytest.raises(RunLocked):
        RunDirectory.create(tmp_path)

    assert directory.database.exists()


def test_a_damaged_configuration_is_named_with_its_field(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    fields = json.loads(directory.config.read_bytes())
    directory.config.write_text(json.dumps({**fields, "retries": "two"}))

    with pytest.raises(BadInput, match=r"run\.json.*retries"):
        directory.read_config()


def test_a_second_conductor_learns_the_holder_of_the_run(tmp_path: Path) -> None:
    directory = new_run(tmp_path)

    with held_elsewhere(tmp_path) as child:
        holder = directory.find_holder()
        assert holder is not None and holder.pid == child.pid
        with pytest.raises(RunLocked, match=f"process {child.pid} on "), directory.lock():
            pass


def test_the_lock_dies_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    program = (
        "import subprocess, sys\n"
        "from holdwater.ledger.directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).lock():\n"
        "    child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, close_fds=False)\n"
        "    print(child.pid, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    with parent:
        assert parent.stdout is not None
        sleeper = int(parent.stdout.readline())
        try:
            assert directory.find_holder() is not None
            parent.kill()
            parent.wait()
            assert directory.find_holder() is None
            with directory.lock():
                pass
        finally:
            os.kill(sleeper, 9)


def test_readers_never_see_half_a_holder(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    over = threading.Event()
    torn: list[bytes] = []

    def look() -> None:
        while not over.is_set():
            content = (tmp_path / "lock").read_bytes()
            if set(json.loads(content or b"{}")) != {"pid", "host", "since"}:
                torn.append(content)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(300):
        with directory.lock():
            pass
    over.set()
    looking.join()

    assert torn == []


def test_asking_who_holds_a_run_does_not_keep_a_conductor_out(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    fd = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)  # as a reader does, for an instant
    threading.Timer(0.1, os.close, (fd,)).start()

    with directory.lock():
        assert directory.find_holder() is not None


def test_two_creations_at_once_make_one_run(tmp_path: Path) -> None:
    directory = new_run(tmp_path)

    with pytest.raises(BadInput, match="holds a run already"):
        directory.write_config(RunConfig(id="2", suite="s", agent="a", created=1.0, version="0"))
    with pytest.raises(BadInput, match="ledger already"):
        Ledger.create(directory)
