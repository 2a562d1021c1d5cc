"""Find a Python of a version on this machine: on the `PATH`, in pyenv, or in uv's directory.

If there is none, uv installs one.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from ...core.errors import BadInput, ImageFailed
from .installer import find_uv
from .interpreter import QUESTION, InterpreterFacts, PythonInterpreter, make_interpreter
from .program import ProgramRunner

ASKING = 60.0  # seconds
DOWNLOADING = 600.0


async def find_interpreter(programs: ProgramRunner, version: str = "") -> PythonInterpreter:
    """Return a Python of `version`, such as `3.12`; without a version the one that runs this program.

    In a virtual environment, that is the Python that the environment was created from.
    """
    running = await _ask(programs, Path(sys.executable))
    if running is None:
        raise BadInput(f"this Python cannot be asked about itself: `{sys.executable}`")
    if not version or _fits(running, version):
        return make_interpreter(running)
    async for path in _list_candidates(programs, version):
        facts = await _ask(programs, path)
        if facts is not None and _fits(facts, version):
            return make_interpreter(facts)
    return await _install(programs, version)


async def _list_candidates(programs: ProgramRunner, version: str) -> AsyncIterator[Path]:
    name = "python" + ".".join(version.split(".")[:2])
    for directory in os.get_exec_path():  # all of them: the first may be a shim of pyenv for another version
        if shutil.which(name, path=directory):
            yield Path(directory) / name
    for root in (await _print_line(programs, ["pyenv", "root"]), str(Path.home() / ".pyenv")):
        for path in sorted(Path(root, "versions").glob(f"{version}*/bin/{name}"), reverse=True):
            yield path
    if (uv := find_uv()) is not None:
        options = ["--managed-python", "--no-project", "--no-python-downloads"]
        if found := await _print_line(programs, [uv, "python", "find", *options, version]):
            yield Path(found)


async def _install(programs: ProgramRunner, version: str) -> PythonInterpreter:
    problem = f"there is no Python {version} on this machine"
    hint = f"install it, for example with `uv python install {version}`"
    uv = find_uv()
    if uv is None:
        raise BadInput(problem, hint)
    try:
        await programs.run([uv, "python", "install", "--no-bin", version], DOWNLOADING)
    except ImageFailed as error:
        reason = error.message.partition("\n")[2].strip()
        raise BadInput(f"{problem}, and uv cannot install one: {reason}", hint) from error
    async for path in _list_candidates(programs, version):
        facts = await _ask(programs, path)
        if facts is not None and _fits(facts, version):
            return make_interpreter(facts)
    raise BadInput(problem, hint)


async def _ask(programs: ProgramRunner, python: Path) -> InterpreterFacts | None:
    """Return what the interpreter prints about itself; None if it is not one."""
    try:
        printed = await programs.run([python, "-I", "-c", QUESTION], ASKING)
        return msgspec.json.decode(printed, type=InterpreterFacts)
    except (ImageFailed, msgspec.DecodeError):
        return None


async def _print_line(programs: ProgramRunner, words: list[str]) -> str:
    """Return the line that a program prints; empty if it is not here, or fails."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        return (await programs.run(words, ASKING)).strip()
    except ImageFailed:
        return ""


def _fits(facts: InterpreterFacts, version: str) -> bool:
    wanted = tuple(int(part) for part in version.split("."))
    return facts.version[: len(wanted)] == wanted
