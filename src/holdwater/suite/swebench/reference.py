"""Calls the `swebench` package in a separate process, which runs `judge.py`.

Importing the whole package takes 160 MB, and its regular expressions over untrusted output could block this
process for long. Only this module knows whether the package is installed, and in which version.
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from functools import cache
from importlib import util
from pathlib import Path
from typing import Any

import msgspec

from ...core.environment import build_python_environment
from ...core.errors import BadInput, GradeFailed

INSTALL = "pip install 'holdwater[swebench]'"
JUDGE_SECONDS = 300.0
LONGEST_REASON = 500
JUDGE = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("judge.py"))]


def import_extra(module: str) -> Any:
    """Import a module of the `swebench` extra; raise BadInput if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _missing_package(module.partition(".")[0]) from None


def check() -> None:
    """Raise BadInput if the `swebench` package is missing."""
    if util.find_spec("swebench") is None:
        raise _missing_package("swebench")


@cache
def version() -> str:
    from importlib import metadata  # a slow import, for which few runs have a use

    check()
    return metadata.version("swebench")


@cache
def parsers() -> frozenset[str]:
    """Return the names of the package's log parsers."""
    try:
        done = subprocess.run(
            JUDGE,
            input=b'{"do":"parsers"}',
            capture_output=True,
            timeout=JUDGE_SECONDS,
            env=build_python_environment(),
        )
    except subprocess.TimeoutExpired:
        raise BadInput(
            f"swebench {version()} did not list its log parsers within {JUDGE_SECONDS:g} s"
        ) from None
    if done.returncode:
        raise BadInput(f"swebench {version()} cannot be used: {_last_line(done.stderr)}", hint=f"`{INSTALL}`")
    return frozenset(msgspec.json.decode(done.stdout, type=list[str]))


def check_classic(repo: str, version_: str) -> None:
    """Raise a ValueError if a row without a script cannot be graded: only `swebench` 4 makes scripts."""
    if int(version().partition(".")[0]) >= 5:
        raise ValueError(
            f"field `eval_script`: missing, and swebench {version()} makes none: use the benchmark's current"
            " rows, or `pip install 'swebench<5'`"
        )
    if not repo or not version_:
        raise ValueError("field `version`: missing, and without it there is no script for the row")


async def ask_judge(request: dict[str, Any]) -> Any:
    """Send a request to the judge process; return its answer, or raise GradeFailed on failure or timeout."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *JUDGE, stdin=pipe, stdout=pipe, stderr=pipe, env=build_python_environment()
    )
    try:
        async with asyncio.timeout(JUDGE_SECONDS):
            out, err = await process.communicate(msgspec.json.encode(request))
    except TimeoutError:
        raise GradeFailed(
            f"the test output was not read within {JUDGE_SECONDS:g} s", kind="timeout"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise GradeFailed(f"swebench {version()} failed: {_last_line(err)}", kind="reference")
    return msgspec.json.decode(out)


def _missing_package(module: str) -> BadInput:
    return BadInput(f"SWE-bench needs the package `{module}`, which is not installed", hint=f"`{INSTALL}`")


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][-LONGEST_REASON:] if lines else "no reason given"
