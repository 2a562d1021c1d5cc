"""The changes of a git repository in the sandbox, in the records of OpenHands' SDK.

They are the changes since the branch left the default branch of `origin`; without an `origin`, since the last
commit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from openhands.sdk.git.exceptions import GitCommandError
from openhands.sdk.git.models import GitChange, GitChangeStatus, GitDiff

if TYPE_CHECKING:
    from .workspace import ToolSandbox

# Prints the commit, or the empty tree in a repository without commits.
BASE = """
cd "$1" || exit 1
git rev-parse --git-dir >/dev/null || exit 1
base=$(git merge-base HEAD origin/HEAD 2>/dev/null || git rev-parse --verify -q HEAD) ||
    base=$(git hash-object -t tree /dev/null)
"""
CHANGES = BASE + 'git -c core.quotePath=off --no-pager diff --no-renames --name-status --relative "$base"'
UNTRACKED = BASE + "git -c core.quotePath=off ls-files --others --exclude-standard"
ORIGINAL = BASE + 'git cat-file -e "$base:./$2" 2>/dev/null || exit 3; git --no-pager show "$base:./$2"'
ABSENT = 3  # exit status: the commit does not have the file
STATUSES = {"A": GitChangeStatus.ADDED, "D": GitChangeStatus.DELETED}


def list_changes(sandbox: ToolSandbox, path: str) -> list[GitChange]:
    """Return the changed and the new files below a directory of a repository."""
    changed = [line.partition("\t")[::2] for line in _run(sandbox, CHANGES, path).splitlines()]
    new = [("A", name) for name in _run(sandbox, UNTRACKED, path).splitlines()]
    return [
        GitChange(status=STATUSES.get(status[:1], GitChangeStatus.UPDATED), path=Path(name))
        for status, name in [*changed, *new]
    ]


def read_diff(sandbox: ToolSandbox, path: str) -> GitDiff:
    """Return a file's text before and now; the text is empty where there is no file."""
    directory, _, name = path.rpartition("/")
    original = _run(sandbox, ORIGINAL, directory or "/", name)
    try:
        modified = sandbox.read(path).decode(errors="replace")
    except OSError:
        modified = ""
    return GitDiff(modified=modified, original=original)


def _run(sandbox: ToolSandbox, script: str, *words: str) -> str:
    result = sandbox.run(["sh", "-c", script, "sh", *words])
    if result.ok or result.exit_code == ABSENT:
        return str(result.stdout)
    raise GitCommandError(
        message=f"git failed in {words[0]}: {result.stderr.strip()[-500:]}",
        command=["git"],
        exit_code=result.exit_code,
        stderr=result.stderr,
    )
