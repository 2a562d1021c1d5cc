"""Other users of the machine: a run is closed to them, and a run of theirs does not run code as us."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import SOURCE, Command
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api.serving import prepare_server
from holdwater.core.errors import BadInput

NOBODY = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
SUITE = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
import holdwater as hw

async def grade(instance, sandbox, answer):
    return True

async def act(instance, sandbox, model):
    print("said")
    await model.chat([{"role": "user", "content": "hello"}])
    await sandbox.run("echo work > work.txt; mkdir inner; echo more > inner/more.txt")

suite = hw.Suite(name="mine", instances=lambda: [hw.Instance(id="one")], grade=grade)
"""


def made(place: Path, *words: str, umask: str = "000") -> Path:
    """A run that the command made, as a user with a careless umask."""
    (place / "mine.py").write_text(SUITE)
    flags = ["--agent", f"{place}/mine.py:act", "--model", "scripted", "--out", f"{place}/run", "--quiet"]
    before = ["sh", "-c", f'umask {umask}; exec "$@"', "sh"]
    env = {"HOLDWATER_CACHE": str(place / "cache")}
    command = Command(place / "said", "run", f"{place}/mine.py:suite", *flags, *words, before=before, env=env)
    assert command.wait(120) == 0, command.stderr
    (place / "imported").unlink()
    return place / "run"


def open_to_others(place: Path) -> list[str]:
    paths = [place, *place.rglob("*")]
    return [
        f"{stat.S_IMODE(path.lstat().st_mode):04o} {path}" for path in paths if path.lstat().st_mode & 0o077
    ]


@pytest.mark.parametrize("workers", ["0", "1"])
def test_nothing_of_a_run_can_be_read_by_others(tmp_path: Path, workers: str) -> None:
    run = made(tmp_path, "--workers", workers)
    cache = tmp_path / "cache"

    assert open_to_others(run) == []
    assert len(list(run.rglob("*"))) > 10
    assert not cache.exists() or open_to_others(cache) == []


def test_a_directory_that_was_open_is_closed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    (tmp_path / "run").chmod(0o755)

    assert open_to_others(made(tmp_path, "--workers", "0")) == []


@ROOT_ONLY
def test_a_directory_of_another_user_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", NOBODY, NOBODY)

    with pytest.raises(BadInput, match="belongs to user `nobody`") as refused:
        hw.run("demo", "nop", out=tmp_path / "run")
    assert refused.value.hint == "give another `--out`"


@ROOT_ONLY
@pytest.mark.parametrize("given", ["run", "run/run.json"])
def test_code_of_a_run_of_another_user_is_named_and_not_imported(tmp_path: Path, given: str) -> None:
    run = made(tmp_path)
    os.chown(tmp_path / given, NOBODY, NOBODY)

    for verb in ("resume", "regrade", "replay"):
        done = subprocess.run(
            [sys.executable, "-m", "holdwater", verb, str(run)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            timeout=stretch(60),
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert f"`{tmp_path}/mine.py:suite`, `{tmp_path}/mine.py:act`" in done.stderr
        assert "user `nobody`" in done.stderr and "--trust" in done.stderr
        assert not (tmp_path / "imported").exists()
    assert hw.show(run).settled == 1  # reading imports nothing
    assert not (tmp_path / "imported").exists()

    assert hw.resume(run, trust=True).settled == 1
    assert (tmp_path / "imported").exists()


@ROOT_ONLY
@pytest.mark.parametrize("given", ["run", "run/run.json", "run/ledger.db"])
def test_a_server_does_not_go_on_with_the_orders_of_another_user(tmp_path: Path, given: str) -> None:
    words = [sys.executable, "-m", "holdwater", "serve", "demo", "--agent", "nop"]
    words += ["--listen", "127.0.0.1:0", "--out", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    first = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env)
    assert first.stderr is not None
    with first.stderr as lines:
        assert any(line.startswith("serving: ") for line in lines)
        first.send_signal(signal.SIGINT)
        assert first.wait(stretch(30)) in (0, 3)
    os.chown(tmp_path / given, NOBODY, NOBODY)

    again = subprocess.run(words, capture_output=True, text=True, env=env, timeout=stretch(60), check=False)

    assert again.returncode == 2
    assert again.stderr.startswith("error: the run belongs to user `nobody`")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_keys_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(mode)

    with pytest.raises(BadInput, match=f"its mode is {mode:04o}") as refused:
        prepare_server("demo", "oracle", tmp_path / "run", {}, {"key_file": keys})

    assert refused.value.hint == f"`chmod 600 {keys}`"
    keys.chmod(0o600)
    opener: Any = prepare_server("demo", "oracle", tmp_path / "run", {}, {"key_file": keys}).open_server
    assert opener.settings.keys == ("secret",)
