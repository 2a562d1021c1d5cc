"""The `swebench` package, asked in a process of its own: `judge.py` is what runs there.

Importing it whole takes 160 MB, and reads what a foreign repository printed by regular expressions that could
hold this process for long. Only this module knows whether it is there, and which one.
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import BadInput, GradeFailed
from ...core.helper_environment import build_python_environment

INSTALL = "pip install 'holdwater[swebench]'"
SECONDS = 300.0
LONGEST_REASON = 500
JUDGE = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("judge.py"))]


def needed(module: str) -> Any:
    """A module that the extra brings."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise _missing(module.partition(".")[0]) from None


def check() -> None:
    """BadInput where the package is missing."""
    if util.find_spec("swebench") is None:
        raise _missing("swebench")


@cache
def version() -> str:
    check()
    return metadata.version("swebench")


@cache
def parsers() -> frozenset[str]:
    """The names of the log parsers that it has."""
    try:
        done = subprocess.run(
            JUDGE,
            input=b'{"do":"parsers"}',
            capture_output=True,
            timeout=SECONDS,
            env=build_python_environment(),
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"swebench {version()} did not say within {SECONDS:g} s what it knows") from None
    if done.returncode:
        raise BadInput(f"swebench {version()} cannot be used: {_last_line(done.stderr)}", hint=f"`{INSTALL}`")
    return frozenset(msgspec.json.decode(done.stdout, type=list[str]))


def check_classic(repo: str, version_: str) -> None:
    """A ValueError where a row without a script of its own cannot be graded: only the fourth has scripts."""
    if int(version().partition(".")[0]) >= 5:
        raise ValueError(
            f"field `eval_script`: missing, and swebench {version()} makes none: take the benchmark's current"
            " rows, or `pip install 'swebench<5'`"
        )
    if not repo or not version_:
        raise ValueError("field `version`: missing, and without it there is no script for the row")


async def ask(request: dict[str, Any]) -> Any:
    """What the reference says; GradeFailed where it fails or takes too long."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *JUDGE, stdin=pipe, stdout=pipe, stderr=pipe, env=build_python_environment()
    )
    try:
        async with asyncio.timeout(SECONDS):
            out, err = await process.communicate(msgspec.json.encode(request))
    except TimeoutError:
        raise GradeFailed(f"the test output was not read within {SECONDS:g} s", kind="timeout") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise GradeFailed(f"swebench {version()} failed: {_last_line(err)}", kind="reference")
    return msgspec.json.decode(out)


def _missing(module: str) -> BadInput:
    return BadInput(f"SWE-bench needs the package `{module}`, which is not installed", hint=f"`{INSTALL}`")


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][-LONGEST_REASON:] if lines else "no reason given"
