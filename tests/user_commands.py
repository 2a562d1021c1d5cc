"""Commands of holdwater as root and as an ordinary user, each in a directory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

ROOT = Path(__file__).parents[1]
PACKAGES = [path for path in sys.path if path.endswith("site-packages")]
ORDINARY = 40_000 + os.getpid() % 10_000  # a user that no other test is at the same time
PYTHONS = (sys.executable, "/usr/bin/python3")


def users() -> list[int]:
    """Root and an ordinary user, as far as this process can be them."""
    return [0, ORDINARY] if os.geteuid() == 0 else [os.geteuid()]


def name_user(user: object) -> str | None:
    """The name of a parameter: the number of an ordinary user is another in each process of the tests."""
    return {0: "root", ORDINARY: "ordinary"}.get(user) if isinstance(user, int) else None


@contextmanager
def staged(user: int) -> Iterator[Path]:
    """A directory of `user` outside of `/tmp`, which every sandbox has of its own."""
    place = Path("/var/lib" if os.geteuid() == 0 else Path.home(), f"holdwater-users-{os.getpid()}-{user}")
    place.mkdir(mode=0o755)
    try:
        os.chown(place, user, -1)
        yield place
    finally:
        shutil.rmtree(place)


def run_as(user: int, words: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a program as `user`, with the packages of this environment."""
    identity = {"user": user, "group": user, "extra_groups": []} if os.geteuid() == 0 and user else {}
    variables = {
        "PATH": os.defpath,
        "HOME": "/nonexistent",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *PACKAGES]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        words, cwd="/", env=variables, capture_output=True, text=True, timeout=timeout, **identity
    )


@cache
def find_python(user: int) -> str:
    """An interpreter that this user can run holdwater with."""
    for python in PYTHONS:
        try:
            if run_as(user, [python, "-c", "import holdwater.api.runs, pytest"], stretch(30)).returncode == 0:
                return python
        except OSError:
            continue
    assert os.environ.get("CI") != "true", f"no interpreter can be run by user {user}"
    pytest.skip(f"no interpreter can be run by user {user}")
