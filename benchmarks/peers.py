"""Runs the same work on peers, each from PyPI in its own virtual environment, against the same upstream.

A run that takes too long is scaled down, and a peer that cannot run is skipped; the row says so. Our own runs
are in `flat_memory.py`; `peer_inspect.py` runs inside a peer's environment.
"""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

import work
from gauge import MB
from launch import HERE, Launched, anything, size_of, upstream
from launch import measured as launched
from table import Row, say

TALKS = 60  # scaled: its memory does not depend on the number of instances
INSTALLING = 1200.0  # seconds

NOT_RUN = {
    "OpenHands benchmarks": "not on PyPI",
    "Harbor, mini-swe-agent": "no adapter for this work here",
    "verifiers": "see `rollout_churn.py --peers`",
}


def measured(directory: Path, talks: int, images: int, rows: Sequence[str]) -> list[Row]:
    """Return the figures of peers for the selected rows, with at most `TALKS` talks."""
    found = [Row("not run", why, who=who) for who, why in NOT_RUN.items()]
    try:
        python = environment("inspect-ai", ("inspect-ai", "openai"))
    except (OSError, subprocess.SubprocessError) as error:
        return [Row("not run", f"cannot be installed: {error}", who="Inspect AI"), *found]
    mine: list[Row] = []
    if "1" in rows:
        mine += _inspect(python, directory, "text", min(talks, TALKS), work.SAID)
    if "2" in rows:
        mine += _inspect(python, directory, "images", images, 150_000)
    return [*mine, *found]


def _inspect(python: Path, directory: Path, kind: str, count: int, size: int) -> list[Row]:
    each = "10 KB" if kind == "text" else "150 KB image"
    scaled = " (scaled from 433)" if kind == "text" and count != 433 else ""
    what = f"{count} x {work.TURNS} turns x {each}{scaled}"
    say(f"Inspect AI: {what}")
    logs = directory / f"inspect-{kind}"
    script = [str(python), str(HERE / "peer_inspect.py"), kind, str(count), str(work.TURNS), str(size)]
    with upstream(work.TURNS, work.REPLIED) as url:
        command = [*script, url, str(logs)]
        ran = launched(command, directory / f"inspect-{kind}.log", anything, env={"INSPECT_DISPLAY": "none"})
    return _figures(what, ran, count * work.TURNS, logs, f"Inspect AI {version(python, 'inspect-ai')}")


def _figures(what: str, ran: Launched, turns: int, logs: Path, who: str) -> list[Row]:
    if ran.status != 0:
        return [Row(what, f"failed with status {ran.status}", who=who)]
    return [
        Row(f"{what}: peak memory", round(ran.watch.peak.total / MB, 1), "MB", who=who),
        Row(f"{what}: CPU a turn", round(1000 * ran.watch.cpu / turns, 2), "ms", who=who),
        Row(f"{what}: turns a second", round(turns / ran.seconds, 1), "1/s", who=who),
        Row(f"{what}: disk", round(size_of(logs) / MB, 1), "MB", who=who),
    ]


def environment(name: str, packages: Sequence[str]) -> Path:
    """Return the Python of an environment with these packages; it is created once, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "holdwater-benchmarks" / name
    python, whole = place / "bin" / "python", place / "whole"
    if not whole.exists():
        say(f"installing {' '.join(packages)} into {place}")
        venv.create(place, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(pip, check=True, timeout=INSTALLING, stdout=subprocess.DEVNULL)
        whole.touch()
    return python


def version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    asked = subprocess.run([str(python), "-c", code], check=True, timeout=60, capture_output=True, text=True)
    return asked.stdout.strip()
