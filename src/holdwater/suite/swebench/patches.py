"""Records a repository's initial state, takes the agent's changes as a patch, and applies patches.

All work is done by git in the sandbox, with a separate index and without the repository's hooks, filters or
settings, which an agent may have changed. Paths are relative to the working directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from ...core.authoring import GradingSandbox
from ...core.errors import AgentFailed, GradeFailed, SandboxFailed
from ...core.records import CommandResult, Instance, MiB

LARGEST_PATCH = 16 * MiB
TOO_LARGE = 75
NOT_APPLIED = 76
TAKEN_PATCH = ".git/holdwater.patch"
GIVEN_PATCH = ".git/holdwater.diff"

# These options override every setting that an agent could have changed. Replaced objects are ignored.
GIT = """\
export GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
g() {
  git --git-dir=.git --work-tree=. -c safe.directory='*' -c core.hooksPath=/dev/null \\
    -c core.fsmonitor=false -c core.untrackedCache=false -c core.splitIndex=false -c core.autocrlf=false \\
    -c core.sparseCheckout=false -c core.attributesFile=/dev/null -c core.quotePath=true -c gc.auto=0 \\
    -c user.name=holdwater -c user.email=holdwater@localhost "$@"
}
"""

# For a new sandbox. With an explicit `--git-dir`, git does not check the directory's owner.
PLAIN_GIT = """g() { git --git-dir=.git --work-tree=. -c core.hooksPath=/dev/null "$@" ; }"""

# Writes the working directory as a tree. `add -A` fails on nested repositories without a commit.
TREE = """\
export GIT_INDEX_FILE=.git/holdwater.index
rm -rf .git/holdwater.index .git/holdwater.index.lock
g read-tree "$from"
g add -A --ignore-errors . 2>/dev/null || {
  g add -u . ; g ls-files -z --others --exclude-standard | grep -zv '/$' | g update-index -z --add --stdin
}
tree=$(g write-tree)
rm -f .git/holdwater.index
"""

REMEMBER = f"""\
set -eu
{GIT}
from=HEAD
{TREE}
base=$(g rev-parse --verify HEAD)
if [ "$tree" != "$(g rev-parse --verify 'HEAD^{{tree}}')" ]; then
  base=$(g commit-tree -p HEAD -m 'the repository as it was found' "$tree")
fi
g update-ref refs/holdwater/base "$base"
"""

TAKE = f"""\
set -eu
{GIT}
from=refs/holdwater/base
{TREE}
rm -rf {TAKEN_PATCH}
g diff --binary --full-index --no-renames --no-color --no-ext-diff --no-textconv --ignore-submodules=none \\
  --src-prefix=a/ --dst-prefix=b/ --unified=3 refs/holdwater/base "$tree" > {TAKEN_PATCH}
[ "$(wc -c < {TAKEN_PATCH})" -le {LARGEST_PATCH} ] || exit {TOO_LARGE}
"""

# The methods of the reference, in its order; a failed one must leave no changes behind.
APPLY = f"""\
command -v git > /dev/null || exit 127
{PLAIN_GIT}
clean() {{ g checkout -q -- . ; g clean -qfd ; }}
g apply --verbose {GIVEN_PATCH} && exit
clean ; g apply --verbose --3way {GIVEN_PATCH} && exit
clean ; g apply --verbose --reject {GIVEN_PATCH} && exit
clean ; patch --batch --forward --fuzz=5 -p1 -i {GIVEN_PATCH} && exit
g apply --check --reverse {GIVEN_PATCH} && exit
exit {NOT_APPLIED}
"""

# Restores files to a commit; a file that is not in the commit is removed.
RESTORE = f"""\
base=$1 ; shift
{PLAIN_GIT}
g cat-file -e "$base^{{commit}}" || exit
for file; do
  rm -rf "./$file" || exit
  if g cat-file -e "$base:$file" 2>/dev/null; then g checkout -q "$base" -- "$file" || exit ; fi
done
"""
HEADER = re.compile(r'(?:---|\+\+\+|rename from|rename to|copy to) ("?)(?:[ab]/)?(.+?)\1(?:\t.*)?')
ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\"}


async def record_base(instance: Instance, sandbox: GradingSandbox) -> None:
    """Record the repository's initial state: changes made before the agent started are not its work."""
    result = await sandbox.run(["sh", "-c", REMEMBER])
    if not result.ok:
        raise SandboxFailed(
            f"no usable git repository in `{sandbox.workdir}`: {summarize_output(result)}",
            hint="set its path in the image with `?workdir=`",
            kind="setup",
        )


async def take_patch(instance: Instance, sandbox: GradingSandbox, answer: Any) -> str:
    """Return the agent's work as a patch: its answer if that is a patch, else its changes."""
    if isinstance(answer, Mapping) and "model_patch" in answer:
        return _check_patch(answer["model_patch"])
    result = await sandbox.run(["sh", "-c", TAKE])
    if result.exit_code == TOO_LARGE:
        raise GradeFailed(
            f"the agent's patch is larger than {LARGEST_PATCH // MiB} MiB", kind="patch", again=False
        )
    if not result.ok:
        raise GradeFailed(
            f"the agent's work cannot be taken as a patch: {summarize_output(result)}", kind="patch"
        )
    return (await sandbox.read(TAKEN_PATCH)).decode("utf-8", "surrogateescape")


async def apply_patch(patch: str, sandbox: GradingSandbox) -> CommandResult | None:
    """Apply a patch with the reference's methods; return the failed command's result, or None on success."""
    await sandbox.write(GIVEN_PATCH, patch.encode("utf-8", "surrogateescape"))
    result = await sandbox.run(["sh", "-c", APPLY])
    if result.exit_code not in (0, NOT_APPLIED) or result.timed_out:
        raise GradeFailed(f"cannot run the patch command: {summarize_output(result)}", kind="patch")
    return None if result.ok else result


async def restore_files(base: str, files: Sequence[str], sandbox: GradingSandbox) -> None:
    """Restore these files to their state in the commit `base`."""
    if not files:
        return
    result = await sandbox.run(["sh", "-c", RESTORE, "sh", base, *files])
    if not result.ok:
        raise GradeFailed(f"cannot restore the test files: {summarize_output(result)}", kind="restore")


def summarize_output(result: CommandResult) -> str:
    """Return the end of a command's output in one line."""
    return " ".join(result.output.split())[-500:] or f"status {result.exit_code}"


def _check_patch(patch: Any) -> str:
    if patch is None:
        return ""
    if not isinstance(patch, str):
        raise AgentFailed(f"`model_patch` must be text, not {type(patch).__name__}", kind="answer")
    return patch


def files_of(patch: str) -> list[str]:
    """Return the files that a git patch touches, in order and without duplicates."""
    found: dict[str, None] = {}
    heading = False
    for line in patch.splitlines():
        if line.startswith("diff --git "):
            heading = True
            for name in _common_name(line):
                found[name] = None
        elif line.startswith("@@ ") or line.startswith("GIT binary patch"):
            heading = False
        elif heading and (match := HEADER.fullmatch(line)) and match[2] != "/dev/null":
            found[_unquote_name(match[2]) if match[1] else match[2]] = None
    return list(found)


def as_command(patch: str) -> str:
    """Return a shell command that applies the patch in the working directory."""
    word = "EOF_" + sha256(patch.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    end = "" if patch.endswith("\n") else "\n"  # a binary patch ends with an empty line that must stay
    return f"git apply --whitespace=nowarn - <<'{word}'\n{patch}{end}{word}\n"


def _common_name(line: str) -> list[str]:
    """Return the name in `diff --git a/NAME b/NAME` if it is unquoted and the same on both sides."""
    names = line.removeprefix("diff --git ")
    half = len(names) // 2
    left, right = names[:half], names[half + 1 :]
    return [left[2:]] if left[:2] == "a/" and right == f"b/{left[2:]}" else []


def _unquote_name(quoted: str) -> str:
    """Decode a name that git quoted in C style."""

    def decode_escape(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else ESCAPES.get(code, code)

    return ESCAPE.sub(decode_escape, quoted.encode()).decode("utf-8", "surrogateescape")
