"""Read the commit of a git checkout, and whether the files there differ from it. Changes nothing.

`recipe_variables.py` puts the commit into the texts of a recipe.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from ..core.environment import SYSTEM_PATH, build_environment
from ..core.errors import BadInput
from ..core.records import MiB, Record
from ..ledger.pruning import is_run

GIT_SECONDS = 60.0
LONGEST_OUTPUT = 16 * MiB  # longer output is cut: it shows changes in any case
LONGEST_MESSAGE = 500
SHORT = 7  # characters; git's own abbreviation depends on the number of objects in a clone
DIRTY = "-dirty"


class GitCheckout(Record, frozen=True):
    """The commit of a checkout; both names end with `-dirty` if files differ from it."""

    sha: str
    short: str


def read_checkout(place: Path, variables: Mapping[str, str], packed: Sequence[Path]) -> GitCheckout:
    """Return the checkout in which the directory `place` lies. All paths are resolved.

    It is dirty if a tracked file of the checkout has changed. The files below `packed` go into an image, so
    an untracked file there counts too, unless git ignores it or a run directory holds it.
    """
    git = _GitProgram(place, variables)
    commit = git.run("rev-parse", "--verify", "HEAD").decode().strip()
    changed = git.run("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=none")
    dirty = DIRTY if changed or any(_list_untracked(git, packed)) else ""
    return GitCheckout(sha=commit + dirty, short=commit[:SHORT] + dirty)


class _GitProgram:
    """Runs git in one directory, without the settings by which a repository runs programs."""

    def __init__(self, place: Path, variables: Mapping[str, str]) -> None:
        self._place = place
        self._program = shutil.which("git", path=variables.get("PATH") or SYSTEM_PATH)
        if self._program is None:
            raise BadInput("program not found: `git`", "install `git`, or use a variable: `${NAME}`")
        home = {"HOME": variables["HOME"]} if "HOME" in variables else {}
        self._environment = build_environment(GIT_OPTIONAL_LOCKS="0", **home)

    def run(self, *words: str | Path) -> bytes:
        """Return the output; raise BadInput with git's own message."""
        command = [str(self._program), "-C", str(self._place), "-c", "core.fsmonitor=false", *map(str, words)]
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    timeout=GIT_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise BadInput(f"git did not answer within {GIT_SECONDS:g} s in `{self._place}`") from None
            for file in (output, errors):
                file.seek(0)
            if done.returncode:
                said = errors.readline(LONGEST_MESSAGE).decode("utf-8", "replace").strip()
                raise BadInput(f"no commit is known for `{self._place}`: {said.removeprefix('fatal: ')}")
            return output.read(LONGEST_OUTPUT)


def _list_untracked(git: _GitProgram, packed: Sequence[Path]) -> Iterator[Path]:
    """Yield the untracked files below these directories of the checkout, except those of run directories."""
    top = Path(os.fsdecode(git.run("rev-parse", "--show-toplevel").rstrip(b"\n")))
    inside = [directory for directory in packed if directory.is_relative_to(top)]
    if not inside:
        return
    is_run_directory = cache(is_run)  # bound: the directories with untracked files
    found = git.run("ls-files", "-z", "--full-name", "--others", "--exclude-standard", "--", *inside)
    for name in found.split(b"\0"):
        path = top / os.fsdecode(name)
        above = [directory for directory in path.parents if directory.is_relative_to(top)]
        if name and not any(map(is_run_directory, above)):
            yield path
